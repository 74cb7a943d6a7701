"""What counting tokens costs: long multi-turn chats through `kvlane serve --tokenizer-path`, in front of upstreams that
answer at once.

    cargo build --release -p kvlane --bin kvlane -p kvlane-mock --example fixed_upstream
    python3 e2e/tokens/measure.py --tokenizer-path crates/kvlane-tokens/tests/data/tiny

Every prompt has so many tokens, of which a share repeats: the sessions' histories are sent once to warm up, then each
request is one session's history with a message that was never sent before. Requests go one after the other, so what is
measured is not waiting for other requests:

* CPU: seconds of the gateway's process per request, from /proc;
* added: median latency through the gateway, minus the median latency of the same bodies sent to an upstream directly.

Columns: `estimate` counts four bytes a token, `tokens` uses the tokenizer, `cold` too, with prompts of which nothing
was seen before. Text is Python's standard library, line by line in a seeded random order.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BUILT = REPOSITORY / os.environ.get("CARGO_TARGET_DIR", "target") / "release"
KVLANE = os.environ.get("KVLANE", str(BUILT / "kvlane"))
UPSTREAM = os.environ.get("FIXED_UPSTREAM", str(BUILT / "examples" / "fixed_upstream"))
UPSTREAMS = 4
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
START_S_MAX = 60
MESSAGE_TOKENS = 1_000


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Text:
    """Lines of source code without an end, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        files = [path for path in sorted(library.glob("*.py")) if path.stat().st_size > 2_000]
        self.lines = [line for path in files for line in path.read_text("utf-8", "ignore").splitlines() if line.strip()]
        self.random = random.Random(seed)
        self.serial = 0

    def take(self, size: int) -> str:
        """About `size` bytes that were not taken before."""
        taken, length = [], 0
        while length < size:
            self.serial += 1
            line = f"{self.random.choice(self.lines)}  # {self.serial}"
            taken.append(line)
            length += len(line) + 1
        return "\n".join(taken)


class Client:
    """One connection, one request at a time."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def post(self, body: bytes) -> float:
        """Sends a chat and returns the seconds until its answer was whole."""
        began = time.perf_counter()
        self.connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        answer = self.connection.getresponse()
        answer.read()
        took = time.perf_counter() - began
        if answer.status != 200:
            sys.exit(f"a request was answered {answer.status}")
        return took


class Gateway:
    """`kvlane serve`, until the end of the block."""

    def __init__(self, urls: list[str], tokenizer: str | None) -> None:
        self.port, self.metrics_port = free_port(), free_port()
        command = [KVLANE, "--log-level", "warn", "serve", "--port", str(self.port), "--prometheus-port", str(self.metrics_port)]
        command += ["--worker-urls", *urls, "--set", "health.interval=1h"]
        command += ["--tokenizer-path", tokenizer] if tokenizer else ["--set", "tokens.source=estimate"]
        self.process = subprocess.Popen(command)

    def __enter__(self) -> Gateway:
        give_up = time.monotonic() + START_S_MAX
        while True:
            try:
                if len(json.loads(self.read("/readiness"))["pools"][0:1]) and self.ready():
                    return self
            except (OSError, ValueError, KeyError, IndexError):
                pass
            if time.monotonic() > give_up or self.process.poll() is not None:
                sys.exit("the gateway did not become ready")
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def ready(self) -> bool:
        return json.loads(self.read("/readiness"))["pools"][0]["ready"] == UPSTREAMS

    def read(self, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=5)
        connection.request("GET", path)
        return connection.getresponse().read().decode()

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def figure(self, name: str) -> float:
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", self.read("/metrics"), re.M)
        return sum(map(float, found))


def chat(messages: list[str]) -> bytes:
    roles = ["user", "assistant"]
    turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(messages)]
    return json.dumps({"model": "tiny", "messages": turns}).encode()


def history(text: Text, tokens: int, bytes_per_token: float) -> list[str]:
    """Messages of a conversation, an even number of them, so that a user's turn comes next."""
    count = max(2, tokens // MESSAGE_TOKENS // 2 * 2)
    return [text.take(int(tokens / count * bytes_per_token)) for _ in range(count)]


def calibrate(urls: list[str], tokenizer: str) -> float:
    """Bytes of the text that the tokenizer makes a token of."""
    with Gateway(urls, tokenizer) as gateway:
        body = Text(99).take(40_000)
        Client(gateway.port).post(chat([body]))
        decided = json.loads(gateway.read("/decisions"))
        return len(body) / decided["pools"][0]["decisions"][0]["prompt_tokens"]


def measure(gateway: Gateway, direct: Client, bodies: list[bytes]) -> dict[str, float]:
    through = Client(gateway.port)
    counted, total = gateway.figure("kvlane_tokenize_seconds_count"), gateway.figure("kvlane_tokenize_seconds_sum")
    # Interleaved, so that a machine that gets busier does so for both.
    before, spent, latencies, bare = gateway.cpu_s(), 0.0, [], []
    for body in bodies:
        latencies.append(through.post(body))
        bare.append(direct.post(body))
    spent = gateway.cpu_s() - before
    counted, total = gateway.figure("kvlane_tokenize_seconds_count") - counted, gateway.figure("kvlane_tokenize_seconds_sum") - total
    return {
        "cpu_ms": 1e3 * spent / len(bodies),
        "p50_ms": 1e3 * statistics.median(latencies),
        "direct_p50_ms": 1e3 * statistics.median(bare),
        "added_p50_ms": 1e3 * (statistics.median(latencies) - statistics.median(bare)),
        "added_p90_ms": 1e3 * (statistics.quantiles(latencies, n=10)[8] - statistics.median(bare)),
        "count_mean_ms": 1e3 * total / counted if counted else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer-path", required=True)
    parser.add_argument("--prompt-tokens", type=int, default=100_000)
    parser.add_argument("--repeated", type=float, default=0.95, help="share of a prompt that repeats")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--json", help="write the figures here; - is stdout")
    args = parser.parse_args()

    upstream = subprocess.Popen([UPSTREAM, str(UPSTREAMS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    urls = [upstream.stdout.readline().strip() for _ in range(UPSTREAMS)]
    try:
        direct = Client(int(urls[0].rsplit(":", 1)[1]))
        size = calibrate(urls, args.tokenizer_path)
        text = Text(1)
        repeated = int(args.prompt_tokens * args.repeated)
        fresh = int((args.prompt_tokens - repeated) * size)
        histories = [history(text, repeated, size) for _ in range(args.sessions)]

        def turns(count: int) -> list[bytes]:
            return [chat([*histories[n % args.sessions], text.take(fresh)]) for n in range(count)]

        figures = {}
        for name, tokenizer in [("estimate", None), ("tokens", args.tokenizer_path), ("cold", args.tokenizer_path)]:
            with Gateway(urls, tokenizer) as gateway:
                if name == "cold":
                    whole = args.prompt_tokens
                    bodies = [chat([*history(text, whole, size), "?"]) for _ in range(max(10, args.requests // 10))]
                else:
                    client = Client(gateway.port)
                    for body in turns(2 * args.sessions):
                        client.post(body)
                    bodies = turns(args.requests)
                figures[name] = measure(gateway, direct, bodies)
                figures[name]["requests"] = len(bodies)
                figures[name]["body_bytes"] = statistics.mean(map(len, bodies))
                figures[name]["cores_per_100_rps"] = figures[name]["cpu_ms"] / 10
                decided = json.loads(gateway.read("/decisions?limit=50"))["pools"][0]["decisions"]
                figures[name]["prompt_tokens"] = statistics.mean(one["prompt_tokens"] for one in decided)
                encoded = gateway.figure("kvlane_tokenizer_tokens_total")
                figures[name]["tokens_counted"] = encoded
    finally:
        upstream.stdin.close()
        upstream.wait()

    load = os.getloadavg()[0]
    print(f"{args.prompt_tokens} tokens, {args.repeated:.0%} repeat, {size:.2f} bytes per token, load average {load:.1f} on {os.cpu_count()} cores")
    names = ["requests", "prompt_tokens", "cpu_ms", "cores_per_100_rps", "direct_p50_ms", "p50_ms", "added_p50_ms", "added_p90_ms", "count_mean_ms"]
    print(f"{'':20}" + "".join(f"{name:>12}" for name in figures))
    for name in names:
        print(f"{name:20}" + "".join(f"{figures[one][name]:12.2f}" for one in figures))
    if args.json:
        text = json.dumps({"prompt_tokens": args.prompt_tokens, "repeated": args.repeated, "figures": figures}, indent=1)
        sys.stdout.write(text + "\n") if args.json == "-" else Path(args.json).write_text(text)


if __name__ == "__main__":
    main()
