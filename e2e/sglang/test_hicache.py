"""The gateway before two SGLang servers with HiCache: what is evicted from a cache is still in host memory, and is loaded back.

    e2e/sglang/setup.sh && e2e/.work/sglang/bin/python e2e/sglang/test_hicache.py -v

A cache has room for 6,144 tokens, and the host memory beside it for twice as many. Both are published: copies in host memory with the
medium `CPU_PINNED`.
"""

import sys
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from conversations import Conversation, Predicting, asked
from engines import WORK, Gateway, start
from test_sglang import RIGHT_MIN, Sglang, full_pages

PATH = "/v1/chat/completions"
# Of about 800 tokens each: nearly twice what a cache has room for, and less than the host memory has.
PROMPTS = 13
# More than the host memory has room for.
OTHERS = 20


class Tiered(Sglang):
    """A server that copies each block to host memory as soon as it is computed."""

    def options(self):
        return [
            "--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-write-policy", "write_through",
            # What the plugin has a stand-in for.
            "--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first",
        ]

    def environment(self):
        return {"PYTHONPATH": str(WORK / "sglang" / "hicache")}


class HostMemory(Predicting):
    @classmethod
    def setUpClass(cls):
        cls.servers = [Tiered(f"tier-{number}") for number in range(2)]
        for server in cls.servers:
            cls.addClassCleanup(server.stop)
        start(cls.servers)

    def gateway_before(self, servers):
        gateway = Gateway(servers, "fleet_cost", "--set", "tokens.source=engine", name=self.id().rpartition(".")[2])
        self.addCleanup(gateway.stop)
        gateway.wait_exact()
        return gateway

    @staticmethod
    def prompts(name, count):
        return [Conversation(f"{name} {number}", first_words=400).body() | {"max_tokens": 4} for number in range(count)]

    @staticmethod
    def ask_all(gateway, prompts):
        return [asked(gateway, PATH, body) for body in prompts]

    def check_trusted(self, gateway, answers):
        self.check_right(answers, RIGHT_MIN)
        self.assertEqual({one.knowledge for one in answers}, {"exact"})
        for what in ("wrong", "outside_tokens"):
            self.assertEqual(sum(gateway.samples(f"kvlane_prediction_{what}_total").values()), 0.0, what)

    def test_what_is_evicted_to_host_memory_is_predicted_and_found(self):
        gateway, prompts = self.gateway_before(self.servers[:1]), self.prompts("evicted", PROMPTS)
        new, again = (self.ask_all(gateway, prompts) for _ in range(2))
        self.assertEqual({one.cached for one in new}, {0})
        self.assertEqual([one.cached for one in again], [full_pages(one.usage["prompt_tokens"]) for one in again])
        # Each prompt has driven out of the cache the one that is asked for next.
        below = [one.lower for one in again]
        self.assertGreater(sum(below), sum(one.cached for one in again) // 2, below)
        self.assertEqual({one.lower for one in new}, {0})
        self.check_trusted(gateway, new + again)

    def test_what_is_evicted_from_host_memory_too_is_not_predicted(self):
        gateway, prompts = self.gateway_before(self.servers[:1]), self.prompts("forgotten", 2)
        answers = self.ask_all(gateway, prompts + self.prompts("others", OTHERS) + prompts)
        self.assertEqual([one.cached for one in answers[-2:]], [0, 0])
        self.check_trusted(gateway, answers)

    def test_prompts_go_to_the_host_memory_that_has_them(self):
        gateway, prompts = self.gateway_before(self.servers), self.prompts("stay", PROMPTS)
        new, again = (self.ask_all(gateway, prompts) for _ in range(2))
        self.assertEqual([one.worker for one in again], [one.worker for one in new])
        self.assertEqual([one.cached for one in again], [full_pages(one.usage["prompt_tokens"]) for one in again])
        self.check_trusted(gateway, new + again)


if __name__ == "__main__":
    unittest.main()
