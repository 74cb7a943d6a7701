"""How long the first steps with the wheel take, each in a new virtual environment: until a request is routed to two vLLM servers
that run, and until the demo's table. Prints figures, asserts none.

    e2e/vllm/setup.sh && packaging/wheel.sh && e2e/.work/venv/bin/python e2e/python/first_hour.py target/wheels/kvlane-*.whl
"""

import re
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


def environment():
    """The programs of a new virtual environment: not part of what is measured."""
    home = tempfile.mkdtemp(prefix="kvlane-first-")
    venv.create(home, with_pip=True)
    return Path(home) / "bin"


def installed(bin, wheel):
    """The first command, and the seconds that it takes."""
    began = time.monotonic()
    subprocess.run([bin / "pip", "install", "--quiet", "--disable-pip-version-check", wheel], check=True)
    return time.monotonic() - began


def answered(port):
    """The answer to the request, if there is a gateway and a worker that is up."""
    try:
        answer = request(port, "/v1/chat/completions", ASKED)
    except OSError:
        return None
    return answer if answer.status == 200 else None


def first_request(wheel):
    """Two commands: `pip install kvlane`, `kvlane serve --worker-urls ...`."""
    engines = [Vllm(0), Vllm(1)]
    start(engines)
    bin, port = environment(), free_port()
    install_s = installed(bin, wheel)
    began = time.monotonic()
    urls = [engine.url for engine in engines]
    Process("kvlane-first", [bin / "kvlane", "serve", "--port", str(port), "--worker-urls", *urls])
    answer = until("a request is answered", lambda: answered(port))
    serve_s = time.monotonic() - began
    by = answer.headers["x-router-backend"]
    print(f"pip install {install_s:.1f} s, kvlane serve until the answer of {by} {serve_s:.1f} s; together {install_s + serve_s:.1f} s")
    kill_all()


def demo(wheel):
    """Two commands: `pip install kvlane`, `kvlane demo`."""
    bin = environment()
    install_s = installed(bin, wheel)
    began = time.monotonic()
    shown = subprocess.run([bin / "kvlane", "demo"], check=True, capture_output=True, text=True, cwd=bin.parent)
    demo_s = time.monotonic() - began
    rows = len(re.findall(r"^ *(?:round_robin|fleet_cost|\w+_\w+) ", shown.stdout, re.M))
    print(f"pip install {install_s:.1f} s, kvlane demo {demo_s:.1f} s ({rows} rows); together {install_s + demo_s:.1f} s")


if __name__ == "__main__":
    wheel = sys.argv[1]
    try:
        demo(wheel)
        first_request(wheel)
    finally:
        kill_all()
