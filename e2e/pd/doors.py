"""A door before a server: a TCP proxy in which requests, or the answers to them, can be held."""

import contextlib
import re
import socket
import sys
import threading
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from engines import free_port

IN, OUT = "in", "out"
KEPT_BYTES = 256


class Hold:
    """Holds the first request that has this word in it, before it reaches the server, or its answer on the way back."""

    def __init__(self, word, side):
        self.word, self.side = word.encode(), side
        self.arrived, self.freed = threading.Event(), threading.Event()

    def wait(self, limit_s=120):
        """Until it holds something."""
        if not self.arrived.wait(limit_s):
            raise AssertionError(f"waited {limit_s} s in vain for {self.word!r} on its way {self.side}")

    def free(self):
        self.freed.set()

    def stop(self):
        self.arrived.set()
        self.freed.wait()


class Door:
    """Has the address that the gateway is given, and passes bytes on to its server. `said` has what the server answered."""

    def __init__(self, server):
        self.server, self.port = server, free_port()
        self.holds, self.made, self.said = [], [], []
        self.open()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def open(self):
        self.listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def shut(self):
        """Connections are refused from here on. Those that are open stay."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def hold(self, word, side):
        hold = Hold(word, side)
        self.holds.append(hold)
        self.made.append(hold)
        return hold

    def free_all(self):
        self.holds.clear()
        for hold in self.made:
            hold.free()

    def find(self, pattern):
        """The numbers that the server's answers had at this place, from the first."""
        return [int(number) for number in re.findall(pattern, b"".join(self.said).decode(errors="replace"))]

    def _accept(self, listener):
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.server.port))
            except OSError:
                client.close()
                continue
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(client, server), daemon=True).start()

    def _serve(self, client, server):
        held = []
        with client, server:
            answers = threading.Thread(target=self._pass, args=(self._answer, server, client, held), daemon=True)
            answers.start()
            self._pass(self._ask, client, server, held)
            answers.join()

    def _pass(self, pump, source, target, held):
        with contextlib.suppress(OSError):
            pump(source, target, held)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _ask(self, source, target, held):
        kept = b""
        while piece := source.recv(1 << 16):
            kept += piece
            for hold in [hold for hold in self.holds if hold.word in kept]:
                kept = b""
                self.holds.remove(hold)
                if hold.side is IN:
                    hold.stop()
                else:
                    held.append(hold)
            kept = kept[-KEPT_BYTES:]
            target.sendall(piece)

    def _answer(self, source, target, held):
        while piece := source.recv(1 << 16):
            if held:
                held.pop().stop()
            self.said.append(piece)
            target.sendall(piece)
