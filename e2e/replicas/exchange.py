#!/usr/bin/env python3
"""CPU time of the exchange: of the thread `replicas` of each gateway, and of all its other threads, at a rate of requests.

    cargo build --release -p kvlane --bin kvlane && cargo build --release -p kvlane-mock --example fixed_upstream
    KVLANE=target/release/kvlane e2e/replicas/exchange.py target/release/examples/fixed_upstream --gateways 8 --rates 0 250 1000

Streamed chats of which no two share a prompt, sent to the gateways in turns, on sixteen upstreams that cost next to nothing. Each line
is the mean of all gateways. Linux only: it reads `/proc`.
"""

import argparse
import asyncio
import json
import subprocess
import time
from pathlib import Path

from gateways import together

ENGINES = 16


def cpu_ms(replica):
    """CPU time of the thread `replicas` and of all threads, and how often that thread was woken."""
    exchange_ms = all_ms = wakes = 0.0
    for task in Path(f"/proc/{replica.child.pid}/task").iterdir():
        ms = int((task / "schedstat").read_text().split()[0]) / 1e6
        all_ms += ms
        if (task / "comm").read_text().strip() == "replicas":
            exchange_ms += ms
            wakes += int((task / "status").read_text().split("voluntary_ctxt_switches:")[1].split()[0])
    return exchange_ms, all_ms, wakes


class Load:
    """Requests at a rate, over connections that are kept."""

    def __init__(self, ports, tokens, gap_ms):
        self.ports, self.tokens, self.gap_ms = ports, tokens, gap_ms
        self.free = {port: [] for port in ports}
        self.number, self.done, self.failed = 0, 0, 0

    async def run(self, rate, seconds):
        tasks, began = set(), time.monotonic()
        for n in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + n / rate - time.monotonic()))
            task = asyncio.ensure_future(self._ask(self.ports[n % len(self.ports)]))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if not rate:
            await asyncio.sleep(seconds)
        elapsed_s = time.monotonic() - began
        return tasks, elapsed_s

    async def _ask(self, port):
        self.number += 1
        text = f"request {time.time_ns()} {self.number} " + "some words of a question " * 80
        body = json.dumps({"model": "tiny", "stream": True, "max_tokens": self.tokens, "seed": self.gap_ms,
                           "messages": [{"role": "user", "content": text}]}).encode()
        try:
            reader, writer = self.free[port].pop() if self.free[port] else await asyncio.open_connection("127.0.0.1", port)
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            # The last chunk of the answer is empty.
            answer = await reader.readuntil(b"\r\n0\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 200"):
                raise ValueError(answer[:100])
            self.free[port].append((reader, writer))
            self.done += 1
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            self.failed += 1


async def measure(replicas, load, rate, seconds):
    await load.run(rate, 3)
    before, done = [cpu_ms(replica) for replica in replicas], load.done
    sent = [replica.bytes("sent") for replica in replicas]
    tasks, elapsed_s = await load.run(rate, seconds)
    after, done = [cpu_ms(replica) for replica in replicas], load.done - done
    sent = sum(replica.bytes("sent") for replica in replicas) - sum(sent)
    if tasks:
        await asyncio.wait(tasks)
    each = elapsed_s * len(replicas)
    exchange, everything, wakes = (sum(b[n] - a[n] for a, b in zip(before, after)) / each for n in range(3))
    rest = everything - exchange
    print(f"{rate:8} {done / elapsed_s:10.0f} {exchange:16.2f} {rest:12.1f} {100 * exchange / max(rest, 1e-9):8.1f} % {wakes:8.0f} "
          f"{sent / each / 1e3:8.1f} {load.failed:6}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("upstream", help="the example fixed_upstream of kvlane-mock")
    parser.add_argument("--gateways", type=int, default=8)
    parser.add_argument("--rates", type=int, nargs="+", default=[0, 250, 1000], help="requests a second over all gateways")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--tokens", type=int, default=20, help="events of an answer")
    parser.add_argument("--token-ms", type=int, default=20, help="time between two of them")
    parser.add_argument("options", nargs="*", help="options of `kvlane serve`, after --")
    arguments = parser.parse_args()
    upstream = subprocess.Popen([arguments.upstream, str(ENGINES)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    urls = [upstream.stdout.readline().strip() for _ in range(ENGINES)]
    replicas = together(arguments.gateways, urls, ["--log-level", "warn", "--no-kv-events", *arguments.options], "exchange")
    print(f"{'rate':>8} {'answered/s':>10} {'exchange, ms/s':>16} {'rest, ms/s':>12} {'share':>10} {'wakes/s':>8} {'kB/s':>8} {'failed':>6}")
    try:
        load = Load([replica.port for replica in replicas], arguments.tokens, arguments.token_ms)

        async def all_rates():
            for rate in arguments.rates:
                await measure(replicas, load, rate, arguments.seconds)
        asyncio.run(all_rates())
    finally:
        for replica in replicas:
            replica.kill()
        upstream.stdin.close()
        upstream.wait()


main()
