"""HTTP clients that record an exchange byte for byte: what came, when, and how the connection ended.

Sockets only: a library would repeat requests, hide how a connection ended, or wait for the whole of an answer.
"""

import json
import re
import socket
import struct
import threading
import time
from bisect import bisect

CONNECT_S_MAX = 2.0


def request_bytes(path, body=None, method=None, keep=False):
    """A request as most SDKs send it; `keep` leaves the connection open."""
    method = method or ("GET" if body is None else "POST")
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", f"connection: {'keep-alive' if keep else 'close'}"]
    encoded = b"" if body is None else json.dumps(body).encode()
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(encoded)}"]
    return "\r\n".join([*lines, "", ""]).encode() + encoded


class Answer:
    """Bytes of one answer with the time of each read, in the order of their arrival."""

    def __init__(self):
        self.pieces, self.starts, self.raw = [], [], bytearray()

    def add(self, at, data):
        self.starts.append(len(self.raw))
        self.pieces.append((at, data))
        self.raw += data

    def at(self, offset):
        """When the byte at `offset` came."""
        return self.pieces[bisect(self.starts, offset) - 1][0]

    def head(self):
        """The head without the empty line, and the offset behind it; `None` while it is not whole."""
        end = self.raw.find(b"\r\n\r\n")
        return None if end < 0 else (bytes(self.raw[:end]).decode("latin-1"), end + 4)

    def status(self):
        head = self.head()
        return head and int(head[0].split(" ", 2)[1])

    def is_event_stream(self):
        head = self.head()
        return bool(head) and "text/event-stream" in head[0].lower()

    def body(self):
        """The decoded body as pieces (raw offset, bytes), and whether its end has come.

        `None` where only the end of the connection says so.
        """
        head = self.head()
        if not head:
            return [], False
        text, offset = head
        raw = bytes(self.raw)
        if length := re.search(r"(?i)\r\ncontent-length: *(\d+)", text):
            return [(offset, raw[offset:])], len(raw) - offset >= int(length[1])
        if not re.search(r"(?i)\r\ntransfer-encoding: *chunked", text):
            return [(offset, raw[offset:])], None
        pieces = []
        while (line := raw.find(b"\r\n", offset)) >= 0:
            size = int(raw[offset:line].split(b";")[0] or b"0", 16)
            if size == 0:
                return pieces, True
            pieces.append((line + 2, raw[line + 2 : line + 2 + size]))
            offset = line + 2 + size + 2
        return pieces, False

    def events(self):
        """Server-sent events: (time of the last byte, text without the empty line behind it)."""
        pieces, _ = self.body()
        starts, text = [], bytearray()
        for _, data in pieces:
            starts.append(len(text))
            text += data
        events, start = [], 0
        for end in [found.end() for found in re.finditer(rb"\r?\n\r?\n", text)] + [len(text)]:
            if end > start:
                piece = bisect(starts, end - 1) - 1
                at = self.at(pieces[piece][0] + end - 1 - starts[piece])
                events.append((at, text[start:end].decode(errors="replace").rstrip("\r\n")))
            start = end
        return events


def has_content(event):
    """Whether an event holds a part of the answer, in any of the APIs."""
    data = "".join(line[5:].lstrip() for line in event.splitlines() if line.startswith("data:"))
    try:
        data = json.loads(data)
    except ValueError:
        return False
    if data.get("type") in ("content_block_delta", "response.output_text.delta"):
        return True
    choices = data.get("choices") or []
    return any(choice.get("text") or (choice.get("delta") or {}).get("content") for choice in choices)


def is_error(event):
    """Whether an event speaks of a failure."""
    named = event.startswith(("event: error", "event: response.failed"))
    return named or bool(re.search(r'"error": *[^n\s]', event))


class Client(threading.Thread):
    """One request on a connection of its own, read until its connection ends or `give_up` is called.

    The connection is offered to be kept, as a gateway does.
    """

    def __init__(self, name, port, path, body):
        super().__init__(name=name, daemon=True)
        self.port, self.path, self.body = port, path, body
        self.answer, self.end, self.sent_at, self.end_at = Answer(), None, None, None
        self.stop, self.whole = threading.Event(), threading.Event()
        self.socket = None
        self.streamed = bool(body and body.get("stream"))

    def run(self):
        try:
            self.socket = socket.create_connection(("127.0.0.1", self.port), timeout=CONNECT_S_MAX)
        except OSError as error:
            self.over({ConnectionRefusedError: "refused", ConnectionResetError: "reset"}.get(type(error), "no connection"))
            return
        self.exchange()

    def exchange(self):
        """Sends the request on the open connection and reads what comes."""
        try:
            self.socket.settimeout(0.1)
            self.sent_at = time.monotonic()
            self.socket.sendall(request_bytes(self.path, self.body, keep=True))
            while not self.stop.is_set():
                try:
                    data = self.socket.recv(65536)
                except TimeoutError:
                    continue
                if not data:
                    return self.over("fin")
                self.answer.add(time.monotonic(), data)
                if not self.whole.is_set() and self.answer.body()[1]:
                    self.whole.set()
            self.over("open" if self.whole.is_set() else "silent")
        except (BrokenPipeError, ConnectionResetError):
            self.over("reset")
        except OSError as error:
            self.over(f"error {error.errno}")

    def over(self, how):
        self.end, self.end_at = how, time.monotonic()
        if self.socket:
            self.socket.close()
        self.whole.set()

    def is_over(self):
        """The answer is whole, or the connection ended."""
        return self.whole.is_set()

    def give_up(self):
        self.stop.set()
        self.join(5)

    def leave(self):
        """Goes away as a client that was killed: the connection is reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.give_up()

    def content_events(self):
        return sum(has_content(event) for _, event in self.answer.events())

    def phase(self):
        """How far the answer was: no head, a head without content, or content."""
        if not self.answer.head():
            return "before the head"
        return "in the content" if not self.streamed or self.content_events() else "before the content"
