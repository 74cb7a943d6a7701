"""The gateway beside two SGLang servers that publish what their caches hold.

    e2e/sglang/setup.sh && e2e/.work/sglang/bin/python e2e/sglang/test_sglang.py -v
"""

import json
import sys
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rows
from conversations import Conversation, Predicting, asked, one_by_one
from engines import MODEL, WORK, Engine, Gateway, free_port, request, start, until
from prompts import CHATS, COMPLETIONS

PAGE_TOKENS = 16
# Prompts of which SGLang's /tokenize makes other tokens than its chat and completions do, which do not know these fields,
# or more than one list.
TOLD_OTHERWISE = {"an answer to continue", "no prompt to answer", "without special tokens", "one prompt in a list"}
# Of predictions of a workload that evicts all the time, the share that must be right to the page.
RIGHT_MIN = 0.99
servers: list["Sglang"] = []


class Sglang(Engine):
    """One SGLang server, with room for 6,144 tokens."""

    def __init__(self, number, port=None, events_ports=None):
        self.number, self.port = number, port or free_port()
        self.events_ports = events_ports or (free_port(), free_port())
        events, replay = self.events_ports
        publisher = {
            "publisher": "zmq", "topic": f"kv@127.0.0.1:{self.port}@{MODEL}",
            "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}",
        }
        super().__init__(
            f"sglang-{number}",
            [
                "nice", "-n", "5", str(WORK / "sglang" / "bin" / "python"), "-m", "sglang.launch_server",
                "--model-path", str(WORK / "model"), "--served-model-name", MODEL,
                "--host", "127.0.0.1", "--port", str(self.port),
                # What runs without a GPU, slowly.
                "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
                "--page-size", str(PAGE_TOKENS), "--max-total-tokens", "6144", "--context-length", "4096",
                "--sleep-on-idle", "--enable-cache-report", "--enable-metrics", "--kv-events-config", json.dumps(publisher),
                *self.options(),
            ],
            {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | self.environment(),
        )

    def options(self):
        """What this server is started with beside the rest."""
        return []

    def environment(self):
        """The same for its environment."""
        return {}

    def restarted(self):
        """Another server at the same address; this one must be dead."""
        return type(self)(self.number, self.port, self.events_ports)


def setUpModule():
    servers.extend(Sglang(number) for number in range(2))
    start(servers)


def tearDownModule():
    for server in servers:
        server.stop()


class WithGateway(Predicting):
    @classmethod
    def setUpClass(cls):
        cls.gateway = cls.gateway_before(servers)

    @classmethod
    def gateway_before(cls, chosen, *options):
        # SGLang gives templates other messages than vLLM does, and says itself what comes of them.
        gateway = Gateway(chosen, "cache_aware", "--set", "tokens.source=engine", *options)
        cls.addClassCleanup(gateway.stop)
        gateway.wait_exact()
        return gateway


def full_pages(prompt_tokens):
    """What a repeated prompt finds cached: its full pages, but not its last token, which is computed anew."""
    return (prompt_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS


class Tokens(WithGateway):
    def test_every_prompt_has_the_engines_ids(self):
        for path, prompts in [("/v1/chat/completions", CHATS), ("/v1/completions", COMPLETIONS)]:
            for name, body in prompts.items():
                if name in TOLD_OTHERWISE:
                    continue
                with self.subTest(path=path, prompt=name):
                    self.check_ids(path, {"model": MODEL} | body)

    def check_ids(self, path, body):
        limited = body | {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
        one = asked(self.gateway, path, limited)
        count = one.usage["prompt_tokens"]
        self.assertEqual(one.decision["prompt_tokens"], count, one)
        # Pages are named by our ids on our side and by the engine's in its events.
        two = asked(self.gateway, path, limited)
        self.assertEqual((two.predicted, two.cached), (full_pages(count),) * 2, two)


class Predictions(WithGateway):
    def test_conversations_that_evict_one_another_are_predicted_to_the_page(self):
        conversations = [Conversation(f"sequential {number}", first_words=600) for number in range(10)]
        answers = one_by_one(self.gateway, conversations, turns=5)
        self.report("one by one", answers)
        self.check_right(answers, RIGHT_MIN)
        self.assertEqual({one.knowledge for one in answers}, {"exact"})
        self.assertGreater(sum(one.cached > 0 for one in answers), len(answers) // 3)
        self.assertGreater(sum(one.cached == 0 for one in answers), len(conversations) - 1)

    def test_conversations_stay_with_their_holder(self):
        conversations = [Conversation(f"stay {number}") for number in range(4)]
        answers = one_by_one(self.gateway, conversations, turns=3)
        for conversation in conversations:
            turns = [one for one in answers if one.asked_by is conversation]
            self.assertEqual(len({one.worker for one in turns}), 1, turns)
            self.assertTrue(turns[-1].answer.headers["x-router-reason"].endswith("; knowledge=exact"))

    def test_salts_and_adapters_are_apart(self):
        body = Conversation("salted").body()
        bodies = [body, body | {"cache_salt": "one"}, body | {"cache_salt": "two"}]
        for turn in ("new", "known"):
            for salted in bodies:
                one = asked(self.gateway, "/v1/chat/completions", salted)
                self.assertTrue(one.is_right(), one)
                self.assertEqual(one.cached, full_pages(one.usage["prompt_tokens"]) if turn == "known" else 0, one)


class Apis(WithGateway):
    def test_every_row_of_sglang(self):
        count, taken = rows.check(self, "SGLang", servers[0].port, self.gateway, MODEL)
        print(f"{taken} of {count} taken", flush=True)
        self.assertGreater(taken, 10)


class Forgetting(WithGateway):
    @classmethod
    def setUpClass(cls):
        cls.gateway = cls.gateway_before(servers[:1], "--health-check-interval-secs", "1")

    def test_an_emptied_cache_is_known_at_once(self):
        conversations = [Conversation(f"flushed {number}") for number in range(3)]
        one_by_one(self.gateway, conversations, turns=2)
        before = self.cleared()
        self.assertEqual(request(servers[0].port, "/flush_cache", b"").status, 200)
        until("the gateway has heard", lambda: self.cleared() > before)
        answers = [conversation.turn(self.gateway) for conversation in conversations]
        self.assertEqual([one.cached for one in answers], [0, 0, 0])
        self.check_right(answers)

    def cleared(self):
        samples = self.gateway.samples("kvlane_kv_events_total")
        return sum(value for labels, value in samples.items() if ("kind", "cleared") in labels)

    def test_a_server_that_was_killed_is_not_expected_to_remember(self):
        conversations = [Conversation(f"killed {number}") for number in range(3)]
        self.check_right(one_by_one(self.gateway, conversations, turns=2))
        servers[0].kill()
        until("the gateway has noticed", lambda: not self.gateway.healthy())
        servers[0] = servers[0].restarted()
        start(servers[:1])
        until("the gateway trusts the server again", lambda: self.gateway.healthy() == {servers[0].url}, 60)
        self.gateway.wait_exact()
        answers = [conversation.turn(self.gateway) for conversation in conversations]
        self.assertEqual([one.cached for one in answers], [0, 0, 0])
        self.check_right(answers)
        self.check_right(one_by_one(self.gateway, conversations, turns=2))


if __name__ == "__main__":
    unittest.main()
