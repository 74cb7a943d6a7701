#!/usr/bin/env python3
"""Replicas as processes of their own: killed, divided, on a slow link, updated, and with bad neighbours, under load.

    cargo build --release --locked -p kvlane && python3 e2e/replicas/test_replicas.py -v [Dying …]

Four mock engines; conversations of four turns, each turn to the next gateway. Requests without a byte of an answer are sent to
the next gateway, as load balancers do. Python's standard library only. `CUT_S` is how long a network is divided, `UPDATES` how
often both gateways are replaced.
"""

import os
import signal
import socket
import struct
import sys
import threading
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gateways import Clients, Mesh, Mock, Replica, free_port, together, until, wait_heard  # noqa: E402

ENGINES = 4
RATE = 40
CUT_S = float(os.environ.get("CUT_S", "60"))
BEFORE_S = 20
UPDATES = int(os.environ.get("UPDATES", "10"))
CONVERGED_S = 5
GROWTH_MAX = 32 << 20


def agree(replicas):
    """Whether each knows about what each other one has in flight. The two are asked at different times."""
    own = {each.exchange()["replica"]: each.in_flight() for each in replicas}
    for each in replicas:
        others = each.others()
        if len(others) != len(replicas) - 1:
            return False
        if any(abs(told - own.get(replica, -100)) > max(4, 0.5 * own.get(replica, 0)) for replica, told in others.items()):
            return False
    return True


def seconds_until(what, condition, limit_s=60):
    began = time.monotonic()
    until(what, condition, limit_s)
    return time.monotonic() - began


class Fleet(unittest.TestCase):
    """Engines, and what is printed."""

    events = True

    def setUp(self):
        self.engines = [Mock(self.events) for _ in range(ENGINES)]
        for engine in self.engines:
            engine.wait_ready()
        self.urls = [engine.url for engine in self.engines]
        self.options = ["--set", "health.interval=500ms", *([] if self.events else ["--no-kv-events"])]
        self.replicas, self.clients = [], None
        print(flush=True)

    def tearDown(self):
        if self.clients:
            self.clients.stopping = True
        for process in [*self.replicas, *self.engines]:
            process.kill()

    def say(self, text):
        print(f"    {text}", flush=True)

    def start(self, count):
        self.replicas = together(count, self.urls, self.options)

    def begin(self, **how):
        self.clients = Clients(list(self.replicas), RATE, **how)

    def measured(self, seconds):
        """What clients saw for some time."""
        began = time.monotonic()
        time.sleep(seconds)
        return self.clients.between(began, time.monotonic())

    def said(self, what, seen):
        self.say(f"{what}: {seen[0]} answers, {seen[1]:.1%} of later turns' prompts cached, TTFT {1000 * seen[2]:.0f} ms")

    def end(self, broken_max=0):
        """Clients end; nothing stays in flight anywhere."""
        self.clients.stop()
        self.say(self.clients.verdict())
        self.assertEqual(self.clients.lost, [])
        self.assertLessEqual(len(self.clients.broken), broken_max)
        idle = lambda: all(each.in_flight() == 0 and not any(each.others().values()) for each in self.replicas)  # noqa: E731
        until("nothing is in flight", idle, 10)


class Dying(Fleet):
    """kill -9 of each replica in turn."""

    def test_each_replica_is_killed_and_comes_back_warm(self):
        self.start(3)
        self.begin()
        self.said("before", self.measured(BEFORE_S))
        for n in range(3):
            victim = self.replicas[n]
            identity = victim.exchange()["replica"]
            others = [each for each in self.replicas if each is not victim]
            told = [each.others()[identity] for each in others]
            victim.kill()
            gone_s = seconds_until("the dead one counts no more",
                                   lambda: not any(identity in each.others() for each in others))
            self.assertLess(gone_s, CONVERGED_S)
            agreed_s = seconds_until("the others agree", lambda: all(each.hears() == 1 for each in others) and agree(others))
            self.assertLess(gone_s + agreed_s, CONVERGED_S)
            time.sleep(3)
            peers = [f"127.0.0.1:{each.listen}" for each in self.replicas]
            self.replicas[n] = Replica(f"replica-{n}", self.urls, peers, victim.listen, victim.port, self.options)
            self.replicas[n].wait_ready()
            warm_s = seconds_until("a snapshot has arrived", lambda: self.replicas[n].exchange()["snapshot"]["state"] == "arrived")
            snapshot = self.replicas[n].exchange()["snapshot"]
            self.assertGreater(snapshot["marks"], 0)
            heard_s = seconds_until("all hear each other", lambda: all(each.hears() == 2 for each in self.replicas))
            self.say(f"replica {n} killed with {told} requests in flight told: forgotten after {gone_s:.1f} s; restarted: snapshot of "
                     f"{snapshot['marks']} marks {warm_s:.1f} s after readiness, all heard after {warm_s + heard_s:.1f} s")
            self.assertLess(warm_s + heard_s, CONVERGED_S)
            self.clients.gateways[n] = self.replicas[n]
        self.said("after", self.measured(10))
        # Streams of a killed process break, and only those.
        self.end(broken_max=len(self.clients.answers))
        self.assertLess(len(self.clients.broken), RATE)


class DyingWithoutEvents(Dying):
    """The same, with no KV events."""

    events = False


class Divided(Fleet):
    """The network between the replicas is cut for a minute; clients and engines reach all of them."""

    replicas_count = 3

    def divide(self, mode):
        mesh = Mesh(self.replicas_count, self.urls, self.options)
        self.replicas = mesh.replicas
        self.begin()
        self.measured(10)
        before = self.measured(BEFORE_S)
        mesh.set(mode)
        cut = time.monotonic()
        alone_s = seconds_until("each is alone", lambda: all(each.hears() == 0 for each in self.replicas))
        time.sleep(max(0.0, cut + CUT_S - time.monotonic()))
        during = self.clients.between(cut, time.monotonic())
        problems = self.replicas[0].exchange()["problems"]
        mesh.set("open")
        healed_s = seconds_until("all hear each other and agree", lambda: agree(self.replicas))
        self.said("before", before)
        self.said(f"{mode} for {CUT_S:.0f} s", during)
        self.said("after", self.measured(10))
        self.say(f"alone after {alone_s:.1f} s, converged {healed_s:.1f} s after the end; problems were {list(problems.values())}")
        self.end()
        self.assertEqual(self.clients.retried, 0)
        self.assertEqual(len(problems), self.replicas_count - 1)
        self.assertLess(healed_s, CONVERGED_S)
        if self.events:
            self.assertGreater(during[1], 0.85 * before[1])

    def test_silence(self):
        self.divide("silent")

    def test_lost_bytes(self):
        self.divide("dropped")

    def test_resets(self):
        self.divide("reset")


class DividedWithoutEvents(Divided):
    """The same, with no KV events: each side knows only what it has sent itself since."""

    events = False
    test_lost_bytes = None
    test_resets = None


class Slow(Fleet):
    """A link of 10 kB/s with 200 ms delay."""

    events = False

    def test_a_slow_link(self):
        mesh = Mesh(3, self.urls, self.options)
        self.replicas = mesh.replicas
        self.begin(words=1000)
        self.measured(5)
        before = self.measured(BEFORE_S)
        grown = [each.resident_bytes() for each in self.replicas]
        for link in mesh.links.values():
            link.delay_s, link.bytes_per_s = 0.2, 10_000
        began, heard, ages = time.monotonic(), [], []
        while time.monotonic() < began + 40:
            time.sleep(0.5)
            peers = [peer for each in self.replicas for peer in each.exchange()["peers"]]
            heard.append(sum(peer["counts"] for peer in peers))
            ages.append(max(peer["age_s"] for peer in peers))
        during = self.clients.between(began, time.monotonic())
        shed = sum(each.samples()["kvlane_replica_marks_shed_total"] for each in self.replicas)
        grown = [each.resident_bytes() - at for each, at in zip(self.replicas, grown)]
        for link in mesh.links.values():
            link.delay_s, link.bytes_per_s = 0.0, None
        healed_s = seconds_until("all agree", lambda: agree(self.replicas))
        self.said("before", before)
        self.said("slow", during)
        breaks = sum(len([line for line in each.log_lines() if "trying again" in line]) for each in self.replicas)
        self.say(f"of 6 links {sum(heard) / len(heard):.1f} counted in the mean, {min(heard)} at the worst; oldest news {max(ages):.1f} s; "
                 f"{shed:.0f} marks shed; {breaks} broken connections; memory grew by {[g >> 20 for g in grown]} MiB; "
                 f"converged {healed_s:.1f} s after")
        self.end()
        self.assertLess(healed_s, CONVERGED_S)
        self.assertLess(max(grown), GROWTH_MAX)
        self.assertGreater(sum(heard) / len(heard), 5.5)


class Updates(Fleet):
    """Both gateways are replaced, again and again, as a Deployment does it with `maxSurge: 1`."""

    def test_rolling_updates(self):
        listens = [free_port() for _ in range(3)]
        peers = [f"127.0.0.1:{port}" for port in listens]
        options = [*self.options, "--set", "server.shutdown_delay=1s", "--set", "server.shutdown_grace=30s"]
        new = lambda listen, n: Replica(f"update-{n}", self.urls, peers, listen, options=options)  # noqa: E731
        self.replicas = [new(listens[0], 0), new(listens[1], 1)]
        for each in self.replicas:
            each.wait_ready()
        wait_heard(self.replicas)
        self.begin()
        # The load balancer follows `/readiness`.
        following = threading.Event()

        def follow():
            while not following.is_set():
                ready = [each for each in list(self.replicas) if each.child.poll() is None and is_ready(each)]
                if ready:
                    self.clients.gateways = ready
                time.sleep(0.2)

        threading.Thread(target=follow, daemon=True).start()
        before = self.measured(BEFORE_S)
        began, number, marks = time.monotonic(), 2, []
        for _ in range(UPDATES):
            for _ in range(2):
                free = next(listen for listen in listens if listen not in [each.listen for each in self.replicas])
                successor = new(free, number % 8)
                number += 1
                successor.wait_ready()
                self.replicas.append(successor)
                until("the balancer sends requests there", lambda: successor in self.clients.gateways)
                until("it is warm", lambda: successor.exchange()["snapshot"]["state"] == "arrived")
                marks.append(successor.exchange()["snapshot"]["marks"])
                old = self.replicas[0]
                old.child.send_signal(signal.SIGTERM)
                self.assertEqual(old.child.wait(timeout=60), 0, old.end_of_log())
                self.replicas.remove(old)
        during = self.clients.between(began, time.monotonic())
        took_s = time.monotonic() - began
        self.said("before", before)
        self.said(f"{UPDATES} updates in {took_s:.0f} s", during)
        self.say(f"snapshots of {min(marks)} to {max(marks)} marks")
        healed_s = seconds_until("the others agree", lambda: agree(self.replicas))
        self.say(f"the last two agree {healed_s:.1f} s after")
        following.set()
        self.end()
        self.assertEqual(self.clients.retried, 0)
        self.assertGreater(during[1], 0.85 * before[1])


class UpdatesWithoutEvents(Updates):
    """The same, with no KV events: what a successor knows is its snapshot."""

    events = False


def is_ready(replica):
    try:
        return replica.readiness().status == 200
    except OSError:
        return False


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def hello(cluster=b"kvlane", replica=77):
    """A message of a replica: see kvlane_wire::replica."""
    fields = b"\x08\x01\x10\x01\x19" + struct.pack("<Q", replica) + b"\x22" + bytes([len(cluster)]) + cluster + b"\x28\x01"
    message = b"\x0a" + bytes([len(fields)]) + fields
    return b"\x00" + struct.pack(">I", len(message)) + message


class Unread:
    """A replica that takes part in HTTP/2, answers pings, but never allows another byte of news."""

    def __init__(self):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port, self.connections, self.pings = self.socket.getsockname()[1], 0, 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            connection, _ = self.socket.accept()
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        try:
            read = connection.makefile("rb")
            assert read.read(len(PREFACE)) == PREFACE
            connection.sendall(frame(4, 0, 0))
            while head := read.read(9):
                length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                payload, stream = read.read(length), int.from_bytes(head[5:], "big")
                if kind == 4 and not flags & 1:
                    connection.sendall(frame(4, 1, 0))
                elif kind == 6 and not flags & 1:
                    self.pings += 1
                    connection.sendall(frame(6, 1, 0, payload))
                elif kind == 1:
                    connection.sendall(frame(1, 4, stream, b"\x88") + frame(0, 0, stream, hello()))
        except (OSError, AssertionError):
            pass
        finally:
            connection.close()


class Neighbours(Fleet):
    """Hosts that are no replicas, or no good ones, on the port."""

    def setUp(self):
        super().setUp()
        self.unread = Unread()
        listens = [free_port(), free_port()]
        peers = [f"127.0.0.1:{port}" for port in listens]
        self.replicas = [Replica(f"neighbours-{n}", self.urls, [*peers, *self.more()], listen, options=self.options)
                         for n, listen in enumerate(listens)]
        for each in self.replicas:
            each.wait_ready()
        until("they hear each other", lambda: all(each.hears() == 1 for each in self.replicas))
        self.lines = [len(each.log_lines()) for each in self.replicas]
        self.begin()

    def more(self):
        return []

    def judged(self, before, lines_max):
        """Replicas go on as before, with bounded memory and a readable log."""
        more = [len(each.log_lines()) - at for each, at in zip(self.replicas, self.lines)]
        grown = [each.resident_bytes() - at for each, at in zip(self.replicas, before)]
        self.say(f"{more} lines logged, memory grew by {[growth >> 10 for growth in grown]} KiB")
        self.assertTrue(all(each.hears() == 1 for each in self.replicas))
        until("they agree", lambda: agree(self.replicas), CONVERGED_S)
        self.end()
        self.assertEqual(self.clients.retried, 0)
        self.assertLessEqual(max(more), lines_max)
        self.assertLess(max(grown), GROWTH_MAX)

    def resident(self):
        self.measured(5)
        return [each.resident_bytes() for each in self.replicas]

    def test_garbage_and_a_port_scan(self):
        before, target = self.resident(), self.replicas[0].listen
        request = frame(4, 0, 0) + frame(1, 4, 1, b"\x83\x86\x84\x41\x01a") + frame(0, 0, 1, os.urandom(200))
        kinds = [b"", b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", b"\x16\x03\x01" + os.urandom(300), os.urandom(100_000), PREFACE,
                 PREFACE + os.urandom(10_000), PREFACE + request]
        for n in range(500):
            with socket.create_connection(("127.0.0.1", target), timeout=5) as connection:
                if n % 2 == 0:
                    try:
                        connection.sendall(kinds[n // 2 % len(kinds)])
                    except OSError:
                        pass
        held = [socket.create_connection(("127.0.0.1", target)) for _ in range(300)]
        time.sleep(3)
        for connection in held:
            connection.close()
        self.judged(before, 8)


class Strangers(Neighbours):
    """A gateway of another cluster that has them in its list, and they have it."""

    test_garbage_and_a_port_scan = None

    def more(self):
        self.port = free_port() if not hasattr(self, "port") else self.port
        return [f"127.0.0.1:{self.port}"]

    def test_another_cluster(self):
        before = self.resident()
        peers = [f"127.0.0.1:{each.listen}" for each in self.replicas]
        stranger = Replica("stranger", self.urls, peers, self.port, options=[*self.options, "--set", "replicas.cluster=other"])
        try:
            stranger.wait_ready()
            until("it is refused", lambda: len(stranger.exchange()["problems"]) == 2)
            time.sleep(20)
            self.assertEqual(stranger.hears(), 0)
            self.say(f"the stranger: {next(iter(stranger.exchange()['problems'].values()))}")
            self.say(f"a replica: {self.replicas[0].exchange()['problems']}")
            self.judged(before, 8)
        finally:
            stranger.kill()


class Readers(Neighbours):
    """A replica that reads nothing."""

    test_garbage_and_a_port_scan = None

    def more(self):
        return [f"127.0.0.1:{self.unread.port}"]

    def test_a_replica_that_reads_nothing(self):
        before = self.resident()
        self.measured(30)
        self.say(f"it was connected to {self.unread.connections} times, and answered {self.unread.pings} pings: "
                 f"{self.replicas[0].exchange()['problems']}")
        self.judged(before, 20)


if __name__ == "__main__":
    unittest.main()
