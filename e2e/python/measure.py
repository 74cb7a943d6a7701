"""What the module costs: a simulation from Python beside the program's, and the router's calls. Prints figures, asserts none.

    e2e/.work/python/bin/python e2e/python/measure.py          # after e2e/python/setup.sh, with its default, a release build

Both simulations are the same work with the same number of threads; runs alternate, and the median counts. The program's time
includes its start, Python's does not include the interpreter's.
"""

import argparse
import array
import os
import random
import statistics
import subprocess
import time

import kvlane
import numpy

from installed import PROGRAM

SETTINGS = {"workload": "chat", "engines": 8, "rate": [(4, 60)], "policy": ["round_robin", "cache_aware", "fleet_cost"]}
FLAGS = ["--workload", "chat", "--engines", "8", "--rate", "4x60", "--policy", "round_robin,cache_aware,fleet_cost"]
ENGINES = 8


def timed(work):
    """Seconds of wall time, and of CPU, of this process and its children."""
    cpu = lambda: sum(os.times()[:4])
    began, used = time.perf_counter(), cpu()
    work()
    return time.perf_counter() - began, cpu() - used


def simulate(runs, jobs):
    """Medians: from Python, and of the program."""
    command = [PROGRAM, "simulate", *FLAGS, "--jobs", str(jobs), "--json"]
    program = lambda: subprocess.run(command, check=True, capture_output=True)
    module = lambda: kvlane.simulate(**SETTINGS, jobs=jobs)
    program(), module()
    pairs = [(timed(module), timed(program)) for _ in range(runs)]
    for place, what in enumerate(("wall", "CPU")):
        ours, theirs = [statistics.median(pair[who][place] for pair in pairs) for who in (0, 1)]
        ratio = statistics.median(pair[0][place] / pair[1][place] for pair in pairs)
        print(f"simulate, {jobs} threads, {what}: {ours:.3f} s from Python, {theirs:.3f} s by the program; median ratio {ratio:.3f}")


def arrive(calls, form, prompt_tokens, events):
    """Median and 99th percentile in microseconds of `arrive`, with 32 requests in flight; conversations grow."""
    router = kvlane.Router("fleet_cost", kv_events=events, seed=1)
    for engine in range(ENGINES):
        router.join(f"http://10.0.0.{engine}:8000")
    draw = random.Random(1)
    ids = [draw.randrange(100_000) for _ in range(prompt_tokens + 4 * calls)]
    prompts = [form(ids[4 * n : 4 * n + prompt_tokens] if n % 4 == 0 else ids[:prompt_tokens]) for n in range(calls)]
    flying, taken, settled = [], [], []
    for prompt in prompts:
        began = time.perf_counter_ns()
        decision = router.arrive(prompt)
        taken.append((time.perf_counter_ns() - began) / 1e3)
        router.progress(decision.request)
        flying.append(decision.request)
        if len(flying) > 32:
            began = time.perf_counter_ns()
            router.settle(flying.pop(0))
            settled.append((time.perf_counter_ns() - began) / 1e3)
    taken.sort()
    return taken[len(taken) // 2], taken[len(taken) * 99 // 100], statistics.median(settled)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--calls", type=int, default=4000)
    args = parser.parse_args()
    for jobs in (1, 2):
        simulate(args.runs, jobs)
    forms = {
        "bytes": lambda ids: numpy.array(ids, dtype="<u4").tobytes(),
        "NumPy int64": numpy.array,
        "array('I')": lambda ids: array.array("I", ids),
        "list": list,
    }
    for prompt_tokens in (512, 2048, 8192):
        for name, form in forms.items():
            median, p99, settle = arrive(args.calls, form, prompt_tokens, False)
            print(
                f"arrive, {ENGINES} endpoints, {prompt_tokens} tokens as {name}: median {median:.1f} µs, p99 {p99:.1f} µs; settle {settle:.1f} µs"
            )


if __name__ == "__main__":
    main()
