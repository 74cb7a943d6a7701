"""What a proxy costs per request: kvlane beside nginx, HAProxy, sglang-router and vllm-router on this machine.

    e2e/race/setup.sh
    cargo build --release -p kvlane --bin kvlane -p kvlane-mock --example fixed_upstream
    python3 e2e/race/race.py --cells 6k,paced,128k --contenders nginx,haproxy,sglang,vllm,kvlane

A measurement starts one contender alone in front of four fixed-cost upstreams, loads it with wrk, and divides the CPU
time of all its processes by the requests it carried. A round takes every contender once, each round beginning with
another one, so that a machine which gets slower or busier does so for all. README.md says how to read the table.

Everything listens on loopback. Whatever is started ends with this program, even one that is killed.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
WORK = Path(os.environ.get("RACE_WORK", HERE / ".work")).resolve()
VENV = Path(os.environ.get("PEERS_VENV", WORK / "venv"))
BUILT = REPOSITORY / os.environ.get("CARGO_TARGET_DIR", "target") / "release"
KVLANE = os.environ.get("KVLANE", str(BUILT / "kvlane"))
UPSTREAM = os.environ.get("FIXED_UPSTREAM", str(BUILT / "examples" / "fixed_upstream"))
# Debian keeps daemons where not everybody's PATH looks.
PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
CORES = len(os.sched_getaffinity(0))

UPSTREAMS = 4
# The ratio column divides by this contender's cost in the same round.
BASELINE = "nginx"
DIRECT = "direct"
WARM_S = 1
# The routers in Python take seconds to import on a busy machine.
START_S_MAX = 60
STOP_S_MAX = 5
# Beyond its own --seconds, wrk renders its requests first and lets late answers come in last.
WRK_S_MAX = 30
ASK_S_MAX = 5
POLL_S = 0.05
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# The kernel ends what is started with this when this program is gone, however it went.
TETHER = ["setpriv", "--pdeathsig", "TERM"]


class RaceError(Exception):
    """A measurement that cannot be had, and why."""


@dataclass(frozen=True)
class Cell:
    """A shape of load."""

    system_bytes: int
    connections: int = 16
    events: int = 0
    pace_ms: int = 0

    @property
    def stream(self):
        return self.events > 0

    def describe(self):
        pace = f" {self.pace_ms} ms apart" if self.pace_ms else ""
        answer = f"an answer of {self.events} events{pace}" if self.stream else "a whole answer"
        return f"64 sessions sharing a system prompt of {self.system_bytes:,} bytes, {answer}, {self.connections} connections"


KB = 1024
CELLS = {
    "2k": Cell(2 * KB),
    "6k": Cell(6 * KB),
    "32k": Cell(32 * KB),
    "128k": Cell(128 * KB),
    "512k": Cell(512 * KB),
    "6k-4": Cell(6 * KB, connections=4),
    "6k-64": Cell(6 * KB, connections=64),
    "6k-256": Cell(6 * KB, connections=256),
    "stream": Cell(6 * KB, events=32),
    "stream-256": Cell(6 * KB, events=256),
    # One by one, as an engine at work sends them.
    "paced": Cell(6 * KB, connections=64, events=128, pace_ms=10),
}


@dataclass(frozen=True)
class Place:
    """Where a contender is to serve, what stands behind it, and a directory of its own."""

    port: int
    metrics_port: int
    upstreams: list[str]
    directory: Path

    def addresses(self):
        return [url.removeprefix("http://") for url in self.upstreams]

    def write(self, name, text):
        path = self.directory / name
        path.write_text(text)
        return str(path)


@dataclass(frozen=True)
class Contender:
    """A proxy: what must be installed, how it is started, how it is asked for its version."""

    program: str
    command: Callable[[Place], list[str]]
    version: list[str]


@dataclass(frozen=True)
class Sample:
    """One measurement."""

    round: int
    requests: int
    requests_per_s: float
    p50_us: int
    p99_us: int
    errors: int
    cpu_us_per_request: float
    rss_mib: float


# === The contenders ===


def nginx(place):
    servers = "".join(f"server {address}; " for address in place.addresses())
    folders = "".join(f"{kind}_temp_path {place.directory}/{kind}; " for kind in
                      ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    # Bodies stay in memory, upstream connections stay open, events are passed on as they come.
    config = place.write("nginx.conf", f"""
        daemon off; worker_processes {CORES}; pid {place.directory}/nginx.pid; error_log {place.directory}/error.log;
        events {{ worker_connections 4096; }}
        http {{
            access_log off; {folders}
            client_body_buffer_size 1m; client_max_body_size 16m; keepalive_requests 1000000000;
            upstream engines {{ {servers} keepalive 256; keepalive_requests 1000000000; }}
            server {{
                listen 127.0.0.1:{place.port};
                location / {{
                    proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
                    proxy_buffering off;
                }}
            }}
        }}
    """)
    return ["nginx", "-e", f"{place.directory}/error.log", "-c", config]


def haproxy(place):
    servers = "".join(f"  server engine{i} {address}\n" for i, address in enumerate(place.addresses()))
    config = place.write("haproxy.cfg", "\n".join([
        "global", f"  nbthread {CORES}", "  maxconn 4096",
        "defaults", "  mode http", "  http-reuse always",
        "  timeout connect 5s", "  timeout client 60s", "  timeout server 60s",
        "frontend clients", f"  bind 127.0.0.1:{place.port}", "  default_backend engines",
        "backend engines", "  balance leastconn", servers,
    ]))
    return ["haproxy", "-db", "-f", config]


def router_options(place):
    """Options that kvlane, sglang-router and vllm-router have in common."""
    return [
        "--host", "127.0.0.1", "--port", str(place.port),
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(place.metrics_port),
        "--worker-urls", *place.upstreams,
    ]


def peer_options(place):
    # By default they refuse load early, or log every request.
    return [*router_options(place), "--policy", "cache_aware", "--log-level", "error", "--max-concurrent-requests", "4096"]


def package_version(package):
    return [str(VENV / "bin" / "python"), "-c", f"import importlib.metadata as m; print(m.version('{package}'))"]


SGLANG, VLLM = str(VENV / "bin" / "sglang-router"), str(VENV / "bin" / "vllm-router")
CONTENDERS = {
    "nginx": Contender("nginx", nginx, ["nginx", "-v"]),
    "haproxy": Contender("haproxy", haproxy, ["haproxy", "-v"]),
    "sglang": Contender(
        SGLANG, lambda place: [SGLANG, "launch", *peer_options(place)], package_version("sglang-router")
    ),
    "vllm": Contender(VLLM, lambda place: [VLLM, *peer_options(place)], package_version("vllm-router")),
    # As it comes: its default policy.
    "kvlane": Contender(KVLANE, lambda place: [KVLANE, "serve", *router_options(place)], [KVLANE, "--version"]),
    "kvlane-cache-aware": Contender(
        KVLANE, lambda place: [KVLANE, "serve", *router_options(place), "--policy", "cache_aware"], [KVLANE, "--version"]
    ),
}


# === Processes ===


class Process:
    """A program in a session of its own, its output in a log. `stop` ends all processes of that session."""

    def __init__(self, name, command, log, stdin=subprocess.DEVNULL):
        self.name, self.log = name, log
        with log.open("wb") as out:
            self.child = subprocess.Popen(
                [*TETHER, *command], stdin=stdin, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env=environment(),
            )

    def check_alive(self):
        if self.child.poll() is not None:
            raise RaceError(f"{self.name} ended with {self.child.returncode}: {self.end_of_log()}")

    def end_of_log(self):
        lines = self.log.read_text(errors="replace").splitlines()
        return " | ".join(lines[-8:])[-1500:] or "its log is empty"

    def cpu_s(self):
        """User and system time of all its processes, those that ended before being counted by their parents."""
        # utime, stime, cutime, cstime: see proc(5), counted from the state.
        return sum(sum(map(int, fields[11:15])) for _, fields in self._processes()) / TICKS_PER_S

    def rss_mib(self):
        return sum(int(fields[21]) for _, fields in self._processes()) * PAGE_BYTES / 2**20

    def stop(self):
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S_MAX
        while self._processes() and time.monotonic() < deadline:
            self.child.poll()
            time.sleep(POLL_S)
        self._signal(signal.SIGKILL)
        self.child.wait(timeout=STOP_S_MAX)

    def _signal(self, how):
        for pid, _ in self._processes():
            try:
                os.kill(pid, how)
            except ProcessLookupError:
                pass

    def _processes(self):
        """Pid and /proc/PID/stat, from the state on, of every process in the session that still runs."""
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                # The name before the last parenthesis may hold anything.
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.child.pid and fields[0] not in "ZX":
                found.append((int(entry), fields))
        return found


class Upstreams(Process):
    """The fixed-cost upstreams. They also end by themselves when their standard input does."""

    def __init__(self, count, directory):
        super().__init__("fixed_upstream", [UPSTREAM, str(count)], directory / "upstream.log", subprocess.PIPE)
        try:
            self.urls = until("the upstreams say where they serve", START_S_MAX, lambda: self._urls(count))
        except BaseException:
            self.stop()
            raise

    def _urls(self, count):
        self.check_alive()
        urls = re.findall(r"^(http://127\.0\.0\.1:\d+)\n", self.log.read_text(), re.MULTILINE)
        return urls if len(urls) == count else None


def environment():
    # A proxy set for the internet must not get between a contender and loopback, nor need one be reached.
    return os.environ | {"PATH": PATH, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "HF_HUB_OFFLINE": "1"}


def free_ports(count):
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def until(what, limit_s, condition):
    """The first true answer of `condition`."""
    deadline = time.monotonic() + limit_s
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise RaceError(f"waited {limit_s} s in vain until {what}")
        time.sleep(POLL_S)
    return answer


# === Measuring ===


def ask(url, cell):
    """Status and body of one chat completion."""
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": "tiny", "stream": cell.stream, "max_tokens": cell.events, "seed": cell.pace_ms, "messages": messages}
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=ASK_S_MAX)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def ready(process, url, cell):
    process.check_alive()
    try:
        return ask(url, cell)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def load(url, cell, seconds):
    """wrk's account of `seconds` of load."""
    command = [
        *TETHER, "wrk", "--threads", "1", "--connections", str(cell.connections), "--duration", f"{seconds}s",
        "--timeout", "10s", "--script", str(HERE / "chat.lua"), url,
        "--", str(cell.system_bytes), "stream" if cell.stream else "whole", str(cell.events), str(cell.pace_ms),
    ]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds + WRK_S_MAX, env=environment())
    except subprocess.TimeoutExpired:
        raise RaceError(f"wrk did not end within {seconds + WRK_S_MAX} s") from None
    lines = ran.stdout.splitlines()
    if ran.returncode != 0 or not lines or not lines[-1].startswith("{"):
        raise RaceError(f"wrk ended with {ran.returncode}: {(ran.stderr or ran.stdout).strip()[-500:]}")
    return json.loads(lines[-1])


def measure(process, url, cell, expected, args, number):
    """One sample of `process`, which serves at `url` and ought to answer `expected`."""
    until(f"{process.name} answers", START_S_MAX, lambda: ready(process, url, cell))
    try:
        status, body = ask(url, cell)
    except (OSError, http.client.HTTPException) as error:
        raise RaceError(f"{process.name} broke off after it had answered: {error!r}") from error
    if (status, body) != (200, expected):
        raise RaceError(f"{process.name} answers {status} {body[:200]!r}, the upstream 200 {expected[:200]!r}")
    load(url, cell, WARM_S)
    before_s = process.cpu_s()
    run = load(url, cell, args.seconds)
    cpu_s, rss_mib = process.cpu_s() - before_s, process.rss_mib()
    process.check_alive()
    if run["requests"] == 0:
        raise RaceError(f"{process.name} answered nothing within {args.seconds} s ({run['errors']} errors)")
    # wrk counts every byte it read. Fewer than all bodies together: some came short though their status was good.
    if run["errors"] == 0 and run["bytes"] < run["requests"] * len(expected):
        raise RaceError(f"{process.name} cut answers short: {run['bytes']} bytes for {run['requests']} requests")
    return Sample(
        number, run["requests"], run["requests"] / (run["duration_us"] / 1e6), run["p50_us"], run["p99_us"],
        run["errors"], cpu_s / run["requests"] * 1e6, rss_mib,
    )


def measure_alone(name, cell, upstreams, args, number):
    """Starts a contender, measures it, and stops it."""
    expected = ask(upstreams.urls[0], cell)[1]
    if name == DIRECT:
        return measure(upstreams, upstreams.urls[0], cell, expected, args, number)
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=WORK / "run") as directory:
        port, metrics_port = free_ports(2)
        place = Place(port, metrics_port, upstreams.urls, Path(directory))
        process = Process(name, CONTENDERS[name].command(place), place.directory / "log")
        try:
            return measure(process, f"http://127.0.0.1:{port}", cell, expected, args, number)
        finally:
            process.stop()


def race(args):
    """All samples: cell -> contender -> list. Failures are told at once and missing from the lists."""
    samples = {cell: {name: [] for name in args.contenders} for cell in args.cells}
    failures = 0
    (WORK / "run").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="upstream-", dir=WORK / "run") as directory:
        upstreams = Upstreams(UPSTREAMS, Path(directory))
        try:
            for cell in args.cells:
                for number in range(args.rounds):
                    first = number % len(args.contenders)
                    for name in args.contenders[first:] + args.contenders[:first]:
                        try:
                            sample = measure_alone(name, CELLS[cell], upstreams, args, number)
                        except RaceError as error:
                            upstreams.check_alive()
                            failures += 1
                            tell(f"{cell} {number + 1}/{args.rounds} {name}: {error}")
                            continue
                        samples[cell][name].append(sample)
                        tell(f"{cell} {number + 1}/{args.rounds} {name}: {sample.requests_per_s:,.0f} requests/s, "
                             f"{sample.cpu_us_per_request:.1f} us CPU each")
        finally:
            upstreams.stop()
    return samples, failures


def tell(line):
    print(line, file=sys.stderr, flush=True)


# === The account ===


def median(samples, field):
    return statistics.median(getattr(sample, field) for sample in samples)


def ratio(samples, baseline):
    """Median over the rounds of the cost beside the baseline's in the same round; None without any such round."""
    costs = {sample.round: sample.cpu_us_per_request for sample in baseline if sample.cpu_us_per_request > 0}
    ratios = [sample.cpu_us_per_request / costs[sample.round] for sample in samples if sample.round in costs]
    return statistics.median(ratios) if ratios else None


def summary(samples, baseline):
    """One row of the table; None if no round succeeded."""
    if not samples:
        return None
    fields = ("requests_per_s", "p50_us", "p99_us", "cpu_us_per_request", "rss_mib")
    row = {field: median(samples, field) for field in fields}
    return row | {"errors": sum(sample.errors for sample in samples), "cpu_ratio": ratio(samples, baseline)}


def table(name, rows, versions):
    lines = [
        f"### {name}: {CELLS[name].describe()}", "",
        f"| contender | requests/s | p50 us | p99 us | errors | CPU us/request | / {BASELINE} | RSS MiB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for contender, row in rows.items():
        title = f"{contender} {versions[contender]}".strip()
        if row is None:
            lines.append(f"| {title} | failed | | | | | | |")
            continue
        beside = "" if row["cpu_ratio"] is None else f"{row['cpu_ratio']:.2f}"
        lines.append(
            f"| {title} | {row['requests_per_s']:,.0f} | {row['p50_us']:,.0f} | {row['p99_us']:,.0f} | {row['errors']} "
            f"| {row['cpu_us_per_request']:.1f} | {beside} | {row['rss_mib']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def version(name):
    """What the contender calls its version, or nothing."""
    if name == DIRECT:
        return ""
    try:
        said = subprocess.run(
            CONTENDERS[name].version, capture_output=True, text=True, timeout=START_S_MAX, env=environment()
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"\d+\.\d+\.\d+", said.stdout + said.stderr)
    return found[0] if found else ""


def machine():
    try:
        cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        cpu = None
    return {"cores": CORES, "cpu": cpu[1] if cpu else platform.machine(), "kernel": platform.release()}


def missing(contenders):
    """Programs that are not there, with what to do about it."""
    programs = {"wrk": "e2e/race/setup.sh", "setpriv": "install util-linux"}
    programs[UPSTREAM] = "cargo build --release -p kvlane-mock --example fixed_upstream"
    for name in contenders:
        if name != DIRECT:
            build = "cargo build --release -p kvlane --bin kvlane"
            programs[CONTENDERS[name].program] = build if name.startswith("kvlane") else "e2e/race/setup.sh"
    absent = [program for program in programs if not shutil.which(program, path=PATH)]
    return [f"{program} is missing: {programs[program]}" for program in absent]


def arguments():
    def names(known):
        def parse(text):
            chosen = list(dict.fromkeys(text.split(",")))
            if unknown := [name for name in chosen if name not in known]:
                raise argparse.ArgumentTypeError(f"no such thing as {unknown[0]!r}; there are {', '.join(known)}")
            return chosen
        return parse

    def within(least, most):
        def parse(text):
            if not text.isdecimal() or not least <= int(text) <= most:
                raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
            return int(text)
        return parse

    parser = argparse.ArgumentParser(description="Compares what proxies cost per request, on this machine.")
    parser.add_argument("--cells", type=names([*CELLS]), default=[*CELLS], metavar="A,B",
                        help=f"shapes of load, of {','.join(CELLS)} (default: all)")
    parser.add_argument("--contenders", type=names([*CONTENDERS, DIRECT]), default=["nginx", "haproxy", "sglang", "vllm", "kvlane"], metavar="A,B",
                        help=f"of {','.join(CONTENDERS)}, and {DIRECT}: wrk straight to an upstream, whose own cost is "
                        f"shown (default: nginx,haproxy,sglang,vllm,kvlane)")
    parser.add_argument("--rounds", type=within(1, 100), default=3, help="measurements of each (default: 3)")
    parser.add_argument("--seconds", type=within(1, 600), default=5, help="length of one measurement (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample and the summary there")
    return parser.parse_args()


def main():
    def end(number, _frame):
        raise SystemExit(128 + number)

    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, end)
    args = arguments()
    if lacks := missing(args.contenders):
        raise SystemExit("\n".join(lacks))

    versions = {name: version(name) for name in args.contenders}
    samples, failures = race(args)

    host = machine()
    rows = {}
    print(f"\n{host['cores']} cores of {host['cpu']}, Linux {host['kernel']}; "
          f"medians of {args.rounds} rounds of {args.seconds} s\n")
    for cell, runs in samples.items():
        rows[cell] = {name: summary(runs[name], runs.get(BASELINE, [])) for name in runs}
        print(table(cell, rows[cell], versions))
    if args.json:
        settings = {"rounds": args.rounds, "seconds": args.seconds}
        account = {"machine": host, "settings": settings, "versions": versions, "cells": {
            cell: {name: {"summary": rows[cell][name], "samples": [dataclasses.asdict(sample) for sample in runs[name]]}
                   for name in runs}
            for cell, runs in samples.items()
        }}
        args.json.write_text(json.dumps(account, indent=2) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RaceError as error:
        sys.exit(f"race: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
