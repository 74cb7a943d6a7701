"""What `docs/openapi.yaml` says against what the gateway does: schemathesis makes requests of it, right and wrong ones,
to both ports, and holds every answer against it. Behind the gateway are mock engines.

    e2e/venv.sh api && e2e/.work/api/bin/python e2e/api/test_api.py -v
"""

import os
import subprocess
import sys
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engines import HERE, KVLANE, WORK, Engine, Gateway, free_port, request, start

DOCUMENT = HERE.parent / "docs" / "openapi.yaml"
# Per operation. More with EXAMPLES=200.
EXAMPLES = os.environ.get("EXAMPLES", "40")
SEED = os.environ.get("SEED", "6")

# What is asked of no operation, and why.
#   positive_data_acceptance: a URL or a model of the right form need not be one that there is.
#   negative_data_rejection, where engines answer: the gateway looks at a few fields of a body; the rest is theirs.
EXCLUDED = "positive_data_acceptance"
EXCLUDED_INFERENCE = f"{EXCLUDED},negative_data_rejection"


class Mock(Engine):
    def __init__(self, number):
        self.port = free_port()
        command = [KVLANE, "mock-engine", "--port", str(self.port), "--model", "mock", "--speed", "1000"]
        super().__init__(f"api-mock-{number}", command)


class Described(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        mocks = [Mock(number) for number in range(2)]
        for mock in mocks:
            cls.addClassCleanup(mock.stop)
        start(mocks)
        # Invented hosts must fail quickly: a probe of a host that does not exist takes long.
        cls.gateway = Gateway(mocks, "fleet_cost", "--set", "health.timeout=1s")
        cls.addClassCleanup(cls.gateway.stop)

    def holds(self, port, tag, excluded, *more):
        report = WORK / f"schemathesis-{tag}-{port}"
        command = [
            str(Path(sys.executable).with_name("schemathesis")), "run", str(DOCUMENT),
            "--url", f"http://127.0.0.1:{port}", "--include-tag", tag, "--checks", "all", "--exclude-checks", excluded,
            "--max-examples", EXAMPLES, "--seed", SEED, "--phases", "examples,coverage,fuzzing", "--continue-on-failure",
            "--suppress-health-check", "all", "--request-timeout", "30", "--warnings", "off", *more,
        ]
        done = subprocess.run(command, cwd=WORK, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        report.with_suffix(".log").write_text(done.stdout)
        self.assertEqual(done.returncode, 0, done.stdout[-8000:])
        print(f"{tag}:", *[line.strip() for line in done.stdout.splitlines() if "passed" in line or "generated" in line])
        self.gateway.check_alive()

    # In the order of their names: the last may remove every worker.

    def test_1_inference(self):
        self.holds(self.gateway.port, "inference", EXCLUDED_INFERENCE)

    def test_2_models_on_both_ports(self):
        for port in (self.gateway.port, self.gateway.admin_port):
            self.holds(port, "models", EXCLUDED)

    def test_3_state_on_both_ports(self):
        self.holds(self.gateway.port, "state", EXCLUDED, "--exclude-path", "/metrics")
        self.holds(self.gateway.admin_port, "state", EXCLUDED)

    def test_4_fleet_on_both_ports(self):
        for port in (self.gateway.port, self.gateway.admin_port):
            self.holds(port, "fleet", EXCLUDED)

    def test_5_it_is_still_well(self):
        self.assertEqual(request(self.gateway.admin_port, "/liveness").status, 200)
        self.assertEqual(self.gateway.in_flight(), (0, 0, 0))


if __name__ == "__main__":
    unittest.main()
