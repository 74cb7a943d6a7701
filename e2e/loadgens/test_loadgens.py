"""Common load generators, unmodified, against the gateway in front of mock engines.

    e2e/venv.sh loadgens/aiperf && e2e/venv.sh loadgens/inference-perf && e2e/vllm/setup.sh
    python3 e2e/loadgens/test_loadgens.py -v

Each must send all it was told to, have every request answered, and have counted as many tokens as it had asked for.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from engines import KVLANE, WORK, Engine, Gateway, free_port, start, until

MODEL = "mock"
# A tokenizer without a download: that of the template tests.
TOKENIZER = HERE.parents[1] / "crates" / "kvlane-tokens" / "tests" / "data" / "tiny"
REQUESTS, OUTPUT_TOKENS, RUN_S_MAX = 24, 8, 300
# A proxy for the internet must not get in between.
DIRECT = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
# AIPerf takes no directory for a tokenizer when it is told that there is no network; it needs none for one.
OFFLINE = {"HF_HUB_OFFLINE": "1"}


class Mock(Engine):
    """`kvlane mock-engine`, fast."""

    def __init__(self, number):
        self.port = free_port()
        command = [KVLANE, "mock-engine", "--port", str(self.port), "--model", MODEL, "--speed", "20"]
        super().__init__(f"loadgens-mock-{number}", command)


class LoadGenerators(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        mocks = [Mock(number) for number in range(2)]
        for mock in mocks:
            cls.addClassCleanup(mock.stop)
        start(mocks)
        cls.gateway = Gateway(mocks, "fleet_cost")
        cls.addClassCleanup(cls.gateway.stop)

    def setUp(self):
        self.directory = Path(tempfile.mkdtemp(prefix="kvlane-loadgens-"))
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)

    def tearDown(self):
        until("nothing is in flight any more", lambda: self.gateway.in_flight() == (0, 0, 0))

    def run_program(self, suite, program, *args, environment=None):
        """Runs one of a suite's programs; skips where it is not installed."""
        path = WORK / suite / "bin" / program
        if not path.exists():
            self.skipTest(f"{path} is not there: see the head of this file")
        command = [str(path), *map(str, args)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=RUN_S_MAX, cwd=self.directory,
            env=os.environ | DIRECT | (environment or {}),
        )
        self.assertEqual(done.returncode, 0, (done.stdout + done.stderr)[-3000:])
        return done.stdout

    def test_vllm_bench_serve(self):
        for backend, path in [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]:
            with self.subTest(backend=backend):
                self.run_program(
                    "venv", "vllm", "bench", "serve", "--backend", backend, "--endpoint", path,
                    "--base-url", self.gateway.url, "--model", MODEL, "--tokenizer", TOKENIZER,
                    "--dataset-name", "random", "--random-input-len", 256, "--random-output-len", OUTPUT_TOKENS,
                    "--num-prompts", REQUESTS, "--max-concurrency", 6, "--ignore-eos", "--disable-tqdm",
                    "--save-result", "--result-dir", self.directory, "--result-filename", f"{backend}.json",
                    environment=OFFLINE,
                )
                report = json.loads((self.directory / f"{backend}.json").read_text())
                done = (report["completed"], report["total_output_tokens"])
                self.assertEqual(done, (REQUESTS, REQUESTS * OUTPUT_TOKENS))

    def test_aiperf(self):
        for endpoint in ["chat", "completions"]:
            with self.subTest(endpoint=endpoint):
                artifacts = self.directory / endpoint
                self.run_program(
                    "loadgens/aiperf", "aiperf", "profile", "--model", MODEL, "--url", self.gateway.url,
                    "--endpoint-type", endpoint, "--streaming", "--tokenizer", TOKENIZER,
                    "--synthetic-input-tokens-mean", 128, "--output-tokens-mean", OUTPUT_TOKENS,
                    "--extra-inputs", "ignore_eos:true", "--concurrency", 4, "--request-count", REQUESTS,
                    "--use-server-token-count", "--ui", "none", "--output-artifact-dir", artifacts,
                )
                report = json.loads(next(artifacts.rglob("profile_export_aiperf.json")).read_text())
                self.assertEqual(report["request_count"]["avg"], REQUESTS)
                self.assertEqual(report["output_sequence_length"]["avg"], OUTPUT_TOKENS)
                self.assertGreater(report["time_to_first_token"]["avg"], 0)

    def test_inference_perf(self):
        config = {
            "api": {"type": "completion", "streaming": True},
            "server": {
                "type": "vllm", "model_name": MODEL, "base_url": self.gateway.url, "ignore_eos": True,
            },
            "tokenizer": {"pretrained_model_name_or_path": str(TOKENIZER)},
            "data": {
                "type": "random",
                "input_distribution": {"min": 64, "max": 128, "mean": 96, "std_dev": 16, "total_count": REQUESTS},
                "output_distribution": {
                    "min": OUTPUT_TOKENS, "max": OUTPUT_TOKENS, "mean": OUTPUT_TOKENS, "std_dev": 0,
                    "total_count": REQUESTS,
                },
            },
            "load": {"type": "constant", "stages": [{"rate": 4, "duration": REQUESTS // 4}], "num_workers": 1},
            "storage": {"local_storage": {"path": str(self.directory / "reports")}},
        }
        file = self.directory / "config.yml"
        # JSON is YAML.
        file.write_text(json.dumps(config))
        self.run_program("loadgens/inference-perf", "inference-perf", "--config_file", file)
        report = json.loads(next((self.directory / "reports").rglob("summary_lifecycle_metrics.json")).read_text())
        self.assertEqual((report["successes"]["count"], report["failures"]["count"]), (REQUESTS, 0))
        self.assertEqual(report["successes"]["output_len"]["mean"], OUTPUT_TOKENS)


if __name__ == "__main__":
    unittest.main()
