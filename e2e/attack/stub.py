"""An engine that answers at once and lets each request that reaches it be looked at."""

import asyncio
import json
import threading


class Stub:
    """Serves on loopback in a thread of its own; `look(method, target, fields, body)` is called for every POST."""

    def __init__(self, look, model="mock", answer_after_s=0.0):
        self.look, self.model, self.answer_after_s = look, model, answer_after_s
        self.loop = asyncio.new_event_loop()
        self.started = threading.Event()
        threading.Thread(target=self.run, daemon=True).start()
        self.started.wait()

    def run(self):
        asyncio.set_event_loop(self.loop)
        server = self.loop.run_until_complete(asyncio.start_server(self.serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self.started.set()
        self.loop.run_forever()

    async def serve(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, target, _ = head[0].split(" ")
                fields = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:])}
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                if method == "GET" and target == "/v1/models":
                    said = {"data": [{"id": self.model, "object": "model", "max_model_len": 131072}]}
                elif method == "GET" and target == "/health":
                    said = {}
                elif method == "GET" and target == "/metrics":
                    said = None
                else:
                    self.look(method, target, fields, body)
                    await asyncio.sleep(self.answer_after_s)
                    said = {"id": "x", "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}}]}
                text = json.dumps(said).encode() if said is not None else b""
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text) + text
                )
        except (OSError, asyncio.IncompleteReadError, ValueError):
            writer.close()
