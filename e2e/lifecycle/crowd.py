#!/usr/bin/env python3
"""Ten thousand requests that wait for the first endpoint of an empty pool: what they hold, and how soon they are placed.

    cargo build --release --locked -p kvlane && python3 e2e/lifecycle/crowd.py [REQUESTS]

Each has a connection of its own. Prints the gateway's memory for each request and its CPU time while they wait, joins
workers of other models meanwhile, and then the worker they wait for. Exits with 1 if a request is not answered with 200.
Needs descriptors: `ulimit -n` above twice the number. Python's standard library only.
"""

import asyncio
import json
import os
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from engines import KVLANE, Engine, Process, free_port, metrics, request, until  # noqa: E402

REQUESTS = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
OTHERS = 8
PROMPT = "some words of a prompt " * 40


class Mock(Engine):
    def __init__(self, model):
        self.port = free_port()
        super().__init__(f"crowd-{model}", [
            KVLANE, "mock-engine", "--model", model, "--port", str(self.port), "--speed", "100", "--log-level", "warn",
            "--max-waiting-queue-length", str(2 * REQUESTS)])


def resident_kib(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def ask(port, number):
    """The status of one request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages = [{"role": "user", "content": f"{number} {PROMPT}"}]
    body = json.dumps({"model": "m", "max_tokens": 1, "messages": messages}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1])


async def crowd(gateway, port, admin_port):
    asks = [asyncio.create_task(ask(port, number)) for number in range(REQUESTS)]
    before_kib = resident_kib(gateway.child.pid)
    waiting = 0
    while waiting < REQUESTS:
        await asyncio.sleep(0.2)
        said = await asyncio.to_thread(metrics, admin_port)
        waiting = said.get("kvlane_waiting_for_endpoints", 0)
    held = (resident_kib(gateway.child.pid) - before_kib) / REQUESTS
    print(f"{REQUESTS} requests wait, {held:.1f} KiB each", flush=True)

    began, used = time.monotonic(), cpu_s(gateway.child.pid)
    others = [Mock(f"other-{n}") for n in range(OTHERS)]
    for other in others:
        await asyncio.to_thread(other.wait_ready)
        await asyncio.to_thread(request, admin_port, "/workers", {"url": other.url})
    await asyncio.sleep(2)
    used = cpu_s(gateway.child.pid) - used
    print(f"{OTHERS} workers of other models join within {time.monotonic() - began:.1f} s: {used:.2f} s of CPU", flush=True)

    engine = Mock("m")
    await asyncio.to_thread(engine.wait_ready)
    began, used = time.monotonic(), cpu_s(gateway.child.pid)
    await asyncio.to_thread(request, admin_port, "/workers", {"url": engine.url})
    while (await asyncio.to_thread(metrics, admin_port)).get("kvlane_waiting_for_endpoints", 0) > 0:
        await asyncio.sleep(0.02)
    woken = time.monotonic() - began
    statuses = await asyncio.gather(*asks, return_exceptions=True)
    used = cpu_s(gateway.child.pid) - used
    print(f"none waits {woken:.2f} s after its worker was added, all are answered after {time.monotonic() - began:.1f} s; "
          f"{used / REQUESTS * 1e6:.0f} us of CPU each", flush=True)
    for process in [engine, *others]:
        process.stop()
    return statuses


def main():
    port, admin_port = free_port(), free_port()
    command = [KVLANE, "serve", "--port", str(port), "--prometheus-port", str(admin_port), "--no-kv-events"]
    for setting in ["routing.empty_pool_timeout=10m", f"routing.queue_size={REQUESTS}", 'routing.pools={"m": {}}']:
        command += ["--set", setting]
    gateway = Process("crowd", command)
    until("it listens", lambda: gateway.check_alive() or is_up(admin_port), 60)
    statuses = asyncio.run(crowd(gateway, port, admin_port))
    gateway.stop()
    wrong = [status for status in statuses if status != 200]
    print(f"{len(statuses) - len(wrong)} answered with 200" + (f"; others: {wrong[:5]}" if wrong else ""))
    sys.exit(bool(wrong))


def is_up(admin_port):
    try:
        return request(admin_port, "/liveness").status == 200
    except OSError:
        return False


main()
