"""The gateway beside three vLLM servers that publish what their caches hold, and hold little.

    e2e/vllm/setup.sh && e2e/.work/venv/bin/python e2e/vllm/test_kv_events.py -v

Every assertion compares what the gateway predicted with what vLLM says it reused. A cache has room for two hundred blocks
of 32 tokens, so conversations drive one another out of it.
"""

import json
import os
import subprocess
import sys
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conversations import Conversation, Predicting, asked, at_once, cached, one_by_one, text
from engines import KVLANE, MODEL, Gateway, request, start, until
from fleet import BLOCK_TOKENS, Parallel, Publishing
from prompts import CHATS, COMPLETIONS

SERVERS = int(os.environ.get("E2E_SERVERS", "3"))
# Of predictions of a workload that evicts all the time, the share that must be right to the block.
RIGHT_MIN = 0.99
# A server that starts again while the machine is busy takes minutes.
BACK_S_MAX = 600
servers: list[Publishing] = []


def setUpModule():
    servers.extend(Publishing(number) for number in range(SERVERS))
    start(servers)


def tearDownModule():
    for server in servers:
        server.stop()


class WithGateway(Predicting):
    """Each group of tests has a gateway of its own, which finds caches as the last group has left them."""

    options: tuple[str, ...] = ()

    @classmethod
    def setUpClass(cls):
        cls.gateway = cls.gateway_before(servers, *cls.options)

    @classmethod
    def gateway_before(cls, chosen, *options):
        gateway = Gateway(chosen, "cache_aware", *options)
        cls.addClassCleanup(gateway.stop)
        gateway.wait_exact()
        return gateway


class Tokens(WithGateway):
    """Prompts are counted as vLLM counts them, id by id."""

    def test_every_prompt_has_the_engines_ids(self):
        for path, prompts in [("/v1/chat/completions", CHATS), ("/v1/completions", COMPLETIONS)]:
            for name, body in prompts.items():
                with self.subTest(path=path, prompt=name):
                    self.check_ids(path, {"model": MODEL} | body)

    def check_ids(self, path, body):
        theirs = request(servers[0].port, "/tokenize", body).json()["tokens"] if "messages" in body else None
        limited = body | {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
        one = asked(self.gateway, path, limited)
        count = one.usage["prompt_tokens"]
        self.assertEqual(one.decision["prompt_tokens"], count, one)
        if theirs is not None:
            self.assertEqual(len(theirs), count)
        # A block's name is made of the ids of all blocks before it, here from our ids, in the events from vLLM's: if
        # one differed, nothing after it would be found.
        two = asked(self.gateway, path, limited)
        self.assertGreater(two.cached, 0, two)
        self.assertEqual((two.predicted, two.cached), (full_blocks(count),) * 2, two)

    def test_other_apis_are_counted_too(self):
        messages = [{"role": "user", "content": text("other", 100)}]
        for path, body, total in [
            ("/v1/messages", {"max_tokens": 4, "system": "Be brief.", "messages": messages}, anthropic_tokens),
            ("/v1/responses", {"max_output_tokens": 4, "input": text("respond", 100)}, lambda usage: usage["input_tokens"]),
        ]:
            with self.subTest(path=path):
                one = asked(self.gateway, path, {"model": MODEL} | body)
                self.assertEqual(one.decision["prompt_tokens"], total(one.usage), one)
                two = asked(self.gateway, path, {"model": MODEL} | body)
                self.assertEqual(two.predicted, full_blocks(total(two.usage)), two)

    def test_doctor_finds_nothing_wrong(self):
        done = subprocess.run(
            [KVLANE, "doctor", "--json", "-", *(server.url for server in servers)],
            capture_output=True, text=True, timeout=300,
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        report = json.loads(done.stdout)
        self.assertEqual((report["failures"], len(report["engines"])), (0, SERVERS))
        for engine in report["engines"]:
            verdicts = {row["name"]: row["verdict"] for row in engine["checks"]}
            for name in ("tokenizer", "chat_template", "block_size", "events", "replay", "usage", "prediction"):
                self.assertEqual(verdicts[name], "ok", engine["checks"])


def full_blocks(prompt_tokens):
    """What a repeated prompt finds cached: its full blocks, but not its last token, which is computed anew."""
    return (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def anthropic_tokens(usage):
    keys = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(usage.get(key) or 0 for key in keys)


class Predictions(WithGateway):
    def test_conversations_that_evict_one_another_are_predicted_to_the_block(self):
        conversations = [Conversation(f"sequential {number}", first_words=600) for number in range(16)]
        answers = one_by_one(self.gateway, conversations, turns=7)
        self.report("one by one", answers)
        self.check_right(answers, RIGHT_MIN)
        self.assertTrue(all(one.knowledge == "exact" for one in answers))
        # There was something to predict, and something to predict wrongly.
        self.assertGreater(sum(one.cached > 0 for one in answers), len(answers) // 2)
        self.assertGreater(self.removed(), 0)

    def test_conversations_at_once_are_predicted(self):
        before = self.predictions()
        conversations = [Conversation(f"together {number}", first_words=300) for number in range(12)]
        workers = at_once(self.gateway, conversations, turns=6, clients=4)
        answers, wrong = (after - at_first for after, at_first in zip(self.predictions(), before))
        print(f"\nat once: {wrong:.0f} of {answers:.0f} predictions off by more than a block")
        self.assertGreater(answers, len(conversations) * 4)
        self.assertLessEqual(wrong, (1 - RIGHT_MIN) * answers)
        # Sessions land on their holder: all of them do from the second turn on, but where load decides otherwise.
        turns = [(first, second) for used in workers.values() for first, second in zip(used, used[1:])]
        stayed = sum(first == second for first, second in turns)
        print(f"{stayed} of {len(turns)} turns at the server of the turn before")
        self.assertGreaterEqual(stayed, 0.9 * len(turns))

    def predictions(self):
        return [sum(self.gateway.samples(f"kvlane_prediction_{what}_total").values()) for what in ("answers", "wrong")]

    def removed(self):
        samples = self.gateway.samples("kvlane_kv_events_total")
        return sum(value for labels, value in samples.items() if ("kind", "removed") in labels)

    def test_what_went_past_the_gateway_is_known(self):
        body = Conversation("past").body()
        direct = servers[-1]
        self.assertEqual(cached(request(direct.port, "/v1/chat/completions", body).json()["usage"]), 0)
        one = until("the gateway has heard", lambda: self.at(direct, body))
        self.assertTrue(one.is_right(), one)
        self.assertGreater(one.cached, 0)

    def at(self, server, body):
        one = asked(self.gateway, "/v1/chat/completions", body)
        return one if one.worker == server.url else None

    def test_a_new_gateway_knows_what_was_cached_before_it(self):
        conversation = Conversation("before")
        self.gateway.ask("/v1/chat/completions", conversation.body())
        holder = self.gateway.decisions()[0]["worker"]
        late = self.gateway_before(servers)
        one = conversation.turn(late)
        self.assertEqual(one.worker, holder)
        self.assertTrue(one.is_right(), one)
        self.assertGreater(one.cached, 0)


class Shown(WithGateway):
    """Where operators look."""

    def test_knowledge_is_exact_wherever_it_is_shown(self):
        conversation = Conversation("shown")
        for _ in range(3):
            one = conversation.turn(self.gateway)
            self.assertTrue(one.answer.headers["x-router-reason"].endswith("; knowledge=exact"), one.answer.headers)
        readiness = request(self.gateway.admin_port, "/readiness").json()
        (pool,) = readiness["pools"]
        self.assertEqual((pool["prefix_knowledge"], pool["block_tokens"]), ("exact", BLOCK_TOKENS))
        self.assertEqual(pool["knowledge"]["exact"], SERVERS)
        for labels, value in self.gateway.samples("kvlane_worker_knowledge").items():
            self.assertEqual(value, float(("knowledge", "exact") in labels), labels)

    def test_the_counters_are_the_sums_of_the_answers(self):
        names = ["answers", "predicted_tokens", "reported_tokens", "both_tokens", "wrong"]

        def counted():
            return [sum(self.gateway.samples(f"kvlane_prediction_{name}_total").values()) for name in names]

        before = counted()
        conversations = [Conversation(f"counted {number}") for number in range(4)]
        answers = one_by_one(self.gateway, conversations, turns=4)
        expect = [
            len(answers), sum(one.predicted for one in answers), sum(one.cached for one in answers),
            sum(min(one.predicted, one.cached) for one in answers),
            sum(abs(one.predicted - one.cached) > BLOCK_TOKENS for one in answers),
        ]
        now = until(
            "the last answer is counted",
            lambda: (now := [after - at_first for after, at_first in zip(counted(), before)])[0] >= len(answers) and now,
        )
        self.assertEqual(dict(zip(names, now)), dict(zip(names, expect)))


class Apart(WithGateway):
    """Prompts of the same ids that share no cache: neither for vLLM nor for the gateway."""

    def test_tenants_with_different_salts(self):
        self.check_apart([{}, {"cache_salt": "one"}, {"cache_salt": "two"}])

    def test_a_model_and_its_adapter(self):
        self.check_apart([{}, {"model": Publishing.ADAPTER}, {"model": Publishing.ADAPTER, "cache_salt": "one"}])

    def check_apart(self, kinds):
        bodies = [Conversation(self.id()).body() | kind for kind in kinds]
        for turn in ("new", "known"):
            for body in bodies:
                one = asked(self.gateway, "/v1/chat/completions", body)
                self.assertTrue(one.is_right(), one)
                self.assertEqual(one.cached, full_blocks(one.usage["prompt_tokens"]) if turn == "known" else 0, one)


class Forgetting(WithGateway):
    """One server alone, so that there is one cache to be right about."""

    @classmethod
    def setUpClass(cls):
        cls.gateway = cls.gateway_before(servers[:1], "--health-check-interval-secs", "1")

    def test_evicted_prefixes_are_not_expected(self):
        first = Conversation("evicted", first_words=600)
        answers = [first.turn(self.gateway) for _ in range(2)]
        others = [Conversation(f"evicting {number}", first_words=900) for number in range(8)]
        answers += one_by_one(self.gateway, others, turns=2)
        last = first.turn(self.gateway)
        self.assertLess(last.cached, answers[1].cached)
        self.check_right([*answers, last], RIGHT_MIN)

    def test_an_emptied_cache_is_mistaken_once(self):
        conversations = [Conversation(f"reset {number}") for number in range(3)]
        one_by_one(self.gateway, conversations, turns=2)
        # vLLM says so only with the next batch it publishes.
        servers[0].forget_prefixes()
        answers = [conversation.turn(self.gateway) for conversation in conversations]
        self.assertEqual([one.cached for one in answers], [0, 0, 0])
        self.assertGreater(answers[0].predicted, 0)
        self.check_right(answers[1:])
        self.check_right(one_by_one(self.gateway, conversations, turns=2))

    def test_a_server_that_was_killed_is_not_expected_to_remember(self):
        # This one does not look after its server: only the feed can tell it of the restart.
        unaware = self.gateway_before(servers[:1], "--health-check-interval-secs", "3600")
        gateways = [self.gateway, unaware]
        conversations = [Conversation(f"killed {number}") for number in range(4)]
        answers = one_by_one(self.gateway, conversations, turns=2)
        self.check_right(answers)
        self.assertTrue(any(one.cached for one in answers))
        for gateway in gateways:
            self.assertTrue(asked(gateway, "/v1/chat/completions", Conversation("both know").body()).is_right())

        servers[0].kill()
        until("the gateway has noticed", lambda: not self.gateway.healthy())
        servers[0] = servers[0].restarted()
        start(servers[:1])
        until("the gateway trusts the server again", lambda: self.gateway.healthy() == {servers[0].url}, BACK_S_MAX)
        for gateway in gateways:
            gateway.wait_exact()

        # Both had two conversations that they knew to be cached: neither expects anything of a server that says nothing.
        answers = [conversation.turn(gateway) for conversation, gateway in zip(conversations, gateways * 2)]
        self.assertEqual([one.cached for one in answers], [0] * len(answers))
        self.check_right(answers)
        for gateway in gateways:
            again = one_by_one(gateway, conversations, turns=2)
            self.check_right(again)
            self.assertTrue(all(one.knowledge == "exact" for one in again), again)


class DataParallel(WithGateway):
    """One server of two engines, each with a cache and a feed of its own."""

    @classmethod
    def setUpClass(cls):
        cls.server = Parallel(SERVERS)
        cls.addClassCleanup(cls.server.stop)
        start([cls.server])
        cls.gateway = cls.gateway_before([cls.server])

    def test_conversations_stay_at_the_rank_that_holds_them(self):
        (worker,) = self.gateway.workers()
        self.assertEqual({pool["rank"] for pool in worker["pools"]}, {0, 1})
        conversations = [Conversation(f"rank {number}") for number in range(6)]
        answers = one_by_one(self.gateway, conversations, turns=4)
        self.report("two ranks", answers)
        self.check_right(answers, RIGHT_MIN)
        for conversation in conversations:
            turns = [one for one in answers if one.asked_by is conversation]
            self.assertEqual(len({one.worker for one in turns}), 1, turns)
            self.assertGreater(turns[-1].cached, 0, turns)
        self.assertEqual(len({one.worker for one in answers}), 2, "both ranks have some")


if __name__ == "__main__":
    unittest.main()
