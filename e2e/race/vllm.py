"""kvlane beside other routers in front of three real vLLM servers that do not share their compute.

    e2e/vllm/setup.sh && e2e/race/setup.sh
    cargo build --release -p kvlane --bin kvlane
    python3 e2e/race/vllm.py [--workloads steady,groups,mixed,slow] [--seeds 5] [--window 30] [--quota 0.5]
        [--routers kvlane,sglang-router]

Each server has a part of a core of its own (cgroups: Linux, root). Everything else is `kvlane bench`: the same requests
through one router after the other, in turns, with intervals. What is over is kept in target/race-vllm, so that the same
command goes on from it. docs/bench.md says how to read the result.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "vllm")]

from engines import KVLANE, MODEL, start  # noqa: E402
from fleet import WithEvents, limited  # noqa: E402

OUT = HERE.parents[1] / "target" / "race-vllm"
PEERS = HERE / ".work" / "venv" / "bin"
SERVERS = 3

# Conversations or requests a second, and what they are. Answers are short: a step takes a tenth of a second.
WORKLOADS = {
    # Six turns, after one of six system prompts.
    "steady": (0.8, {
        "kind": "chat", "turns": 6.0, "system_prompts": 6, "system_prompt_tokens": 300.0, "question_tokens": 150.0,
        "output_tokens": 16.0, "think_s": {"median": 2.0, "p90": 6.0, "max": 20.0}, "context_tokens_max": 4000,
    }),
    # Documents by Zipf's law, more of them than the caches hold.
    "groups": (3.0, {
        "kind": "rag", "documents": 60, "skew": 1.0, "documents_per_prompt": 1, "instruction_tokens": 50,
        "document_tokens": {"median": 900.0, "p90": 1500.0, "max": 3000.0}, "question_tokens": 60.0, "output_tokens": 16.0,
    }),
    # One prompt in ten is much longer.
    "mixed": (2.0, {
        "kind": "mixed", "long_share": 0.1, "short_input_tokens": {"median": 150.0, "p90": 300.0, "max": 600.0},
        "short_output_tokens": 24.0, "long_input_tokens": {"median": 4000.0, "p90": 6000.0, "max": 8000.0},
        "long_output_tokens": 24.0,
    }),
}
# The same conversations, of which one server has half the speed.
WORKLOADS["slow"] = (0.6, WORKLOADS["steady"][1])

ROUTERS = [
    {"router": "kvlane", "policies": ["fleet_cost", "lmetric", "cache_aware", "session_sticky"]},
    {"router": "sglang-router", "program": str(PEERS / "sglang-router")},
    {"router": "vllm-router", "program": str(PEERS / "vllm-router")},
]


class Small(WithEvents):
    """One whose cache holds a few dozen prompts."""

    cache_bytes = "48M"


def bench(name, servers, options):
    """Races the routers on one workload."""
    rate, kind = WORKLOADS[name]
    OUT.mkdir(parents=True, exist_ok=True)
    file = OUT / f"{name}.yaml"
    file.write_text(json.dumps({
        "about": f"Three vLLM servers on the CPU with {options.quota} of a core each: {name}.",
        "fleet": {"urls": [server.url for server in servers], "flush": "vllm"},
        "model": MODEL,
        "workload": {"generate": kind, "window_s": options.window},
        "loads": {"rate": [rate * options.load]},
        "seeds": list(range(1, options.seeds + 1)),
        "routers": ROUTERS,
        "ours": "kvlane/fleet_cost",
        "warm_up": {"requests": 12, "window_s": options.window / 4},
    }, indent=2))
    command = [KVLANE, "bench", file, "--records", OUT / name, "--json", OUT / f"{name}.json", "--html", OUT / f"{name}.html"]
    command += ["--routers", options.routers] if options.routers else []
    return subprocess.run(command, check=False).returncode


def summed_up(names):
    """Prints a Markdown table of all workloads that are over."""
    with_interval = lambda figure: "{:.2f} ({low:.2f} to {high:.2f})".format(figure["value"], **figure["interval"])  # noqa: E731
    print("\n| Workload | Router | TTFT mean s | p90 | p99 | E2E mean s | from cache | TTFT of ours / of it | E2E of ours / of it |")
    print("|---" * 9 + "|")
    for name in names:
        file = OUT / f"{name}.json"
        if not file.exists():
            continue
        result = json.loads(file.read_text())
        pairs = {pair["router"]: pair for pair in result["paired"]}
        for cell in result["cells"]:
            figures, pair = cell["figures"], pairs.get(cell["router"])
            times = [with_interval(figures[figure]) for figure in ("ttft_mean_s", "ttft_p90_s", "ttft_p99_s", "e2e_mean_s")]
            ratios = [with_interval(pair[figure]["mean_ratio"]) if pair else "" for figure in ("ttft_s", "e2e_s")]
            cached = f"{100 * figures['cached_share']['value']:.0f} %"
            router = cell["router"].replace("kvlane/", "")
            print("|", " | ".join([name, f"`{router}`", *times, cached, *ratios]), "|")


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--workloads", default=",".join(WORKLOADS))
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--window", type=float, default=30, help="seconds of requests in each run")
    options.add_argument("--load", type=float, default=1, help="a factor on all loads")
    options.add_argument("--routers", help="only these, separated by commas")
    options.add_argument("--quota", type=float, default=0.5, help="part of a core for each server")
    options = options.parse_args()
    servers = [Small(number) for number in range(SERVERS)]
    start(servers)
    failed = False
    for name in options.workloads.split(","):
        parts = [options.quota] * SERVERS
        if name == "slow":
            parts[0] /= 2
        limited(servers, parts)
        failed |= bench(name, servers, options) != 0
    summed_up(options.workloads.split(","))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
