"""What placement by adapters (LoRA) is worth on real vLLM servers: policies in turns on the same requests.

    e2e/vllm/setup.sh && e2e/.work/venv/bin/python e2e/models/adapters.py

SERVERS vLLM servers with SLOTS slots each (`--max-loras`, and as many in host memory) list ADAPTERS adapters of rank RANK.
Of an adapter that is in no slot, vLLM reads the weights from the disk: that is a load, and vLLM's log says each one. Requests
come at RATE a second, at random; their adapters follow Zipf's law with exponent 1, their prompts of WORDS words share nothing. Each of
ROUNDS rounds sends REQUESTS requests through a gateway of each policy in turn; those of a round are the same for all. The
first fifth of them is not counted: engines and gateway get to know each other.

Prints how long a load takes, then for each policy mean, p50 and p90 of the times to first token, their mean over the rounds
with its 95 % interval, and the loads.
"""

import json
import math
import os
import random
import statistics
import sys
import threading
import time
from pathlib import Path

sys.dont_write_bytecode = True
sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "vllm")]

from engines import WORK, Gateway, begin, start
from fleet import Vllm
from tiny_model import adapter

SERVERS = int(os.environ.get("SERVERS", "2"))
SLOTS = int(os.environ.get("SLOTS", "2"))
ADAPTERS = int(os.environ.get("ADAPTERS", "8"))
RATE = float(os.environ.get("RATE", "1"))
REQUESTS = int(os.environ.get("REQUESTS", "60"))
ROUNDS = int(os.environ.get("ROUNDS", "3"))
WORDS = int(os.environ.get("WORDS", "20"))
RANK = int(os.environ.get("RANK", "16"))
WEIGHTS = WORK / f"model-rank{RANK}-lora"
POLICIES = os.environ.get("POLICIES", "fleet_cost prefer_loaded round_robin").split()
NAMES = [f"adapter-{number}" for number in range(ADAPTERS)]
# Student's t for 95 %, by degrees of freedom.
T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 11: 2.20}
LOAD = "Adding lora. Model id"


class WithAdapters(Vllm):
    context_tokens = 4096

    def options(self):
        modules = [f"{name}={WEIGHTS}" for name in NAMES]
        return [
            "--enable-lora", "--max-loras", str(SLOTS), "--max-cpu-loras", str(SLOTS), "--max-lora-rank", str(RANK),
            "--lora-modules", *modules,
        ]

    def environment(self):
        # Only vLLM's adapters log in detail: what they load.
        log = {
            "version": 1, "disable_existing_loggers": False,
            "handlers": {"all": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}},
            "loggers": {
                "vllm": {"handlers": ["all"], "level": "INFO", "propagate": False},
                "vllm.lora": {"handlers": ["all"], "level": "DEBUG", "propagate": False},
            },
        }
        path = WORK / "adapters-log.json"
        path.write_text(json.dumps(log))
        return {"VLLM_LOGGING_CONFIG_PATH": str(path)}

    def loads(self):
        return self.log.read_text(errors="replace").count(LOAD)


def ttft_ms(port, model, prompt):
    """Milliseconds to the first event of a streamed completion, which is read to its end."""
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
    began = time.monotonic()
    connection, response = begin(port, "/v1/completions", body)
    try:
        if response.status != 200:
            raise AssertionError(f"{response.status}: {response.read()[:300]}")
        while not response.readline().startswith(b"data: "):
            pass
        taken = 1000 * (time.monotonic() - began)
        response.read()
        return taken
    finally:
        connection.close()


def prompt_of(random_, words):
    return " ".join(str(random_.randrange(10**6)) for _ in range(words))


def load_ms(server):
    """By how much a first token is later when its adapter must be loaded, one request at a time."""
    random_ = random.Random("a load")
    ask = lambda name: ttft_ms(server.port, name, prompt_of(random_, WORDS))
    for name in NAMES[: SLOTS + 1]:
        ask(name)
    # One more than there are slots, in turn: the one that is asked for is always the one that has just gone.
    loaded = [ask(NAMES[number % (SLOTS + 1)]) for number in range(8 * (SLOTS + 1))]
    kept = [ask(NAMES[0]) for _ in range(25)][1:]
    return statistics.median(loaded), statistics.median(kept)


def requests(seed):
    """When each request is sent, in seconds, for which adapter, and its prompt."""
    random_ = random.Random(f"round {seed}")
    weights = [1 / (rank + 1) for rank in range(ADAPTERS)]
    at, made = 0.0, []
    for _ in range(REQUESTS):
        at += random_.expovariate(RATE)
        made.append((at, random_.choices(NAMES, weights)[0], prompt_of(random_, WORDS)))
    return made


def run(policy, servers, made):
    """Times to first token in milliseconds, and loads."""
    gateway = Gateway(servers, policy, name=f"kvlane-adapters-{policy}")
    times, errors = {}, []
    settled = len(made) // 5
    before = [0]

    def ask(number, model, prompt):
        try:
            times[number] = ttft_ms(gateway.port, model, prompt)
        except Exception as error:  # Told below: a thread's own end says nothing.
            errors.append(error)

    try:
        began, threads = time.monotonic(), []
        for number, (at, model, prompt) in enumerate(made):
            time.sleep(max(0.0, began + at - time.monotonic()))
            if number == settled:
                before[0] = sum(server.loads() for server in servers)
            threads.append(threading.Thread(target=ask, args=(number, model, prompt)))
            threads[-1].start()
        for thread in threads:
            thread.join()
    finally:
        gateway.stop()
    if errors:
        raise AssertionError(f"{len(errors)} of {len(made)} requests failed; the first: {errors[0]}")
    loads = sum(server.loads() for server in servers) - before[0]
    return [times[number] for number in range(settled, len(made))], loads


def interval(values):
    """Mean and half of its 95 % interval."""
    if len(values) < 2:
        return statistics.mean(values), math.nan
    half = T95.get(len(values) - 1, 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), half


def quantile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main():
    adapter(WEIGHTS, WORK / "model", rank=RANK)
    servers = [WithAdapters(number) for number in range(SERVERS)]
    try:
        start(servers)
        with_load, without = load_ms(servers[0])
        print(f"alone, p50: {with_load:.0f} ms to a first token after a load, {without:.0f} ms without", flush=True)
        found = {policy: [] for policy in POLICIES}
        for number in range(ROUNDS):
            made = requests(number)
            # Each policy is first, second and third equally often.
            turn = number % len(POLICIES)
            for policy in POLICIES[turn:] + POLICIES[:turn]:
                times, loads = run(policy, servers, made)
                found[policy].append((times, loads))
                print(f"round {number} {policy:14} mean {statistics.mean(times):5.0f} ms, {loads} loads", flush=True)
    finally:
        for server in servers:
            server.stop()
    counted = REQUESTS - REQUESTS // 5
    print(f"\n{SERVERS} servers, {SLOTS} slots, {ADAPTERS} adapters, {RATE} requests/s, {ROUNDS} rounds of {counted} counted requests\n")
    print("| Policy | TTFT mean ms | p50 | p90 | Loads a round |\n|---|---|---|---|---|")
    for policy, rounds in found.items():
        cells = [
            interval([statistics.mean(times) for times, _ in rounds]),
            interval([quantile(times, 0.5) for times, _ in rounds]),
            interval([quantile(times, 0.9) for times, _ in rounds]),
            interval([loads for _, loads in rounds]),
        ]
        print(f"| `{policy}` | " + " | ".join(f"{mean:.0f} ± {half:.0f}" for mean, half in cells) + " |")


if __name__ == "__main__":
    main()
