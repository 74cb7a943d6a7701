#!/usr/bin/env python3
"""How long it takes until an engine hears that a client has left, before the first byte of its answer and in mid-stream.

    cargo build --release --locked -p kvlane && python3 e2e/cancel.py

Client and engine are this program, so one clock sees both ends. Python's standard library only.
"""

import asyncio
import random
import socket
import subprocess
import sys
from pathlib import Path
from time import perf_counter

KVLANE = Path(__file__).resolve().parent.parent / "target/release/kvlane"
BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
CLIENTS = 200


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Engine:
    """Lists one model and answers chats that never end; records when the client has disconnected."""

    def __init__(self):
        self.gone = asyncio.Queue()

    async def serve(self, reader, writer):
        try:
            while await self.answer(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        writer.close()

    async def answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        fields = dict(line.split(": ", 1) for line in head.splitlines()[1:] if line)
        await reader.readexactly(int(fields.get("content-length", 0)))
        path = head.split()[1]
        if path != "/v1/chat/completions":
            listed = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
            body = listed if path == "/v1/models" else b"ok"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            return True
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        if fields["x-when"] == "mid-stream":
            writer.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
        try:
            await reader.read(1)
        except OSError:
            pass
        await self.gone.put(perf_counter())
        return False


async def leave(engine, port, when):
    """Milliseconds from a client's leaving to the engine's hearing of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-when: {when}\r\ncontent-length: {len(BODY)}\r\n\r\n"
    writer.write(head.encode() + BODY)
    if when == "mid-stream":
        await reader.readuntil(b"\n\n")
    await asyncio.sleep(random.uniform(0.01, 0.02))
    left = perf_counter()
    writer.close()
    return (await engine.gone.get() - left) * 1000


async def ready(port):
    for _ in range(200):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /readiness HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            if b" 200 " in await reader.readline():
                return
        except OSError:
            pass
        await asyncio.sleep(0.05)
    sys.exit("the gateway is not ready")


async def main():
    engine, engine_port, port, metrics_port = Engine(), free_port(), free_port(), free_port()
    await asyncio.start_server(engine.serve, "127.0.0.1", engine_port)
    command = [KVLANE, "serve", "--port", str(port), "--prometheus-port", str(metrics_port), "--log-level", "warn",
               "--worker-urls", f"http://127.0.0.1:{engine_port}"]
    gateway = subprocess.Popen(command)
    try:
        await ready(port)
        for when in ["before the first byte", "mid-stream"]:
            took = sorted([await leave(engine, port, when) for _ in range(CLIENTS)])
            at = lambda share: took[int(share * (CLIENTS - 1))]
            print(f"{when}: p50 {at(0.5):.2f} ms, p99 {at(0.99):.2f} ms, most {took[-1]:.2f} ms")
    finally:
        gateway.kill()


asyncio.run(main())
