"""Requests that two servers may read in two ways, byte by byte: none may reach an engine, all are answered or closed.

    e2e/attack/heads.py
"""

import socket
import sys

from arena import Arena
from stub import Stub

BODY = b'{"model": "mock", "messages": [{"role": "user", "content": "x"}]}'
LINE, HOST = b"POST /v1/chat/completions HTTP/1.1\r\n", b"host: x\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED, CHUNKS = b"transfer-encoding: chunked\r\n", b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind, flags, stream, payload=b""):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


ATTACKS = {
    "both lengths": LINE + HOST + LENGTH + CHUNKED + b"\r\n" + CHUNKS,
    "both lengths, the other way": LINE + HOST + CHUNKED + LENGTH + b"\r\n" + CHUNKS,
    "one length twice": LINE + HOST + LENGTH * 2 + b"\r\n" + BODY,
    "two lengths": LINE + HOST + LENGTH + b"content-length: 3\r\n\r\n" + BODY,
    "a list of lengths": LINE + HOST + b"content-length: %d, %d\r\n\r\n" % (len(BODY), len(BODY)) + BODY,
    "a signed length": LINE + HOST + b"content-length: +%d\r\n\r\n" % len(BODY) + BODY,
    "two codings": LINE + HOST + b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNKS,
    "a coding twice": LINE + HOST + CHUNKED * 2 + b"\r\n" + CHUNKS,
    "an unknown coding": LINE + HOST + b"transfer-encoding: xchunked\r\n\r\n" + CHUNKS,
    "a coding in HTTP/1.0": LINE.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + CHUNKS,
    "a tab before the coding's colon": LINE + HOST + b"transfer-encoding\t: chunked\r\n\r\n" + CHUNKS,
    "a folded coding": LINE + HOST + b"transfer-encoding:\r\n chunked\r\n\r\n" + CHUNKS,
    "no host": LINE + LENGTH + b"\r\n" + BODY,
    "two hosts": LINE + HOST * 2 + LENGTH + b"\r\n" + BODY,
    "a bare LF in a field": LINE + HOST + b"x: y\n" + LENGTH + b"\r\n" + BODY,
    "a bare LF behind the request line": LINE[:-2] + b"\n" + HOST + LENGTH + b"\r\n" + BODY,
    "a bare LF for the head's end": LINE + HOST + LENGTH + b"\n" + BODY,
    "a bare CR": LINE + HOST + b"x: y\rz: a\r\n" + LENGTH + b"\r\n" + BODY,
    "a NUL": LINE + HOST + b"x: \0\r\n" + LENGTH + b"\r\n" + BODY,
    "HTTP/0.9": b"POST /v1/chat/completions\r\n\r\n" + BODY,
    "HTTP/1.2": LINE.replace(b"1.1", b"1.2") + HOST + LENGTH + b"\r\n" + BODY,
    "two spaces": LINE.replace(b" /", b"  /") + HOST + LENGTH + b"\r\n" + BODY,
    "101 fields": LINE + HOST + LENGTH + b"x: y\r\n" * 101 + b"\r\n" + BODY,
    "a head of 65 KiB": LINE + HOST + LENGTH + b"x: " + b"y" * (65 << 10) + b"\r\n\r\n" + BODY,
    "a method of 10 KB": b"A" * 10_000 + LINE[4:] + HOST + LENGTH + b"\r\n" + BODY,
    "TRACE": b"TRACE" + LINE[4:] + HOST + LENGTH + b"\r\n" + BODY,
    "CONNECT": b"CONNECT x:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "a chunk size that is none": LINE + HOST + CHUNKED + b"\r\n0x10\r\n" + BODY,
    "a chunk size beyond all": LINE + HOST + CHUNKED + b"\r\n" + b"f" * 17 + b"\r\n" + BODY,
    "a bare LF behind a chunk size": LINE + HOST + CHUNKED + b"\r\n%x\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",
    "chunk extensions without end": LINE + HOST + CHUNKED + b"\r\n1;" + b"x" * 20_000,
    "trailers without end": LINE + HOST + CHUNKED + b"\r\n1\r\n{\r\n0\r\n" + b"x: y\r\n" * 5_000,
    "TLS to a plain port": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 600,
    "HTTP/2: fields without end": PREFACE + frame(4, 0, 0) + frame(1, 1, 1, b"\x83\x86\x84") + b"".join(
        frame(9, 0, 1, b"\0\x01x\x01y" * 2_000) for _ in range(2_000)
    ),
    "HTTP/2: 2,000 fields": PREFACE + frame(4, 0, 0) + frame(1, 5, 1, b"\x83\x86\x84" + b"\0\x01x\x01y" * 2_000),
    "HTTP/2: resets in a hurry": PREFACE + frame(4, 0, 0) + b"".join(
        frame(1, 4, 2 * n + 1, b"\x83\x86\x84") + frame(3, 0, 2 * n + 1, b"\0\0\0\x08") for n in range(20_000)
    ),
}


def send(port, attack):
    """The first line of what comes back, if anything does."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        try:
            client.sendall(attack)
            return client.recv(1 << 16).split(b"\r\n")[0]
        except ConnectionError:
            return b""


def main():
    seen, wrong = [], 0
    stub = Stub(lambda method, target, fields, body: seen.append((method, target)))
    # What never ends is closed soon.
    config = {"server": {"header_timeout": "1s", "body_timeout": "1s"}}
    with Arena(engines=0, engine_urls=[stub.url], config=config) as arena:
        for name, attack in ATTACKS.items():
            del seen[:]
            said = send(arena.port, attack)
            refused = not said.startswith(b"HTTP/1.1 2") and not seen
            wrong += not refused
            print(f"{'' if refused else 'WRONG '}{name}: {said[:40].decode('latin-1') or 'closed'}{f', {seen}' if seen else ''}")
        del seen[:]
        fine = send(arena.port, LINE + HOST + LENGTH + b"\r\n" + BODY + LINE + HOST + CHUNKED + b"connection: close\r\n\r\n" + CHUNKS)
        print(f"a request as it should be, afterwards: {fine.decode()}")
        wrong += fine != b"HTTP/1.1 200 OK" or arena.gateway.poll() is not None
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
