"""Runs divided among the workers of a real Ray, some of which are killed: the result has the bytes of one machine.

    e2e/venv.sh ray && e2e/.work/ray/bin/python e2e/ray/test_ray.py -v

Ray listens on all addresses, so all of this is in a network namespace with loopback only (Linux, `unshare` of util-linux, `ip`).
Needs the binary and the example `placement`: cargo build --release -p kvlane && cargo build --release -p kvlane-lab --example placement
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from engines import KVLANE, until

DISTRIBUTE = HERE.parents[1] / "deploy" / "ray" / "distribute.py"
PLACEMENT = os.environ.get("PLACEMENT", str(Path(KVLANE).parent / "examples" / "placement"))
# Starts Ray with two workers in the directory that is its argument, prints its address, and ends it with its stdin.
START = """
import sys, ray
started = ray.init(num_cpus=2, include_dashboard=False, _temp_dir=sys.argv[1], logging_level="error", log_to_driver=False)
print(started.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""
# Ray writes no token into the home directory, reports nothing, takes no proxy for loopback, and gives workers a share of busy cores.
ENVIRONMENT = os.environ | {
    "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0",
    "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
}
PARTS = 6
DRIVER_S_MAX = 600
SIMULATE = [
    KVLANE, "simulate", "--trace", "mooncake-conversation", "--engines", "8", "--policy", "round_robin,lmetric",
    "--seeds", "3", "--jobs", "1",
]


def processes():
    """Parent and command line of each process."""
    found = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
                words = (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            found[int(directory.name)] = (parent, words)
    return found


class Distributed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # Its sockets need short paths.
        cls.temporary = tempfile.mkdtemp(prefix="ray-")
        start = [sys.executable, "-c", START, cls.temporary]
        pipe = subprocess.PIPE
        cls.ray = subprocess.Popen(start, stdin=pipe, stdout=pipe, text=True, env=ENVIRONMENT)
        cls.addClassCleanup(cls.stop)
        cls.address = cls.ray.stdout.readline().strip()
        assert cls.address, "Ray did not start"

    @classmethod
    def stop(cls):
        cls.ray.communicate()
        shutil.rmtree(cls.temporary, ignore_errors=True)

    def setUp(self):
        self.directory = Path(tempfile.mkdtemp(prefix="kvlane-ray-"))
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)

    def distribute(self, command, *options):
        words = [sys.executable, DISTRIBUTE, "--address", self.address, "--parts", PARTS, *options, "--", *command]
        pipe = subprocess.PIPE
        return subprocess.Popen([str(word) for word in words], stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT)

    def completes(self, driver):
        stdout, stderr = driver.communicate(timeout=DRIVER_S_MAX)
        self.assertEqual(driver.returncode, 0, stderr[-3000:])
        return stdout

    def running(self):
        """Parts that a worker of this Ray is running: part, the worker's process and the program's."""
        all_processes = processes()

        def is_ours(process):
            while process in all_processes:
                if process == self.ray.pid:
                    return True
                process = all_processes[process][0]
            return False

        return {
            words[words.index("--part") + 1]: (parent, process)
            for process, (parent, words) in all_processes.items()
            if "--part" in words and is_ours(process)
        }

    def kills(self, victim):
        """Distributes a simulation, kills what `victim` picks of a running part, and compares the result."""
        whole, merged, parts = (self.directory / name for name in ("whole.json", "merged.json", "parts"))
        subprocess.run([*SIMULATE, "--json", whole], check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
        driver = self.distribute([*SIMULATE, "--json", merged], "--keep", parts)
        part, processes_of_part = until("a part runs", lambda: next(iter(self.running().items()), None), 120)
        killed = victim(*processes_of_part)
        os.kill(killed, signal.SIGKILL)
        self.assertFalse((parts / f"{part.replace('/', '-of-')}.jsonl").exists(), "it was killed in the middle")
        again = until("the part runs again", lambda: self.running().get(part, processes_of_part) != processes_of_part, 120)
        self.assertTrue(again)
        self.completes(driver)
        self.assertEqual(merged.read_bytes(), whole.read_bytes())
        # All parts are kept: nothing is run again.
        merged.unlink()
        self.completes(self.distribute([*SIMULATE, "--json", merged], "--keep", parts))
        self.assertEqual(merged.read_bytes(), whole.read_bytes())

    def test_a_worker_that_is_killed_changes_nothing(self):
        self.kills(lambda worker, program: worker)

    def test_a_program_that_is_killed_changes_nothing(self):
        self.kills(lambda worker, program: program)

    def test_the_placement_matrix(self):
        select = ["--only", "rag", "--policies", "round_robin,lmetric,fleet_cost", "--loads", "0.6,1", "--seeds", "4", "--threads", "1"]
        command = lambda store: [PLACEMENT, *select, "--store", self.directory / store]
        repository = HERE.parents[1]
        whole = subprocess.run(command("whole"), check=True, capture_output=True, text=True, cwd=repository).stdout
        self.assertIn("fleet_cost", whole)
        self.assertEqual(self.completes(self.distribute(command("parts"))), whole)

    def test_an_error_is_told_and_not_repeated(self):
        driver = self.distribute([KVLANE, "simulate", "--workload", "nope"])
        stderr = driver.communicate(timeout=DRIVER_S_MAX)[1]
        self.assertEqual(driver.returncode, 1)
        self.assertIn("unknown kind", stderr)


if __name__ == "__main__":
    if os.environ.get("IN_NAMESPACE") != "1":
        up = 'ip link set lo up && exec "$0" "$@"'
        words = ["unshare", "--map-root-user", "--net", "sh", "-c", up, sys.executable, *sys.argv]
        os.execvpe(words[0], words, os.environ | {"IN_NAMESPACE": "1"})
    unittest.main()
