"""A load of conversations: every turn repeats all that was said before and adds to it."""

import asyncio
import json
import random
import time
from collections import Counter

import aiohttp
from engines import MODEL

SESSIONS, TURNS, IN_FLIGHT_MAX = 12, 6, 6
FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 2000, 100, 16
# Ids of ordinary tokens: neither special nor single bytes.
TOKEN_IDS = range(300, 4000)


class Sessions:
    """One run of the load."""

    HEADINGS = f"{'cached':>7} {'ttft p50':>9} {'p90':>9} {'p99':>9} {'req/s':>6}"

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.ttft_s, self.failures, self.servers = [], [], Counter()
        self.prompt_tokens = self.cached_tokens = 0
        self.wall_s = 0.0

    @staticmethod
    def describe():
        return (
            f"{SESSIONS} sessions of {TURNS} turns, {FIRST_TOKENS} tokens of prefix, {TURN_TOKENS} more a turn, "
            f"{ANSWER_TOKENS} answered, {IN_FLIGHT_MAX} requests at a time; times in ms"
        )

    def run(self, url):
        asyncio.run(self._run(url))
        return self

    async def _run(self, url):
        slots = asyncio.Semaphore(IN_FLIGHT_MAX)
        prefixes = [self._tokens(FIRST_TOKENS) for _ in range(SESSIONS)]
        began = time.perf_counter()
        async with aiohttp.ClientSession(url) as client:
            await asyncio.gather(*(self._session(client, slots, prefix) for prefix in prefixes))
        self.wall_s = time.perf_counter() - began

    async def _session(self, client, slots, prompt):
        for _ in range(TURNS):
            prompt = prompt + self._tokens(TURN_TOKENS)
            async with slots:
                await self._turn(client, prompt)

    async def _turn(self, client, prompt):
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
        }
        began = time.perf_counter()
        first, usage = None, None
        async with client.post("/v1/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter() - began
                    usage = json.loads(line[6:]).get("usage") or usage
            if response.status != 200 or usage is None:
                self.failures.append(response.status)
                return
            self.servers[response.headers["x-router-backend"]] += 1
        self.ttft_s.append(first)
        self.prompt_tokens += usage["prompt_tokens"]
        self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]

    def _tokens(self, count):
        return self.random.choices(TOKEN_IDS, k=count)

    def cached_share(self):
        return self.cached_tokens / self.prompt_tokens

    def line(self):
        ordered = sorted(self.ttft_s)
        p50, p90, p99 = (1000 * ordered[min(len(ordered) * p // 100, len(ordered) - 1)] for p in (50, 90, 99))
        return f"{self.cached_share():>7.1%} {p50:>9.0f} {p90:>9.0f} {p99:>9.0f} {len(ordered) / self.wall_s:>6.1f}"

    def per_server(self):
        return "/".join(str(count) for _, count in sorted(self.servers.items()))
