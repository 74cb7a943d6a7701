#!/usr/bin/env python3
"""What hedging saves: two mock engines, one of which holds a prompt and then takes 200 times as long for each step.

    cargo build --release --locked -p kvlane && python3 e2e/hedge.py

Asks for first tokens through a gateway with `hedge.enabled`, and through one without. Python's standard library only.
"""

import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

KVLANE = os.environ.get("KVLANE", str(Path(__file__).resolve().parent.parent / "target/release/kvlane"))
PROMPT = "the same words of a long prompt " * 250
# Before any is late, 64 first tokens have been seen.
WARM = 80
ASKED = 5
SLOWER = 200


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def post(port, path, body):
    """The seconds until the first event with a token, and the worker that answered; the rest is not read."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    began = time.perf_counter()
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    if answer.status >= 300:
        sys.exit(f"{path}: {answer.status} {answer.read().decode()}")
    while line := answer.readline():
        if b'"content":"' in line and b'"content":""' not in line:
            break
    took = time.perf_counter() - began
    connection.close()
    return took, answer.headers.get("x-router-backend")


def chat(port, n):
    messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": f"question {n}"}]
    return post(port, "/v1/chat/completions", {"model": "m", "stream": True, "max_tokens": 4, "messages": messages})


def ready(port, workers):
    for _ in range(600):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/readiness")
            pools = json.loads(connection.getresponse().read())["pools"]
            if pools and pools[0]["ready"] == workers:
                return
        except (OSError, ValueError, KeyError):
            pass
        time.sleep(0.05)
    sys.exit("the gateway is not ready")


def measure(hedged):
    engines, processes = [], []
    try:
        for _ in range(2):
            port, control = free_port(), free_port()
            engines.append((f"http://127.0.0.1:{port}", control))
            processes.append(subprocess.Popen([
                KVLANE, "mock-engine", "--model", "m", "--port", str(port), "--control-port", str(control),
                "--log-level", "error"]))
        port, metrics_port = free_port(), free_port()
        command = [KVLANE, "serve", "--port", str(port), "--prometheus-port", str(metrics_port), "--log-level", "error"]
        command += ["--set", f"hedge.enabled={str(hedged).lower()}", "--worker-urls", *(url for url, _ in engines)]
        processes.append(subprocess.Popen(command))
        ready(metrics_port, len(engines))
        warm = [chat(port, n) for n in range(WARM)]
        holder = warm[-1][1]
        control = next(control for url, control in engines if holder.startswith(url))
        post(control, "/fault", {"fault": "slow", "factor": SLOWER})
        asked = [chat(port, WARM + n) for n in range(ASKED)]
        usual = statistics.median(took for took, _ in warm)
        tell = ", ".join(f"{took * 1000:.0f}" for took, _ in asked)
        print(f"hedging {'on' if hedged else 'off'}: usual {usual * 1000:.1f} ms; with the holder {SLOWER} times as slow {tell} ms")
    finally:
        for process in processes:
            process.kill()


for hedged in (False, True):
    measure(hedged)
