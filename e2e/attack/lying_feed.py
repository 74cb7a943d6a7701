#!/usr/bin/env python3
"""A KV event feed that lies: what it costs the gateway in memory, and what the gateway counts.

    e2e/attack/lying_feed.py

Starts a gateway on loopback whose only worker has this program's feed, and sends it messages of 15 million one-byte names of
blocks, then messages whose numbers jump as far as they can. Prints the resident memory of the gateway before, at most, and
afterwards, and ends with 1 if it has grown by more than 30 MiB or if more messages count as lost than can have been sent.
Nothing but Python's own library is used, and nothing but loopback is connected to.
"""

import socket
import struct
import sys
import threading
import time

from arena import Arena

NAMES = 15_000_000
GROWN_MAX_MIB = 30
LOST_MAX = 2_000_000


def frame(body, more=False, command=False):
    flags = (1 if more else 0) | (4 if command else 0)
    if len(body) > 255:
        return struct.pack(">BQ", flags | 2, len(body)) + body
    return struct.pack(">BB", flags, len(body)) + body


def property_of(name, value):
    return struct.pack(">B", len(name)) + name + struct.pack(">I", len(value)) + value


class Publisher:
    """A ZMTP 3.0 PUB socket with one subscriber at a time."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.peer = None
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            peer, _ = self.listener.accept()
            try:
                greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
                peer.sendall(greeting)
                peer.sendall(frame(b"\x05READY" + property_of(b"Socket-Type", b"PUB"), command=True))
                threading.Thread(target=self.swallow, args=(peer,), daemon=True).start()
                self.peer = peer
            except OSError:
                pass

    @staticmethod
    def swallow(peer):
        try:
            while peer.recv(1 << 16):
                pass
        except OSError:
            pass

    def publish(self, seq, payload):
        if self.peer is None:
            return False
        try:
            self.peer.sendall(frame(b"", more=True) + frame(struct.pack(">Q", seq), more=True) + frame(payload))
            return True
        except OSError:
            self.peer = None
            return False


def removal(names):
    return b"\x92\x01\x91\x92\xacBlockRemoved\xdd" + struct.pack(">I", names) + b"\x07" * names


def main():
    feed = Publisher()
    with Arena(feeds=[f"tcp://127.0.0.1:{feed.port}"]) as arena:
        return attack(arena, feed)


def attack(arena, feed):
    until = time.monotonic() + 60
    while feed.peer is None and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(2)
    with arena.watch() as rss:
        payload = removal(NAMES)
        for seq in range(3):
            feed.publish(seq, payload)
            time.sleep(1)
        time.sleep(5)
        after = rss.now()
        small = removal(1)
        for seq in (10, 1 << 62, (1 << 64) - 3, 5, (1 << 64) - 2, 7, 1 << 63):
            feed.publish(seq, small)
            time.sleep(0.2)
        time.sleep(2)
    lost = arena.metric("kvlane_kv_messages_total", 'kind="lost"')
    unread = arena.metric("kvlane_kv_messages_total", 'kind="undecodable"')
    print(f"RSS MiB: {rss.before:.0f} before, {rss.most:.0f} at most, {after:.0f} after {unread:.0f} unreadable; {lost:.0f} lost")
    return 1 if after - rss.before > GROWN_MAX_MIB or lost > LOST_MAX else 0


if __name__ == "__main__":
    sys.exit(main())
