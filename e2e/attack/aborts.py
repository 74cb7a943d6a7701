"""A client beyond its limit that leaves before it is answered, over and over: does it get more than its limit?

    e2e/attack/aborts.py

The client may have 5 requests a minute. It sends 40, of 20 KB, and leaves each before the engine has answered. Those whose bytes
went to the engine are charged, so no more than 5 may, and one more for every 12 seconds that this takes.
"""

import socket
import sys
import time
from collections import Counter

from arena import Arena, chat
from stub import Stub

LIMIT, SENT = 5, 40


def main():
    seen = Counter()
    stub = Stub(lambda method, target, fields, body: seen.update([target] if len(body) > 20_000 else []), answer_after_s=30)
    config = {"limits": [{"key": "*", "requests_per_minute": LIMIT}]}
    with Arena(engines=0, engine_urls=[stub.url], config=config) as arena:
        began = time.monotonic()
        body = chat("x" * 20_000)
        for _ in range(SENT):
            client = socket.create_connection(("127.0.0.1", arena.port))
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            # Until it is at the engine, or refused.
            before, until = sum(seen.values()), time.monotonic() + 5
            client.settimeout(0.01)
            while sum(seen.values()) == before and time.monotonic() < until:
                try:
                    client.recv(1, socket.MSG_PEEK)
                    break
                except TimeoutError:
                    continue
            client.close()
    reached, most = sum(seen.values()), LIMIT + int((time.monotonic() - began) * LIMIT / 60)
    print(f"{SENT} sent and left, {LIMIT} a minute allowed: {reached} reached the engine")
    return 0 if LIMIT <= reached <= most else 1


if __name__ == "__main__":
    sys.exit(main())
