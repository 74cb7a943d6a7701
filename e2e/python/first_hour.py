"""How long the first steps with the wheel take, each in a new virtual environment: until a request is routed to two vLLM servers
that run, and until the demo's table. Prints figures, asserts none.

    e2e/vllm/setup.sh && packaging/wheel.sh && e2e/.work/venv/bin/python e2e/python/first_hour.py target/wheels/kvlane-*.whl
"""

import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "e2e"), str(ROOT / "e2e" / "vllm")]

from engines import MODEL, Process, free_port, kill_all, request, start, until  # noqa: E402
from fleet import Vllm  # noqa: E402

ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "What is a KV cache?"}], "max_tokens": 16}


def installed(home, wheel):
    """The program, installed into a new virtual environment by the first command, and the seconds that this command takes."""
    venv.create(home, with_pip=True)
    bin = Path(home) / "bin"
    began = time.monotonic()
    subprocess.run([bin / "pip", "install", "--quiet", "--disable-pip-version-check", wheel], check=True)
    return bin / "kvlane", time.monotonic() - began


def answered(port):
    """The answer to the request, if there is a gateway and a worker that is up."""
    try:
        answer = request(port, "/v1/chat/completions", ASKED)
    except OSError:
        return None
    return answer if answer.status == 200 else None


def first_request(home, wheel):
    """Two commands: `pip install kvlane`, `kvlane serve --worker-urls ...`."""
    engines = [Vllm(0), Vllm(1)]
    start(engines)
    port = free_port()
    program, install_s = installed(home, wheel)
    began = time.monotonic()
    Process("kvlane-first", [program, "serve", "--port", str(port), "--worker-urls", *[engine.url for engine in engines]])
    by = until("a request is answered", lambda: answered(port)).headers["x-router-backend"]
    tell(install_s, time.monotonic() - began, f"kvlane serve until the answer of {by}")


def demo(home, wheel):
    """Two commands: `pip install kvlane`, `kvlane demo`."""
    program, install_s = installed(home, wheel)
    began = time.monotonic()
    subprocess.run([program, "demo"], check=True, stdout=subprocess.DEVNULL, cwd=home)
    tell(install_s, time.monotonic() - began, "kvlane demo")


def tell(install_s, then_s, what):
    print(f"pip install {install_s:.1f} s, {what} {then_s:.1f} s; together {install_s + then_s:.1f} s", flush=True)


if __name__ == "__main__":
    for step in (demo, first_request):
        with tempfile.TemporaryDirectory() as home:
            step(home, sys.argv[1])
            kill_all()
