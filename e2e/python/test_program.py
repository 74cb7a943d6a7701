"""The program in the wheel: on the PATH, by `python -m kvlane`, and in sglang-router's place."""

import os
import subprocess
import sys
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import kvlane
from engines import Engine, free_port, request, start

from installed import PROGRAM, printed


class Mock(Engine):
    def __init__(self, number):
        self.port = free_port()
        super().__init__(f"python-mock-{number}", [PROGRAM, "mock-engine", "--port", str(self.port), "--speed", "50"])


class Launched(Engine):
    """`python -m kvlane.launch_router`, with a command line as it is written for sglang-router."""

    def __init__(self, *flags):
        self.port = free_port()
        command = [sys.executable, "-m", "kvlane.launch_router", "--host", "127.0.0.1", "--port", str(self.port), *flags]
        super().__init__("python-launched", command)

    def is_ready(self):
        self.check_alive()
        try:
            return request(self.port, "/readiness", timeout_s=5).status == 200
        except OSError:
            return False


class Program(unittest.TestCase):
    def test_the_program_and_the_module_have_one_version(self):
        said = f"kvlane {kvlane.__version__}\n"
        self.assertEqual(printed(PROGRAM, "--version"), said)
        self.assertEqual(printed(sys.executable, "-m", "kvlane", "--version"), said)

    def test_the_module_passes_arguments_output_and_status_on(self):
        self.assertEqual(printed(sys.executable, "-m", "kvlane", "simulate", "--list"), printed(PROGRAM, "simulate", "--list"))
        failed = subprocess.run([sys.executable, "-m", "kvlane", "simulate"], capture_output=True, text=True)
        self.assertEqual(failed.returncode, 1)
        self.assertIn("nothing to simulate", failed.stderr)

    def test_a_program_that_is_missing_is_looked_for_in_named_places(self):
        code = "from kvlane import _program; _program.places = lambda: iter([_program.Path('/nowhere/kvlane')]); _program.run([])"
        failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual(failed.returncode, 1)
        self.assertIn("/nowhere/kvlane; reinstall it", failed.stderr)

    def test_launch_router_takes_the_place_of_sglangs(self):
        engines = [Mock(n) for n in range(2)]
        start(engines)
        launched = Launched(
            "--worker-urls", *[engine.url for engine in engines], "--policy", "cache_aware", "--cache-threshold", "0.5",
            "--balance-abs-threshold", "32", "--prometheus-port", str(free_port()), "--max-payload-size", "1048576",
            "--retry-max-retries", "2", "--cb-failure-threshold", "5",
        )
        try:
            launched.wait_ready()
            (model,) = request(launched.port, "/v1/models").json()["data"]
            body = {"model": model["id"], "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
            answer = request(launched.port, "/v1/chat/completions", body)
            self.assertEqual(answer.status, 200)
            self.assertEqual(answer.json()["usage"]["completion_tokens"], 3)
            # It is the program, not a child that outlives this one.
            self.assertEqual(os.readlink(f"/proc/{launched.child.pid}/exe"), os.path.realpath(PROGRAM))
        finally:
            for process in (launched, *engines):
                process.stop()


if __name__ == "__main__":
    unittest.main()
