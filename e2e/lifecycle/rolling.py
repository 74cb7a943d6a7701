#!/usr/bin/env python3
"""Rolling updates under load: of eight mock engines behind one kvlane, and of two kvlane behind a balancer.

    cargo build --release --locked -p kvlane && python3 e2e/lifecycle/rolling.py [engines] [gateways] [--no-kv-events]

Clients repeat the prompts of a fixed set of sessions, with short and long streams on kept connections. No request may
fail. The share of cached prompt tokens, as engines report it, is compared between the time before the update and a
minute after it; it may fall by five points at most. Half of the engines are replaced by a process on the same port, as a
StatefulSet with host ports does, the others by one on another port that joins before the old one drains, as pods of a
Deployment do. Each kvlane is replaced as a Deployment with `maxSurge: 1` does it: the successor starts, gets connections
when `/readiness` answers 200, and then the old process gets SIGTERM. Both write their snapshots to one directory.

Python's standard library only; exits with 1 if a promise is broken.
"""

import argparse
import asyncio
import http.client
import json
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from engines import KVLANE, Engine, Process, free_port, request, until  # noqa: E402

ENGINES = 8
CLIENTS = 10
SESSIONS = 48
SHORT, LONG = 12, 600
# The last client holds long streams: they outlive the delay of a shutdown.
LONG_CLIENTS = 2
BEFORE_S, AFTER_S, WINDOW_S = 25, 60, 25
FALL_MAX = 0.05
SHUTDOWN_DELAY_S = 3
HEALTH_CHECK_S = 0.25


class Mock(Engine):
    """A mock engine, with KV events."""

    started_so_far = 0

    def __init__(self, events, port=None):
        Mock.started_so_far += 1
        self.port = port or free_port()
        command = [KVLANE, "mock-engine", "--model", "m", "--port", str(self.port), "--log-level", "warn",
                   "--seed", str(Mock.started_so_far)]
        if events:
            publisher = {"enable_kv_cache_events": True, "publisher": "zmq"}
            publisher |= {"endpoint": f"tcp://*:{free_port()}", "replay_endpoint": f"tcp://*:{free_port()}"}
            command += ["--kv-events-config", json.dumps(publisher)]
        super().__init__(f"mock-{Mock.started_so_far}", command)


class Kvlane(Process):
    """`kvlane serve` in front of these engines."""

    started_so_far = 0

    def __init__(self, urls, directory, events):
        Kvlane.started_so_far += 1
        self.port, self.admin_port = free_port(), free_port()
        settings = [
            f"server.shutdown_delay={SHUTDOWN_DELAY_S}s", "server.shutdown_grace=60s",
            f"routing.index_snapshot={directory}/index.snapshot", "routing.index_snapshot_interval=5s",
            f"kv_events.snapshot={directory}/kv.snapshot", "kv_events.snapshot_interval=5s",
            f"tokens.source={'engine' if events else 'estimate'}", f"kv_events.enabled={str(events).lower()}",
            "health.interval=500ms",
        ]
        command = [KVLANE, "serve", "--port", str(self.port), "--prometheus-port", str(self.admin_port)]
        for setting in settings:
            command += ["--set", setting]
        super().__init__(f"rolling-{Kvlane.started_so_far}", [*command, "--worker-urls", *urls])

    def readiness(self):
        try:
            return request(self.admin_port, "/readiness", timeout_s=5)
        except OSError:
            return None

    def is_ready(self):
        self.check_alive()
        answer = self.readiness()
        return answer is not None and answer.status == 200

    def healthy(self):
        workers = request(self.admin_port, "/workers").json()["workers"]
        return {worker["url"] for worker in workers if worker["healthy"] and not worker["draining"]}


class Load:
    """Clients that repeat the prompts of sessions, until it is stopped."""

    def __init__(self, port):
        self.port, self.stopping, self.lock = port, threading.Event(), threading.Lock()
        self.answers, self.failures = [], []
        self.threads = [threading.Thread(target=self._client, args=(n,), daemon=True) for n in range(CLIENTS)]
        for thread in self.threads:
            thread.start()

    def _client(self, number):
        chance = random.Random(number)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        is_long = number >= CLIENTS - LONG_CLIENTS
        while not self.stopping.is_set():
            session, began = chance.randrange(SESSIONS), time.monotonic()
            try:
                usage = self._ask(connection, session, LONG if is_long else SHORT)
                with self.lock:
                    self.answers.append((time.monotonic(), *usage))
            except (OSError, http.client.HTTPException, ValueError, KeyError, AssertionError) as error:
                connection.close()
                with self.lock:
                    self.failures.append((began, time.monotonic(), f"{type(error).__name__}: {error}"))
                print(f"  failed after {time.monotonic() - began:.2f} s: {type(error).__name__}: {error}", flush=True)

    @staticmethod
    def _ask(connection, session, tokens):
        system = f"You are assistant {session % 6}. " + "Follow these instructions closely. " * 60
        body = {
            "model": "m", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": tokens,
            "ignore_eos": True,
            "messages": [{"role": "system", "content": system},
                         {"role": "user", "content": f"Session {session}: " + f"detail {session} of it, " * 120}],
        }
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, f"{answer.status} {text[:300]}"
        data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        assert data and data[-1] == "[DONE]", f"the stream ended early: {text[-300:]}"
        usage = json.loads(data[-2])["usage"]
        assert usage["completion_tokens"] == tokens, f"{usage['completion_tokens']} of {tokens} tokens"
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return usage["prompt_tokens"], cached

    def share(self, since, until_s):
        """Answers between two times, and the share of their prompt tokens that was cached."""
        with self.lock:
            seen = [(prompt, cached) for at, prompt, cached in self.answers if since <= at < until_s]
        prompts = sum(prompt for prompt, _ in seen)
        return len(seen), sum(cached for _, cached in seen) / max(prompts, 1)

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join(timeout=120)


class Balancer:
    """A TCP balancer: gives each connection to the next process whose `/readiness` answers 200."""

    def __init__(self):
        self.port, self.members, self.ready, self.turn = free_port(), [], [], 0
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, daemon=True).start()
        threading.Thread(target=self._check, daemon=True).start()

    def _run(self):
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", self.port))
        self.loop.run_forever()

    def _check(self):
        while True:
            answers = [(member, member.readiness()) for member in list(self.members)]
            self.ready = [member for member, answer in answers if answer is not None and answer.status == 200]
            time.sleep(HEALTH_CHECK_S)

    async def _serve(self, reader, writer):
        ready = self.ready
        if not ready:
            writer.close()
            return
        self.turn += 1
        try:
            upstream = await asyncio.open_connection("127.0.0.1", ready[self.turn % len(ready)].port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pipe(reader, upstream[1]), self._pipe(upstream[0], writer))

    @staticmethod
    async def _pipe(reader, writer):
        try:
            while piece := await reader.read(65536):
                writer.write(piece)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


def replace_engine(gateway, engines, n, events):
    """Odd ones restart on their port; even ones are replaced by one on another port."""
    old = engines[n]
    if n % 2:
        old.kill(signal.SIGTERM)
        engines[n] = Mock(events, old.port)
        until("the restarted engine serves", lambda: engines[n].url in gateway.healthy(), 60)
        return
    engines[n] = Mock(events)
    engines[n].wait_ready()
    added = request(gateway.admin_port, "/workers", {"url": engines[n].url})
    assert added.status == 202, added.body
    until("the new engine serves", lambda: engines[n].url in gateway.healthy(), 60)
    removed = request(gateway.admin_port, f"/remove_worker?url={old.url}", b"")
    assert removed.status == 200, removed.body
    old.kill(signal.SIGTERM)


def replace_gateway(balancer, urls, directory, events):
    """The oldest member leaves when its successor is ready."""
    successor = Kvlane(urls, directory, events)
    began = time.monotonic()
    until("the successor is ready", successor.is_ready, 60)
    knowledge = successor.readiness().json()["pools"][0]["knowledge"]
    print(f"  successor ready after {time.monotonic() - began:.1f} s: {knowledge}", flush=True)
    balancer.members.append(successor)
    until("the balancer sends requests there", lambda: successor in balancer.ready, 30)
    old = balancer.members[0]
    began = time.monotonic()
    old.child.send_signal(signal.SIGTERM)
    code = old.child.wait(timeout=90)
    balancer.members.remove(old)
    assert code == 0, f"{old.name} ended with {code}:\n{old.end_of_log()}"
    print(f"  predecessor ended with 0 after {time.monotonic() - began:.1f} s", flush=True)


def measured(what, load, update):
    """Runs an update under load; returns what it broke."""
    # The caches fill, and then the time before begins.
    until("the caches are full", lambda: load.share(time.monotonic() - 10, time.monotonic())[1] > 0.9, 120)
    before = time.monotonic()
    time.sleep(BEFORE_S)
    began = time.monotonic()
    update()
    ended = time.monotonic()
    time.sleep(AFTER_S)
    load.stop()
    spans = {
        "before": (before, began), "during": (began, ended),
        "a minute later": (ended + AFTER_S - WINDOW_S, ended + AFTER_S),
    }
    shares = {}
    for name, span in spans.items():
        answers, shares[name] = load.share(*span)
        rate = answers / (span[1] - span[0])
        print(f"  {name}: {answers} answers ({rate:.1f}/s), {shares[name]:.1%} of prompt tokens cached", flush=True)
    fall = shares["before"] - shares["a minute later"]
    total, failed = len(load.answers) + len(load.failures), len(load.failures)
    print(f"{what}: {total} requests, {failed} failed, update of {ended - began:.0f} s, share fell by {fall:.1%}", flush=True)
    return ([f"{what}: {failed} requests failed"] if failed else []) + (
        [f"{what}: the share of cached tokens fell by {fall:.1%}"] if fall > FALL_MAX else [])


def update_engines(events):
    engines = [Mock(events) for _ in range(ENGINES)]
    for engine in engines:
        engine.wait_ready()
    with tempfile.TemporaryDirectory() as directory:
        gateway = Kvlane([engine.url for engine in engines], directory, events)
        until("the gateway is ready", gateway.is_ready, 60)
        load = Load(gateway.port)

        def update():
            for n in range(ENGINES):
                replace_engine(gateway, engines, n, events)

        broken = measured("rolling update of engines", load, update)
        gateway.stop()
    for engine in engines:
        engine.stop()
    return broken


def update_gateways(events):
    engines = [Mock(events) for _ in range(ENGINES // 2)]
    for engine in engines:
        engine.wait_ready()
    urls = [engine.url for engine in engines]
    with tempfile.TemporaryDirectory() as directory:
        balancer = Balancer()
        balancer.members = [Kvlane(urls, directory, events) for _ in range(2)]
        until("both gateways are ready", lambda: len(balancer.ready) == 2, 60)
        load = Load(balancer.port)

        def update():
            for _ in range(2):
                replace_gateway(balancer, urls, directory, events)

        broken = measured("rolling update of gateways", load, update)
        for member in balancer.members:
            member.stop()
    for engine in engines:
        engine.stop()
    return broken


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["engines", "gateways", []], help="both if none is named")
    parser.add_argument("--no-kv-events", action="store_true", help="the approximate index and its snapshot")
    arguments = parser.parse_args()
    events, what, broken = not arguments.no_kv_events, arguments.what or ["engines", "gateways"], []
    print(f"KV events {'on' if events else 'off'}", flush=True)
    if "engines" in what:
        broken += update_engines(events)
    if "gateways" in what:
        broken += update_gateways(events)
    for promise in broken:
        print(f"BROKEN: {promise}")
    sys.exit(bool(broken))


main()
