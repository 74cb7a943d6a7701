"""Clients: one exchange, many at a time, or an open loop at a fixed rate. HTTP/1.1 over asyncio's sockets."""

import asyncio
import dataclasses
import json
import time


@dataclasses.dataclass
class Reply:
    """What a client has got. `whole`: the answer has ended as its framing says."""

    status: int = 0
    headers: dict = dataclasses.field(default_factory=dict)
    body: bytes = b""
    whole: bool = False
    error: str = ""
    # Seconds since the request was due: the head of the answer, and each piece of its body.
    head_s: float = 0.0
    pieces_s: list = dataclasses.field(default_factory=list)
    end_s: float = 0.0

    @property
    def good(self):
        return self.status == 200 and self.whole

    def json(self):
        return json.loads(self.body)

    @property
    def seen(self):
        """What `upstream.py` says of the request that has reached it."""
        return self.json()["seen"]


class Client:
    """Connections to one port of loopback, kept and used again; as many as there are requests at a time."""

    def __init__(self, port, timeout_s=60.0):
        self.port, self.timeout_s, self.idle = port, timeout_s, []

    def close(self):
        for _, writer in self.idle:
            writer.close()

    async def post(self, body, path="/v1/chat/completions", headers=None, method="POST", due=None, reply=None):
        """One exchange. Its failures are in the reply, which may be given in order to be watched meanwhile."""
        due = time.monotonic() if due is None else due
        reply = Reply() if reply is None else reply
        try:
            await asyncio.wait_for(self._exchange(reply, due, method, path, body, headers or {}), self.timeout_s)
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, ValueError) as error:
            reply.error = repr(error)
        reply.end_s = time.monotonic() - due
        return reply

    def _idle(self):
        """A connection that the server has not closed meanwhile."""
        while self.idle:
            reader, writer = self.idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()

    async def _exchange(self, reply, due, method, path, body, headers):
        reader, writer = self._idle() or await asyncio.open_connection("127.0.0.1", self.port)
        try:
            lines = [f"{method} {path} HTTP/1.1", "host: e2e", *(f"{name}: {value}" for name, value in headers.items())]
            if body is not None:
                lines += ["content-type: application/json", f"content-length: {len(body)}"]
            writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b""))
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            reply.head_s = time.monotonic() - due
            reply.status = int(head[0].split()[1])
            reply.headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:-2])}
            if reply.headers.get("transfer-encoding") == "chunked":
                while size := int(await reader.readline(), 16):
                    reply.body += await reader.readexactly(size)
                    reply.pieces_s.append(time.monotonic() - due)
                    await reader.readexactly(2)
                await reader.readline()
            else:
                reply.body = await reader.readexactly(int(reply.headers.get("content-length", 0)))
            reply.whole = True
            if reply.headers.get("connection") != "close":
                self.idle.append((reader, writer))
        finally:
            if not reply.whole:
                writer.close()


def once(port, body, **options):
    """One exchange on a connection of its own, from code that is not asynchronous."""
    return asyncio.run(_once(port, body, options))


async def _once(port, body, options):
    client = Client(port)
    try:
        return await client.post(body, **options)
    finally:
        client.close()


async def together(port, bodies, width, during=None):
    """All of `bodies`, `width` at a time; `during(done)` is called after each answer."""
    client, waiting, replies = Client(port), list(reversed(bodies)), []

    async def run():
        while waiting:
            replies.append(await client.post(waiting.pop()))
            if during:
                during(len(replies))

    await asyncio.gather(*(run() for _ in range(width)))
    client.close()
    return replies


async def open_loop(port, bodies, per_s):
    """A request each 1/`per_s` seconds, whether or not others have been answered; times count from when each was due."""
    client, start, tasks = Client(port), time.monotonic() + 0.1, []
    for index, body in enumerate(bodies):
        due = start + index / per_s
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.create_task(client.post(body, due=due)))
    replies = await asyncio.gather(*tasks)
    client.close()
    return replies


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
