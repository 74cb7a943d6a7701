#!/usr/bin/env python3
"""Two replicas of the gateway before three real vLLM servers; every turn of a conversation goes to the other replica.

    e2e/vllm/setup.sh && python3 e2e/replicas/test_vllm.py -v
    python3 e2e/replicas/test_vllm.py -v Dying              # one group

Left out, with a line that says so, where vLLM's environment is not installed (E2E_WORK, see e2e/README.md). E2E_SERVERS: 3.
"""

import os
import sys
import threading
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "vllm")]

from conversations import Conversation, Predicting, cached, one_by_one
from engines import WORK, Gateway, free_port, request, start, until
from fleet import Publishing

SERVERS = int(os.environ.get("E2E_SERVERS", "3"))
CLIENTS = 6
servers: list[Publishing] = []


def setUpModule():
    if not (WORK / "installed").exists() or not (WORK / "made").exists():
        raise unittest.SkipTest(f"no vLLM in {WORK}: run e2e/vllm/setup.sh, or set E2E_WORK to where it is installed")
    servers.extend(Publishing(f"replicas-{number}") for number in range(SERVERS))
    start(servers)


def tearDownModule():
    for server in servers:
        server.stop()


class Replicas:
    """Two gateways that exchange news, asked in turns, with the questions that `conversations` asks a gateway."""

    def __init__(self, name, *options):
        listens = [free_port(), free_port()]
        peers = [f"127.0.0.1:{listen}" for listen in listens]
        self.gateways, self.turn = [], 0
        try:
            for n, listen in enumerate(listens):
                exchange = ["--replicas-listen", f"127.0.0.1:{listen}", "--replicas-peer", *peers]
                self.gateways.append(Gateway(servers, "fleet_cost", *exchange, *options, name=f"kvlane-{name}-{n}"))
            until("both hear each other", lambda: all(self.others(gateway) for gateway in self.gateways))
        except BaseException:
            self.stop()
            raise

    @staticmethod
    def others(gateway):
        """Requests in flight of the other one, where it counts."""
        readiness = request(gateway.admin_port, "/readiness").json()
        return [peer["requests"] for peer in readiness["replicas"]["peers"] if peer["counts"]]

    def ask(self, path, body=None, **more):
        self.turn += 1
        self.asked = self.gateways[self.turn % len(self.gateways)]
        return self.asked.ask(path, body, **more)

    def decisions(self, limit=1):
        return self.asked.decisions(limit)

    def stop(self):
        for gateway in self.gateways:
            gateway.stop()


class Knowing(Predicting):
    """With KV events."""

    def test_a_turn_at_the_other_replica_goes_to_the_server_that_has_the_one_before(self):
        replicas = Replicas("knowing")
        self.addCleanup(replicas.stop)
        for gateway in replicas.gateways:
            gateway.wait_exact()
        conversations = [Conversation(f"exact {number}", first_words=300) for number in range(6)]
        answers = one_by_one(replicas, conversations, turns=4)
        self.report("two replicas, KV events", answers)
        self.check_right(answers)
        for conversation in conversations:
            turns = [one for one in answers if one.asked_by is conversation]
            self.assertEqual(1, len({one.worker for one in turns}), turns)
        self.assertEqual({server.url for server in servers}, {one.worker for one in answers})


class Telling(unittest.TestCase):
    """Without KV events: a replica knows of the other one's prompts only what it was told."""

    def test_a_turn_at_the_other_replica_finds_its_prefix(self):
        replicas = Replicas("telling", "--no-kv-events")
        self.addCleanup(replicas.stop)
        for server in servers:
            server.forget_prefixes()
        conversations = [Conversation(f"told {number}", first_words=300) for number in range(6)]
        found, prompts = 0, 0
        for turn in range(4):
            for conversation in conversations:
                # The exchange is asynchronous: the other one has heard of the turn before when it is told of no request in flight.
                until("the turn before is over everywhere", lambda: not any(sum(replicas.others(each)) for each in replicas.gateways))
                answer = replicas.ask("/v1/chat/completions", conversation.body())
                self.assertEqual(200, answer.status, answer.body)
                conversation.hear(answer)
                worker, usage = answer.headers["x-router-backend"], answer.json()["usage"]
                if turn:
                    self.assertEqual(conversation.worker, worker)
                    found, prompts = found + cached(usage), prompts + usage["prompt_tokens"]
                conversation.worker = worker
        print(f"\ntwo replicas, no KV events: {found / prompts:.1%} of later turns' prompts cached")
        self.assertGreater(found / prompts, 0.8)


class Dying(unittest.TestCase):
    """kill -9 of one replica while clients use both."""

    def test_requests_without_a_byte_are_answered_by_the_other_one(self):
        replicas = Replicas("dying")
        self.addCleanup(replicas.stop)
        dies, lives = replicas.gateways
        answered, lost, again, lock, over = [], [], [], threading.Lock(), threading.Event()

        def client(number):
            for turn in range(40):
                if over.is_set():
                    return
                body = Conversation(f"dying {number} {turn}", first_words=100).body()
                # As a load balancer does: what had no byte is sent to the other one.
                for gateway in (replicas.gateways[(number + turn) % 2], lives):
                    try:
                        answer = gateway.ask("/v1/chat/completions", body, timeout_s=600)
                    except OSError:
                        with lock:
                            again.append(number)
                        continue
                    with lock:
                        (answered if answer.status == 200 else lost).append((answer.status, answer.body[:300]))
                    break
                else:
                    lost.append((number, turn))

        threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        until("both have answered", lambda: len(answered) > 4 * CLIENTS)
        until("the one that dies has requests in flight", lambda: sum(dies.in_flight()) and sum(replicas.others(lives)))
        dies.kill()
        until("the dead one no longer counts", lambda: not replicas.others(lives), 10)
        before = len(answered)
        until("the other one goes on", lambda: len(answered) > before + 4 * CLIENTS or not any(t.is_alive() for t in threads))
        over.set()
        for thread in threads:
            thread.join()
        print(f"\none of two replicas killed: {len(answered)} answered, {len(again)} of them sent again, {len(lost)} lost")
        self.assertEqual([], lost)
        self.assertGreater(len(answered), before)
        until("nothing is in flight", lambda: not sum(lives.in_flight()), 30)


if __name__ == "__main__":
    unittest.main()
