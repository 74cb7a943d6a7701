#!/usr/bin/env python3
"""Replicas that exchange news through a NATS server, as processes of their own: they place alike, and either dies.

    cargo build --release --locked -p kvlane && python3 e2e/replicas/test_broker.py -v [Exchange …]

Three gateways and four mock engines without KV events; conversations of four turns, each turn to the next gateway. Debian:
`apt-get install nats-server`. `MEASURED_S` is how long each side of the comparison with connections runs.
"""

import json
import os
import shutil
import signal
import socket
import sys
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gateways import TICKS_PER_S, Process, Replica, free_port, together, until, wait_heard  # noqa: E402
from test_replicas import BEFORE_S, CONVERGED_S, GROWTH_MAX, RATE, Fleet, agree, seconds_until  # noqa: E402

NATS = os.environ.get("NATS_SERVER") or shutil.which("nats-server") or "/usr/sbin/nats-server"
MEASURED_S = float(os.environ.get("MEASURED_S", "40"))
AWAY_S = 20


class Nats(Process):
    """A NATS server."""

    def __init__(self, port=None, *options):
        self.port, self.url = port or free_port(), None
        self.url = f"nats://127.0.0.1:{self.port}"
        super().__init__("replicas-nats", [NATS, "-a", "127.0.0.1", "-p", str(self.port), *options])
        until("the NATS server listens", self.listens)

    def listens(self):
        self.check_alive()
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
            return True
        except OSError:
            return False

    def cpu_s(self):
        fields = Path(f"/proc/{self.child.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def publish(self, messages):
        """Publishes pairs of subject and bytes as any client could."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            read = connection.makefile("rb")
            read.readline()
            connection.sendall(b'CONNECT {"verbose":false,"pedantic":false}\r\n')
            for subject, payload in messages:
                connection.sendall(f"PUB {subject} {len(payload)}\r\n".encode() + payload + b"\r\n")
            connection.sendall(b"PING\r\n")
            while (line := read.readline()) and b"PONG" not in line:
                pass


class Brokered(Fleet):
    """Three gateways at a NATS server."""

    events = False

    def setUp(self):
        super().setUp()
        self.nats = Nats()
        self.options += ["--replicas-broker", self.nats.url]

    def tearDown(self):
        super().tearDown()
        self.nats.kill()

    def start(self, count=3):
        self.replicas = [Replica(f"brokered-{n}", self.urls, options=self.options) for n in range(count)]
        for replica in self.replicas:
            replica.wait_ready()
        wait_heard(self.replicas)


class Exchange(Brokered):
    """What one has sent, the others know; either side is killed."""

    def test_replicas_are_killed_and_come_back_warm(self):
        self.start()
        self.assertTrue(all(peer["address"] is None for peer in self.replicas[0].exchange()["peers"]))
        self.begin()
        self.measured(5)
        before = self.measured(BEFORE_S)
        self.said("before", before)
        self.assertGreater(before[1], 0.7)
        for n in range(3):
            victim, identity = self.replicas[n], self.replicas[n].exchange()["replica"]
            others = [each for each in self.replicas if each is not victim]
            victim.kill()
            gone_s = seconds_until("the dead one counts no more", lambda: not any(identity in each.others() for each in others))
            self.assertLess(gone_s, CONVERGED_S)
            self.replicas[n] = Replica(victim.name, self.urls, port=victim.port, options=self.options)
            self.replicas[n].wait_ready()
            warm_s = seconds_until("a snapshot has arrived", lambda: self.replicas[n].exchange()["snapshot"]["state"] == "arrived")
            snapshot = self.replicas[n].exchange()["snapshot"]
            self.assertGreater(snapshot["marks"], 0)
            heard_s = seconds_until("all hear each other", lambda: all(each.hears() == 2 for each in self.replicas))
            self.say(f"replica {n} killed: forgotten after {gone_s:.1f} s; restarted: snapshot of {snapshot['marks']} marks {warm_s:.1f} s "
                     f"after readiness, all heard after {warm_s + heard_s:.1f} s")
            self.assertLess(warm_s + heard_s, CONVERGED_S)
            self.clients.gateways[n] = self.replicas[n]
        self.said("after", self.measured(10))
        self.end(broken_max=len(self.clients.answers))
        self.assertLess(len(self.clients.broken), RATE)

    def test_the_broker_is_killed_and_comes_back(self):
        self.start()
        self.begin()
        self.measured(5)
        before = self.measured(BEFORE_S)
        lines = [len(each.log_lines()) for each in self.replicas]
        self.nats.kill()
        away = time.monotonic()
        alone_s = seconds_until("each is alone", lambda: all(each.hears() == 0 for each in self.replicas))
        problems = self.replicas[0].exchange()["problems"]
        time.sleep(max(0.0, away + AWAY_S - time.monotonic()))
        during = self.clients.between(away, time.monotonic())
        figure = self.replicas[0].samples()["kvlane_replica_problems"]
        self.nats = Nats(self.nats.port)
        back_s = seconds_until("all hear each other and agree", lambda: agree(self.replicas))
        more = [len(each.log_lines()) - at for each, at in zip(self.replicas, lines)]
        self.said("before", before)
        self.said(f"without a broker for {AWAY_S} s", during)
        self.said("after", self.measured(10))
        self.say(f"alone after {alone_s:.1f} s, converged {back_s:.1f} s after its return; {more} lines logged; problems were {problems}")
        self.end()
        self.assertEqual(self.clients.retried, 0)
        self.assertEqual((list(problems), figure), ([self.nats.url], 1.0))
        self.assertEqual(self.replicas[0].exchange()["problems"], {})
        self.assertLess(back_s, CONVERGED_S)
        self.assertLessEqual(max(more), 4)

    def test_a_broker_that_does_not_answer(self):
        self.start()
        self.begin()
        self.measured(5)
        os.killpg(self.nats.child.pid, signal.SIGSTOP)
        alone_s = seconds_until("each is alone", lambda: all(each.hears() == 0 for each in self.replicas))
        until("each says so", lambda: all(each.exchange()["problems"] for each in self.replicas), 10)
        problem = self.replicas[0].exchange()["problems"]
        os.killpg(self.nats.child.pid, signal.SIGCONT)
        back_s = seconds_until("all hear each other and agree", lambda: agree(self.replicas))
        self.say(f"alone after {alone_s:.1f} s, converged {back_s:.1f} s after; problems were {problem}")
        self.end()
        self.assertEqual(self.clients.retried, 0)


class Others(Brokered):
    """What else is published there."""

    def test_garbage_and_another_cluster(self):
        self.start()
        stranger = Replica("stranger", self.urls, options=[*self.options, "--set", "replicas.cluster=other fleet.1"])
        self.replicas.append(stranger)
        stranger.wait_ready()
        self.begin()
        self.measured(5)
        lines = [len(each.log_lines()) for each in self.replicas]
        grown = [each.resident_bytes() for each in self.replicas]
        # A hello of cluster `x` on the subject of another, and one whose frames break off.
        hello = b"\x00\x00\x00\x00\x14\x0a\x12\x08\x01\x10\x01\x19\x4d" + bytes(7) + b"\x22\x01x\x28\x01"
        kinds = [b"", b"{}", os.urandom(300), os.urandom(100_000), hello, hello[:9], b"\x00\xff\xff\xff\xff" + bytes(50)]
        replicas = [each.exchange()["replica"] for each in self.replicas]
        for _ in range(10):
            subjects = ["news.x", "greeting", "inbox.x.1", *(f"news.{one}" for one in replicas), *(f"snapshot.{one}" for one in replicas)]
            self.nats.publish((f"kvlane.kvlane.{subject}", kind) for subject in subjects for kind in kinds for _ in range(5))
        self.measured(5)
        more = [len(each.log_lines()) - at for each, at in zip(self.replicas, lines)]
        grown = [each.resident_bytes() - at for each, at in zip(self.replicas, grown)]
        self.say(f"{more} lines logged, memory grew by {[growth >> 10 for growth in grown]} KiB")
        self.replicas.remove(stranger)
        try:
            self.assertEqual(stranger.hears(), 0)
            self.assertTrue(all(each.hears() == 2 for each in self.replicas))
            self.assertTrue(all(len(each.exchange()["peers"]) == 2 for each in self.replicas))
            until("they agree", lambda: agree(self.replicas), CONVERGED_S)
            self.end()
            self.assertEqual(self.clients.retried, 0)
            self.assertLessEqual(max(more), 8)
            self.assertLess(max(grown), GROWTH_MAX)
        finally:
            stranger.kill()


class Passwords(Fleet):
    """A broker that wants a password."""

    events = False

    def test_a_wrong_password_is_a_problem_and_the_right_one_is_not(self):
        nats = Nats(None, "--user", "kvlane", "--pass", "right")
        try:
            user = ["--replicas-broker", nats.url, "--set", "replicas.broker_user=kvlane"]
            named = lambda n, word: Replica(f"password-{n}", self.urls, options=[  # noqa: E731
                *self.options, *user, "--set", f"replicas.broker_password={word}"])
            self.replicas = [named(0, "right"), named(1, "right"), named(2, "wrong")]
            for each in self.replicas:
                each.wait_ready()
            until("two hear each other", lambda: self.replicas[0].hears() == self.replicas[1].hears() == 1)
            wrong = self.replicas[2]
            until("it is refused", lambda: wrong.exchange()["problems"])
            self.say(f"{wrong.exchange()['problems']}; {wrong.log_lines('WARN')}")
            self.assertIn("authorization", next(iter(wrong.exchange()["problems"].values())))
            self.assertEqual(len([line for line in wrong.log_lines("WARN") if "broker" in line]), 1)
            self.assertNotIn("wrong", wrong.log.read_text())
        finally:
            nats.kill()


class Compared(Brokered):
    """The same load with connections and with a broker, in turns."""

    def test_bytes_and_processor_time(self):
        direct = [option for option in self.options if option not in ("--replicas-broker", self.nats.url)]
        seen = {"connections": [], "broker": []}
        for turn in range(4):
            way = "broker" if turn % 2 else "connections"
            if way == "broker":
                self.start()
            else:
                self.replicas = together(3, self.urls, direct)
            self.begin(seed=turn)
            self.measured(10)
            answers, sent, received, cpu, nats = self.figures()
            during = self.measured(MEASURED_S)
            after = self.figures()
            requests = after[0] - answers
            seen[way].append({"requests": requests, "cached": during[1], "sent": (after[1] - sent) / requests,
                              "received": (after[2] - received) / requests, "cpu_ms": 1000 * (after[3] - cpu) / requests,
                              "nats_cpu_ms": 1000 * (after[4] - nats) / requests})
            self.end()
            self.clients = None
            for each in self.replicas:
                each.kill()
        for way, runs in seen.items():
            for run in runs:
                self.say(f"{way}: {json.dumps({key: round(value, 3) for key, value in run.items()})}")
        share = lambda way: sum(run["cached"] for run in seen[way]) / len(seen[way])  # noqa: E731
        self.assertGreater(share("broker"), 0.95 * share("connections"))

    def figures(self):
        """Answers so far, bytes and processor time of the gateways, processor time of the broker."""
        return (len(self.clients.answers), sum(each.bytes("sent") for each in self.replicas),
                sum(each.bytes("received") for each in self.replicas), sum(each.cpu_s() for each in self.replicas), self.nats.cpu_s())


if __name__ == "__main__":
    unittest.main()
