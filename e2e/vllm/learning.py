"""How well kvlane learns the speed of real vLLM servers, and predicts their time to first token.

    e2e/vllm/setup.sh
    cargo build --release -p kvlane --bin kvlane
    e2e/.work/venv/bin/python e2e/vllm/learning.py [--quota 0.6] [--rounds 3]

Three servers, each with a part of a core of its own, so that what one computes does not slow the others (Linux, root,
cgroups). Every kind of traffic gets a gateway that has learned nothing; its first
hundred requests teach, predictions of the rest are judged.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp
from engines import MODEL, Gateway, start
from fleet import Vllm, limited

SERVERS = 3
TAUGHT = 100
# Ids of ordinary tokens: neither special nor single bytes.
TOKEN_IDS = range(300, 4000)


@dataclass(frozen=True)
class Traffic:
    """Conversations: every turn repeats all that was said before and adds to it."""

    name: str
    conversations: int
    turns: int
    first_tokens: int
    turn_tokens: int
    answer_tokens: int
    in_flight_max: int = 6
    # Of so many requests one is streamed.
    streamed_every: int = 1


KINDS = [
    Traffic("short answers", 20, 8, 200, 150, 16),
    Traffic("long answers", 10, 14, 200, 60, 64),
    Traffic("long prompts", 60, 3, 1500, 300, 16),
    Traffic("two of three not streamed", 30, 8, 200, 150, 16, streamed_every=3),
]


def percent(share):
    return f"{share:.0%}"


# Of each server's rates, in the order of the columns.
SHOWN = {
    "prefill_token_s": lambda seconds: f"{1 / seconds:.0f}",
    "prefill_error": percent,
    "step_s": lambda seconds: f"{1000 * seconds:.1f}",
    "decode_error": percent,
}
HEADINGS = [
    "traffic", "round", "judged", "within 15 %", "within 35 %", "prefill tokens/s", "their errors", "step ms",
    "their errors", "mean gap ms",
]


class Load:
    """One run of a kind of traffic."""

    def __init__(self, traffic, seed):
        self.traffic, self.random = traffic, random.Random(seed)
        self.sent, self.gaps_s = 0, []
        self.counts_then = None

    async def run(self, gateway):
        self.gateway, slots = gateway, asyncio.Semaphore(self.traffic.in_flight_max)
        async with aiohttp.ClientSession(gateway.url) as client:
            await asyncio.gather(*(self.converse(client, slots) for _ in range(self.traffic.conversations)))

    async def converse(self, client, slots):
        prompt = self.tokens(self.traffic.first_tokens)
        for _ in range(self.traffic.turns):
            prompt = prompt + self.tokens(self.traffic.turn_tokens)
            async with slots:
                await self.ask(client, prompt)

    async def ask(self, client, prompt):
        self.sent += 1
        if self.sent == TAUGHT:
            self.counts_then = await asyncio.to_thread(counts, self.gateway)
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": self.traffic.answer_tokens, "ignore_eos": True,
            "temperature": 0, "stream": self.sent % self.traffic.streamed_every == 0,
        }
        times = []
        async with client.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())
        if len(times) > 1:
            self.gaps_s.append((times[-1] - times[0]) / (len(times) - 1))

    def tokens(self, count):
        return self.random.choices(TOKEN_IDS, k=count)


def counts(gateway):
    """First tokens by the error of their prediction."""
    samples = gateway.samples("kvlane_ttft_predictions_total")
    by = {dict(labels)["error"]: int(value) for labels, value in samples.items()}
    return [by.get(error, 0) for error in ("0-15%", "15-35%", "35-100%", "100%+")]


def recorded(options, traffic, seed):
    """Options of a gateway that records its decisions, if that is wanted."""
    if not options.record:
        return []
    options.record.mkdir(parents=True, exist_ok=True)
    config = options.record / f"{traffic.name}-{seed}.yaml"
    config.write_text(json.dumps({"recorder": {"enabled": True, "dir": str(config.with_suffix("").resolve())}}))
    return ["--config", str(config)]


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--quota", type=float, default=0.6, help="part of a core for each server")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--kinds", type=int, nargs="*", default=range(len(KINDS)), help="numbers of the kinds of traffic")
    options.add_argument("--record", type=Path, help="a directory for recordings, which kvlane explain reads")
    options = options.parse_args()
    servers = [Vllm(number) for number in range(SERVERS)]
    start(servers)
    limited(servers, [options.quota] * SERVERS)
    print(f"| {' | '.join(HEADINGS)} |")
    print("|---" * len(HEADINGS) + "|")
    for seed in range(options.rounds):
        for traffic in (KINDS[number] for number in options.kinds):
            for server in servers:
                server.forget_prefixes()
            gateway = Gateway(servers, "fleet_cost", *recorded(options, traffic, seed), name="kvlane-learning")
            load = Load(traffic, seed)
            asyncio.run(load.run(gateway))
            judged = [now - then for now, then in zip(counts(gateway), load.counts_then)]
            rates = [pool["rates"] for worker in gateway.workers() for pool in worker["pools"]]
            total, gap_ms = sum(judged), 1000 * statistics.mean(load.gaps_s)
            row = [
                traffic.name, seed, total, percent(judged[0] / total), percent(sum(judged[:2]) / total),
                *(", ".join(show(rate[of]) for rate in rates) for of, show in SHOWN.items()), f"{gap_ms:.1f}",
            ]
            print(f"| {' | '.join(map(str, row))} |", flush=True)
            gateway.stop()


if __name__ == "__main__":
    main()
