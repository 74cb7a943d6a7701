#!/usr/bin/env python3
"""What a setting of the gateway costs: its CPU time per request, with it and without.

    cargo build --release --locked -p kvlane && python3 e2e/cost.py
    python3 e2e/cost.py 'plain=--set server.server_timing=false' 'recorded=--set recorder.dir=/tmp/recordings'
    SIZE=6000 EVENTS=8 REQUESTS=20000 python3 e2e/cost.py plain= 'alias@gpt=--config e2e/models/cost.yaml'
    CLIENTS=2 python3 e2e/cost.py 'alone=--worker-urls {other}' 'split=--worker-urls {other} --kv-connector lmcache --set disaggregation.split_tokens_min=1'

Each argument is a name, the model that is asked for (`m` if it is left out) and options of `kvlane serve`; the first is what the others are compared with. All gateways stand
beside one another and take turns, ROUNDS times each, so that what else the machine does meets all of them. Chats of SIZE
bytes are answered with streams of EVENTS tokens, to CLIENTS at once. Client and engines (`{other}` is the second) are this program;
only the CPU time of the gateways counts, from /proc: all of it, and the user part of it. Python's standard library only; Linux.
"""

import asyncio
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

KVLANE = os.environ.get("KVLANE", str(Path(__file__).resolve().parent.parent / "target" / "release" / "kvlane"))
ROUNDS = int(os.environ.get("ROUNDS", "12"))
REQUESTS = int(os.environ.get("REQUESTS", "2000"))
EVENTS = int(os.environ.get("EVENTS", "32"))
CLIENTS = int(os.environ.get("CLIENTS", "8"))
SIZE = int(os.environ.get("SIZE", "2300"))
TICK = os.sysconf("SC_CLK_TCK")
BODY = b'{"model":"%%s","stream":true,"messages":[{"role":"user","content":"%s"}]}' % (b"some words of a prompt " * (SIZE // 23))
EVENT = b'data: {"object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"content":" a"}}]}\n\n'
DEFAULT = [
    "nothing=--set server.server_timing=false",
    "Server-Timing=",
    "traces, none sampled=--otlp-traces-endpoint {collector} --set tracing.sample_ratio=0",
    "traces, a tenth=--otlp-traces-endpoint {collector} --set tracing.sample_ratio=0.1",
    "traces, all=--otlp-traces-endpoint {collector}",
]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


async def engine(reader, writer):
    """Lists one model, streams every chat, and takes spans."""
    stream = EVENT * EVENTS + b"data: [DONE]\n\n"
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
            await reader.readexactly(int(fields.get(b"content-length", 0)))
            line = head.split(b"\r\n", 1)[0]
            kind, body = b"application/json", b"{}"
            if b"/v1/models" in line:
                body = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
            elif b"/v1/chat/completions" in line:
                kind, body = b"text/event-stream", stream
            elif line.startswith(b"POST /v1/traces"):
                body = b""
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (kind, len(body), body))
            await writer.drain()
    except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
        pass
    finally:
        writer.close()


async def client(port, model, requests):
    body = BODY % model.encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(requests):
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(head.decode())
        if b"content-length" in head.lower():
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(length.split(b":")[1]))
        else:
            await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()


class Gateway:
    def __init__(self, name, options, engine_port, other_port):
        self.name, self.port, self.costs_us = name, free_port(), []
        self.model = name.partition("@")[2] or "m"
        url = f"http://127.0.0.1:{engine_port}"
        options = options.replace("{collector}", url).replace("{other}", f"http://127.0.0.1:{other_port}").split()
        self.process = subprocess.Popen(
            [KVLANE, "--log-level", "warn", "serve", "--port", str(self.port), "--prometheus-port", "0", *options,
             "--worker-urls", url],
        )

    def cpu_s(self):
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        user, kernel = int(fields[11]) / TICK, int(fields[12]) / TICK
        return user + kernel, user

    async def ready(self):
        for _ in range(600):
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name}: the gateway ended with {self.process.returncode}")
            try:
                return await client(self.port, self.model, 20)
            except (OSError, SystemExit):
                await asyncio.sleep(0.05)
        raise SystemExit(f"{self.name}: it is not ready")

    async def round(self):
        before = self.cpu_s()
        await asyncio.gather(*(client(self.port, self.model, REQUESTS // CLIENTS) for _ in range(CLIENTS)))
        self.costs_us.append([(now - then) / REQUESTS * 1e6 for now, then in zip(self.cpu_s(), before, strict=True)])


async def main():
    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    other = await asyncio.start_server(engine, "127.0.0.1", 0)
    ports = [each.sockets[0].getsockname()[1] for each in (server, other)]
    said = [each.partition("=") for each in sys.argv[1:] or DEFAULT]
    gateways = [Gateway(name, options, *ports) for name, _, options in said]
    try:
        for gateway in gateways:
            await gateway.ready()
        for n in range(ROUNDS):
            for gateway in gateways[n % len(gateways):] + gateways[: n % len(gateways)]:
                await gateway.round()
    finally:
        for gateway in gateways:
            gateway.process.terminate()
        for gateway in gateways:
            await asyncio.to_thread(gateway.process.wait)
        # Those that answered them see their connections close.
        await asyncio.sleep(0.1)
        server.close()
        other.close()
    for part, what in enumerate(("CPU", "user CPU")):
        print(f"{'':24} {what} per request, median of {ROUNDS} rounds of {REQUESTS}, {EVENTS} tokens each")
        first = [costs[part] for costs in gateways[0].costs_us]
        for gateway in gateways:
            costs = [costs[part] for costs in gateway.costs_us]
            # Round by round: both saw the same machine.
            more = [cost - other for cost, other in zip(costs, first, strict=True)]
            low, middle, high = statistics.quantiles(more, n=4)
            beside = f"{middle:+.1f} us (quartiles {low:+.1f} to {high:+.1f})" if gateway is not gateways[0] else ""
            print(f"{gateway.name:24} {statistics.median(costs):7.1f} us  {beside}")


asyncio.run(main())
