"""The gateway before two vLLM servers that share LMCache's server: what an engine has evicted, or never had, it fetches from there.

    e2e/vllm/lmcache.sh && e2e/.work/venv/bin/python e2e/vllm/test_tier.py -v

LMCache's connector publishes what the store holds among vLLM's events, in chunks. Chunks of vLLM's block size are known to the gateway
(`Known`). Larger ones, as they are by default, it ignores (`Outside`): of these it hears by `vllm:external_prefix_cache_hits_total` and by
what answers report as reused.
"""

import json
import sys
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conversations import Conversation, Predicting, asked
from engines import WORK, Engine, Gateway, free_port, metrics, request, start, until
from fleet import BLOCK_TOKENS, WithEvents

PATH = "/v1/chat/completions"
# Of about 800 tokens each: twice what both caches hold.
PROMPTS = 32
# Of predictions of what the store holds, the share that must be right to the block: the last blocks stored are published with the
# next step of an engine.
RIGHT_MIN = 0.9
PACKAGES = {"PYTHONPATH": str(WORK / "lmcache"), "LMCACHE_TRACK_USAGE": "false"}


class Store(Engine):
    """LMCache's server, which keeps blocks in host memory."""

    def __init__(self, chunk_tokens):
        self.port, self.blocks_port = free_port(), free_port()
        super().__init__(
            f"lmcache-{chunk_tokens}",
            [
                "nice", "-n", "5", str(WORK / "venv" / "bin" / "python"), "-m", "lmcache.v1.multiprocess.http_server",
                "--host", "127.0.0.1", "--port", str(self.blocks_port), "--http-host", "127.0.0.1", "--http-port", str(self.port),
                "--l1-size-gb", "1", "--eviction-policy", "LRU", "--chunk-size", str(chunk_tokens),
            ],
            PACKAGES | {"OMP_NUM_THREADS": "1"},
        )

    def is_ready(self):
        self.check_alive()
        try:
            return request(self.port, "/healthcheck", timeout_s=5).status == 200
        except OSError:
            return False


class Storing(WithEvents):
    """A server that copies each chunk of a prompt to the store, and has room for 200 blocks of its own."""

    context_tokens = 4096

    def __init__(self, number, store):
        self.store = store
        super().__init__(number)

    def options(self):
        transfer = {
            "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.store.blocks_port},
        }
        return [*super().options(), "--num-gpu-blocks-override", "200", "--kv-transfer-config", json.dumps(transfer)]

    def environment(self):
        # The store copies blocks by itself, as it does from and to a GPU. Otherwise it publishes nothing.
        return PACKAGES | {"LMCACHE_MP_TRANSFER_MODE": "lmcache_driven"}


class WithStore(Predicting):
    chunk_tokens: int

    @classmethod
    def setUpClass(cls):
        cls.addClassCleanup(remove_segments)
        store = Store(cls.chunk_tokens)
        cls.addClassCleanup(store.stop)
        store.wait_ready()
        cls.servers = [Storing(f"tier-{number}", store) for number in range(2)]
        for server in cls.servers:
            cls.addClassCleanup(server.stop)
        start(cls.servers)

    def gateway_before(self, servers):
        gateway = Gateway(servers, "fleet_cost", name=self.id().rpartition(".")[2])
        self.addCleanup(gateway.stop)
        gateway.wait_exact()
        return gateway

    @staticmethod
    def prompts(name):
        return [Conversation(f"{name} {number}", first_words=400).body() | {"max_tokens": 4} for number in range(PROMPTS)]

    def fetched(self):
        """Tokens that the engines have fetched from the store, by their own count."""
        return sum(metrics(server.port)["vllm:external_prefix_cache_hits_total"] for server in self.servers)

    def check_fetched(self, answers):
        """Each had all whole chunks of its prompt."""
        for one in answers:
            self.assertGreaterEqual(one.cached, (one.usage["prompt_tokens"] - 1) // self.chunk_tokens * self.chunk_tokens, one)


class Known(WithStore):
    chunk_tokens = BLOCK_TOKENS

    def test_blocks_of_the_store_are_predicted(self):
        gateway, prompts, before = self.gateway_before(self.servers), self.prompts("known"), self.fetched()
        new, again = ([asked(gateway, PATH, body) for body in prompts] for _ in range(2))
        self.report("from the store", again)
        self.check_fetched(again)
        self.check_right(new + again, RIGHT_MIN)
        self.assertGreater(sum(one.lower for one in again), sum(one.cached for one in again) // 2)
        self.assertGreater(self.fetched() - before, sum(one.cached for one in again) // 2)
        self.assertEqual({one.knowledge for one in new + again}, {"exact"})


class Outside(WithStore):
    chunk_tokens = 256

    def test_evicted_prompts_are_fetched_and_counted_apart(self):
        gateway, prompts, before = self.gateway_before(self.servers), self.prompts("evicted"), self.fetched()
        new, again = ([asked(gateway, PATH, body) for body in prompts] for _ in range(2))
        self.assertEqual({one.cached for one in new}, {0})
        self.check_right(new)
        self.check_fetched(again)
        beyond = [one.cached - one.predicted for one in again]
        print(f"\n{sum(beyond)} of {sum(one.cached for one in again)} reused tokens came from the store")
        self.assertGreater(sum(beyond), sum(one.cached for one in again) // 2)
        until("the engines have counted them", lambda: self.fetched() - before == sum(beyond))

        # What was fetched before the gateway had read that count may have looked wrong. Then it is forgiven, for each server.
        for server in self.servers:
            self.assertEqual(request(server.port, PATH, prompts[0]).status, 200)
        self.assertGreater(self.fetched() - before, sum(beyond))
        until(
            "the gateway has read it",
            lambda: counted(gateway, "kvlane_engine_external_hit_tokens_total") == self.fetched() - before,
        )
        gateway.wait_exact()
        expect = {what: counted(gateway, f"kvlane_prediction_{what}_total") for what in ("answers", "wrong", "outside_tokens")}

        last = [asked(gateway, PATH, body) for body in prompts]
        self.check_fetched(last)
        expect["answers"] += len(last)
        expect["outside_tokens"] += sum(one.cached - one.predicted for one in last)
        until("all are judged", lambda: counted(gateway, "kvlane_prediction_answers_total") == expect["answers"])
        self.assertEqual({what: counted(gateway, f"kvlane_prediction_{what}_total") for what in expect}, expect)
        self.assertEqual({one.knowledge for one in last}, {"exact"})
        events = gateway.samples("kvlane_kv_events_total")
        self.assertGreater(sum(count for labels, count in events.items() if ("kind", "ignored") in labels), 0)

    def test_what_one_server_has_computed_the_other_one_fetches(self):
        one, other = (self.gateway_before([server]) for server in self.servers)
        prompts = self.prompts("shared")[:8]
        self.assertEqual({asked(one, PATH, body).cached for body in prompts}, {0})
        answers = [asked(other, PATH, body) for body in prompts]
        self.check_fetched(answers)
        self.assertEqual({answer.predicted for answer in answers}, {0})
        # The engine has published what it was given.
        answer = asked(other, PATH, prompts[-1])
        self.assertGreater(answer.predicted, 0, answer)
        self.assertTrue(answer.is_right(), answer)


def remove_segments():
    """Workers of vLLM that a signal ends leave behind the memory that they shared with the store."""
    for segment in Path("/dev/shm").glob("lmcache_kv_*"):
        if not Path("/proc", segment.name.split("_")[2]).exists():
            segment.unlink()


def counted(gateway, name):
    return sum(gateway.samples(name).values())


if __name__ == "__main__":
    unittest.main()
