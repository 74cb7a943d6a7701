#!/usr/bin/env python3
"""Upgrades of one kvlane on one host under load, ten in a row: the successor starts on the same port, then the old one drains.

    cargo build --release --locked -p kvlane && python3 e2e/lifecycle/handover.py [WAY …] [--upgrades 10]

Ways: `reuse-port` starts the successor with `--reuse-port`; `migrate` is the same with `net.ipv4.tcp_migrate_req=1`, in a
network namespace of its own (needs root and iproute2); `inherited` passes one socket to both, as systemd does for two services of
one socket unit; `restart` passes it, too, but lets a process end before the next one starts, as `systemctl restart` does;
`activate` has systemd-socket-activate pass it once. `plain` is for comparison: a process ends, and the next one binds the port.

Clients open a connection for each request, or keep theirs, or read long streams; some send their first bytes late. No request
may fail, except with `plain`. Python's standard library only; exits with 1 if a promise is broken.
"""

import argparse
import atexit
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from engines import KVLANE, Process, free_port, until  # noqa: E402

WAYS = ["reuse-port", "migrate", "inherited", "restart", "activate", "plain"]
PER_REQUEST, KEPT, LONG, LATE = 8, 4, 2, 2
SHORT_TOKENS, LONG_TOKENS = 4, 150
# Between connecting and sending, of the clients that are late: less than the second for which a gateway waits.
LATE_S = 0.2
PAUSE_S = 1.0
DRAINS_WITHIN_S = 60


class Mock(Process):
    """A mock engine."""

    def __init__(self):
        self.port = free_port()
        super().__init__("handover-mock", [KVLANE, "mock-engine", "--model", "m", "--port", str(self.port), "--log-level", "warn"])


class Manager:
    """What a service manager does: holds sockets, passes them, and waits for `READY=1`."""

    def __init__(self, directory):
        self.path = f"{directory}/notify"
        self.notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notified.bind(self.path)
        self.notified.settimeout(60)

    def ready(self):
        while self.notified.recv(256) != b"READY=1":
            pass


class Gateway:
    """`kvlane serve` on the port, ready."""

    started_so_far = 0

    def __init__(self, way, manager, port, listener, engine):
        Gateway.started_so_far += 1
        self.log = Path(tempfile.gettempdir()) / f"kvlane-handover-{os.getpid()}-{Gateway.started_so_far}.log"
        command = [KVLANE, "serve", "--prometheus-port", "0", "--set", "health.interval=500ms", "--worker-urls", engine]
        environment = os.environ | {"NOTIFY_SOCKET": manager.path, "NO_COLOR": "1"}
        passed_on = ()
        if way in ("reuse-port", "migrate"):
            command += ["--port", str(port), "--reuse-port"]
        elif way == "activate":
            passed = ["-E", f"NOTIFY_SOCKET={manager.path}", "-E", "NO_COLOR=1", "--fdname=clients"]
            command = ["systemd-socket-activate", "-l", f"127.0.0.1:{port}", *passed, *command]
        elif way in ("inherited", "restart"):
            # The shell becomes kvlane, so the process id is the right one.
            script = f'export LISTEN_PID=$$; exec "$0" "$@" 3<&{listener.fileno()}'
            command = ["sh", "-c", script, *command]
            environment |= {"LISTEN_FDS": "1", "LISTEN_FDNAMES": "clients"}
            passed_on = (listener.fileno(),)
        else:
            command += ["--port", str(port)]
        began = time.monotonic()
        with self.log.open("wb") as log:
            self.child = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment,
                                          pass_fds=passed_on)
        atexit.register(self.child.kill)
        if way == "activate":
            until("the port is open", lambda: is_open(port), 30)
        manager.ready()
        self.ready_s = time.monotonic() - began

    def drains(self):
        began = time.monotonic()
        self.child.send_signal(signal.SIGTERM)
        code = self.child.wait(timeout=DRAINS_WITHIN_S)
        assert code == 0, f"ended with {code}: {self.log.read_text()[-2000:]}"
        self.log.unlink()
        return time.monotonic() - began


class Load:
    """Clients that ask until they are stopped."""

    def __init__(self, port):
        self.port, self.stopping, self.lock = port, threading.Event(), threading.Lock()
        self.answered, self.failures, self.slowest_s = {}, [], {}
        kinds = ["per request"] * PER_REQUEST + ["kept"] * KEPT + ["long"] * LONG + ["late"] * LATE
        self.threads = [threading.Thread(target=self._client, args=(kind, n), daemon=True) for n, kind in enumerate(kinds)]
        for thread in self.threads:
            thread.start()

    def _client(self, kind, number):
        chance, connection = random.Random(number), None
        while not self.stopping.is_set():
            began = time.monotonic()
            try:
                if connection is None:
                    connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
                    connection.connect()
                    if kind == "late":
                        time.sleep(LATE_S)
                self._ask(connection, LONG_TOKENS if kind == "long" else SHORT_TOKENS)
                took = time.monotonic() - began
                with self.lock:
                    self.answered[kind] = self.answered.get(kind, 0) + 1
                    self.slowest_s[kind] = max(self.slowest_s.get(kind, 0.0), took)
            except (OSError, http.client.HTTPException, ValueError, AssertionError) as error:
                with self.lock:
                    self.failures.append(f"{kind}: {type(error).__name__}: {error}")
                connection = None
            if kind in ("per request", "late") and connection is not None:
                connection.close()
                connection = None
            # Kept connections are idle for less than the second for which a gateway waits for their next request.
            time.sleep(chance.uniform(0, 0.02 if kind != "kept" else 0.2))

    @staticmethod
    def _ask(connection, tokens):
        body = {"model": "m", "stream": True, "max_tokens": tokens, "ignore_eos": True,
                "messages": [{"role": "user", "content": "hello"}]}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200 and "data: [DONE]" in text, f"{answer.status} {text[-200:]}"

    def total(self):
        with self.lock:
            return sum(self.answered.values()) + len(self.failures)

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join(timeout=90)


def upgrades(way, count, manager, port, listener, engine):
    """Yields the first process, and each successor with how long its predecessor took to drain."""
    gateway = Gateway(way, manager, port, listener, engine)
    yield gateway, 0.0
    for _ in range(0 if way == "activate" else count):
        time.sleep(PAUSE_S)
        predecessor = gateway
        if way in ("restart", "plain"):
            drained_s = predecessor.drains()
            gateway = Gateway(way, manager, port, listener, engine)
        else:
            gateway = Gateway(way, manager, port, listener, engine)
            drained_s = predecessor.drains()
        yield gateway, drained_s


def measure(way, count):
    """The number of requests that failed."""
    with tempfile.TemporaryDirectory() as directory:
        engine = Mock()
        until("the engine listens", lambda: is_open(engine.port), 60)
        url, manager, listener, port = f"http://127.0.0.1:{engine.port}", Manager(directory), None, free_port()
        if way in ("inherited", "restart"):
            listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
            port = listener.getsockname()[1]
        load, drained_s, ready_s = None, [], []
        for gateway, drained in upgrades(way, count, manager, port, listener, url):
            load = load or Load(port)
            drained_s.append(drained)
            ready_s.append(gateway.ready_s)
        time.sleep(PAUSE_S)
        load.stop()
        gateway.drains()
        engine.stop()
    failed = len(load.failures)
    slowest = ", ".join(f"{kind} {took:.2f} s" for kind, took in sorted(load.slowest_s.items()))
    print(f"{way}: {len(ready_s) - 1} upgrades, {load.total()} requests, {failed} failed; ready within {max(ready_s):.1f} s, "
          f"drained within {max(drained_s):.1f} s; slowest request: {slowest}", flush=True)
    for failure in sorted(set(load.failures))[:8]:
        print(f"  {load.failures.count(failure)} of {failure}", flush=True)
    return failed


def is_open(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def in_namespace(count):
    """`migrate`, where the kernel moves connections of a closed socket: the setting is one of the namespace."""
    script = 'ip link set lo up && echo 1 > /proc/sys/net/ipv4/tcp_migrate_req && exec "$0" "$@"'
    command = ["unshare", "--net", "sh", "-c", script, sys.executable, __file__, "migrate", "--upgrades", str(count), "--within"]
    return subprocess.run(command, check=False).returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", choices=[*WAYS, []], help="all but plain if none is named")
    parser.add_argument("--upgrades", type=int, default=10)
    parser.add_argument("--within", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    broken = []
    for way in arguments.ways or WAYS[:-1]:
        outside = way == "migrate" and not arguments.within
        failed = in_namespace(arguments.upgrades) if outside else measure(way, arguments.upgrades)
        if failed and way != "plain":
            broken.append(f"{way}: requests failed")
    for promise in broken:
        print(f"BROKEN: {promise}")
    sys.exit(bool(broken))


main()
