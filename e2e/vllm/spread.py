"""How far times to first token of equal requests to one real vLLM server lie apart: no prediction can be nearer than that.

    e2e/vllm/setup.sh
    e2e/.work/venv/bin/python e2e/vllm/spread.py [--quota 0.6] [--requests 30]

One server with a part of a core of its own (Linux, root, cgroups), asked one prompt after the other, none of which begins like
another, beside so many answers that it decodes all the time. Shares are of requests by how near they are to the median of
their row. What e2e/vllm/learning.py shows is to be compared with it.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp
from engines import MODEL, start
from fleet import Vllm, limited
from learning import TOKEN_IDS

PROMPT_TOKENS = [150, 350, 1500]
DECODING = [0, 1, 2]
UNCOUNTED = 3


async def first_token_s(client, prompt_tokens, answer_tokens):
    body = {
        "model": MODEL, "prompt": random.choices(TOKEN_IDS, k=prompt_tokens), "max_tokens": answer_tokens,
        "ignore_eos": True, "temperature": 0, "stream": True,
    }
    sent, first = time.perf_counter(), None
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if first is None and line.startswith(b"data: {"):
                first = time.perf_counter()
    return first - sent


async def decode(client):
    while True:
        await first_token_s(client, prompt_tokens=50, answer_tokens=64)


async def measure(url, requests):
    async with aiohttp.ClientSession(url) as client:
        for decoding in DECODING:
            others = [asyncio.create_task(decode(client)) for _ in range(decoding)]
            for tokens in PROMPT_TOKENS:
                times = [await first_token_s(client, tokens, answer_tokens=2) for _ in range(requests)][UNCOUNTED:]
                median = statistics.median(times)
                within = [sum(abs(each / median - 1) <= most for each in times) / len(times) for most in (0.15, 0.35)]
                print(f"| {tokens:,} | {decoding} | {median * 1000:.0f} |", " | ".join(f"{share:.0%}" for share in within), "|", flush=True)
            for other in others:
                other.cancel()


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--quota", type=float, default=0.6, help="part of a core for the server")
    options.add_argument("--requests", type=int, default=30, help=f"of each row, of which {UNCOUNTED} do not count")
    options = options.parse_args()
    random.seed(1)
    servers = [Vllm(0)]
    start(servers)
    limited(servers, [options.quota])
    print("| prompt tokens | answers decoded beside it | median ms | within 15 % of it | within 35 % |")
    print("|---" * 5 + "|")
    asyncio.run(measure(servers[0].url, options.requests))
    servers[0].stop()


if __name__ == "__main__":
    main()
