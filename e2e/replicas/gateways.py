"""Mock engines, replicas of the gateway as processes of their own, links between them that can be cut, and clients.

Python's standard library only. `KVLANE` names the binary.
"""

import asyncio
import json
import os
import re
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from engines import KVLANE, Engine, Process, free_port, request, until  # noqa: E402

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
READY_S_MAX = 120


class Mock(Engine):
    """A mock engine."""

    started_so_far = 0

    def __init__(self, events, *options):
        Mock.started_so_far += 1
        self.port = free_port()
        command = [KVLANE, "mock-engine", "--model", "m", "--port", str(self.port), "--log-level", "warn",
                   "--seed", str(Mock.started_so_far), *options]
        if events:
            publisher = {"enable_kv_cache_events": True, "publisher": "zmq"}
            publisher |= {"endpoint": f"tcp://*:{free_port()}", "replay_endpoint": f"tcp://*:{free_port()}"}
            command += ["--kv-events-config", json.dumps(publisher)]
        super().__init__(f"replicas-mock-{Mock.started_so_far}", command)



class Replica(Process):
    """`kvlane serve`. `peers` are the addresses at which it is to find the others; none: it exchanges nothing."""

    def __init__(self, name, urls, peers=(), listen=None, port=None, options=()):
        self.port, self.admin_port = port or free_port(), free_port()
        self.listen = listen or (free_port() if peers else None)
        command = [KVLANE, "serve", "--port", str(self.port), "--prometheus-port", str(self.admin_port), *options]
        if self.listen:
            command += ["--replicas-listen", f"127.0.0.1:{self.listen}"]
        if peers:
            command += ["--replicas-peer", *peers]
        super().__init__(name, [*command, "--worker-urls", *urls], {"NO_COLOR": "1"})

    def readiness(self):
        return request(self.admin_port, "/readiness", timeout_s=10)

    def is_ready(self):
        self.check_alive()
        try:
            return self.readiness().status == 200
        except OSError:
            return False

    def wait_ready(self):
        until(f"{self.name} is ready", self.is_ready, READY_S_MAX)

    def exchange(self):
        """What it says of the other replicas."""
        return self.readiness().json()["replicas"]

    def others(self):
        """The requests in flight of each other replica that counts, as it was told."""
        return {peer["replica"]: peer["requests"] for peer in self.exchange()["peers"] if peer["counts"]}

    def hears(self):
        return len(self.others())

    def in_flight(self):
        """Its own requests in flight."""
        workers = request(self.admin_port, "/workers").json()["workers"]
        return sum(pool["requests"] for worker in workers for pool in worker["pools"])

    def samples(self):
        """Metrics by name with labels."""
        text = request(self.admin_port, "/metrics").body.decode()
        return {name: float(value) for name, value in re.findall(r"^(\w+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)}

    def bytes(self, direction):
        return self.samples().get(f'kvlane_replica_bytes_total{{direction="{direction}"}}', 0.0)

    def cpu_s(self):
        """User and system time of the process."""
        fields = Path(f"/proc/{self.child.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def resident_bytes(self):
        return int(Path(f"/proc/{self.child.pid}/statm").read_text().split()[1]) * PAGE_BYTES

    def log_lines(self, level=None):
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if level is None or f" {level} " in line]


def together(count, urls, options=(), name="replica"):
    """Replicas that know each other, ready."""
    listens = [free_port() for _ in range(count)]
    peers = [f"127.0.0.1:{port}" for port in listens]
    replicas = [Replica(f"{name}-{n}", urls, peers, listens[n], options=options) for n in range(count)]
    for replica in replicas:
        replica.wait_ready()
    wait_heard(replicas)
    return replicas


def wait_heard(replicas, limit_s=60):
    until("all hear each other", lambda: all(each.hears() == len(replicas) - 1 for each in replicas), limit_s)


class Loop:
    """An event loop in a thread, until this program ends."""

    begun: list["Loop"] = []

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.begun.append(self)
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def begin(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)


class Link:
    """A TCP proxy to one port that can be cut, and slowed down.

    `silent`: bytes in both directions are kept back, and connections are accepted, as when packets are lost and sent again.
    `dropped`: what arrives is thrown away for ever. `reset`: connections are reset, and new ones, too.
    """

    def __init__(self, loop, target):
        self.target, self.port, self.mode = target, free_port(), "open"
        self.delay_s, self.bytes_per_s, self.passed = 0.0, None, 0
        self.writers = set()
        self.loop = loop
        loop.run(self._listen())

    async def _listen(self):
        self.opened = asyncio.Event()
        self.opened.set()
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    def set(self, mode):
        self.loop.run(self._set(mode))

    async def _set(self, mode):
        self.mode = mode
        if mode == "silent":
            self.opened.clear()
        else:
            self.opened.set()
        if mode == "reset":
            for writer in list(self.writers):
                writer.transport.abort()

    async def _serve(self, reader, writer):
        if self.mode == "reset":
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self.writers |= {writer, far_writer}
        state = {"spoilt": self.mode == "dropped"}
        try:
            await asyncio.gather(self._pipe(reader, far_writer, state), self._pipe(far_reader, writer, state))
        finally:
            for each in (writer, far_writer):
                each.close()
                self.writers.discard(each)

    async def _pipe(self, reader, writer, state):
        # What is on its way: bounded, as in a router.
        way = asyncio.Queue(16)
        try:
            await asyncio.gather(self._enter(reader, way), self._leave(way, writer, state))
        except OSError:
            pass
        finally:
            writer.close()

    async def _enter(self, reader, way):
        try:
            while piece := await reader.read(4096):
                if self.bytes_per_s:
                    await asyncio.sleep(len(piece) / self.bytes_per_s)
                await way.put((time.monotonic() + self.delay_s, piece))
        finally:
            await way.put((0.0, b""))

    async def _leave(self, way, writer, state):
        while True:
            due, piece = await way.get()
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await self.opened.wait()
            if not piece:
                return
            if self.mode == "dropped":
                state["spoilt"] = True
            # A stream with a hole is of no use to either side: bytes of it are never passed on.
            if state["spoilt"]:
                continue
            self.passed += len(piece)
            writer.write(piece)
            await writer.drain()


class Mesh:
    """Replicas with a link from each to each other."""

    def __init__(self, count, urls, options=(), name="mesh"):
        self.loop, listens = Loop(), [free_port() for _ in range(count)]
        self.links = {(a, b): Link(self.loop, listens[b]) for a in range(count) for b in range(count) if a != b}
        self.replicas = []
        for n, listen in enumerate(listens):
            peers = [f"127.0.0.1:{link.port}" for (a, _), link in self.links.items() if a == n]
            self.replicas.append(Replica(f"{name}-{n}", urls, peers, listen, options=options))
        for replica in self.replicas:
            replica.wait_ready()
        wait_heard(self.replicas)

    def set(self, mode):
        for link in self.links.values():
            link.set(mode)


class Clients:
    """Conversations of a few turns, begun at a rate, each turn to the next gateway in turn.

    A request that had no byte of an answer, or 503, is sent to the next gateway, as a load balancer does; after `attempts` of
    them it is lost. One whose answer had begun is broken.
    """

    def __init__(self, gateways, rate, turns=4, tokens=48, attempts=3, seed=0, words=500):
        self.gateways, self.rate, self.turns, self.tokens, self.attempts = gateways, rate, turns, tokens, attempts
        self.seed, self.words = seed, words
        self.turn, self.answers, self.lost, self.broken, self.retried = 0, [], [], [], 0
        self.stopping, self.loop = False, Loop()
        self.work = self.loop.begin(self._run())

    async def _run(self):
        number, tasks, started = 0, set(), time.monotonic()
        while not self.stopping:
            task = asyncio.ensure_future(self._conversation(number))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            number += 1
            await asyncio.sleep(max(0.0, started + number * self.turns / self.rate - time.monotonic()))
        if tasks:
            await asyncio.wait(tasks)

    async def _conversation(self, number):
        text = f"conversation {self.seed} {number} " + " ".join(f"w{number}x{n}" for n in range(self.words))
        messages = [{"role": "user", "content": text}]
        for turn in range(self.turns):
            if self.stopping or not await self._ask(messages, turn):
                return
            messages += [{"role": "assistant", "content": f"answer {turn} " * 10},
                         {"role": "user", "content": f"and then, {turn}? " * 10}]
            await asyncio.sleep(0.5)

    async def _ask(self, messages, turn):
        body = json.dumps({"model": "m", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
                           "max_tokens": self.tokens, "messages": messages}).encode()
        began, problems = time.monotonic(), []
        for _ in range(self.attempts):
            self.turn += 1
            gateway = self.gateways[self.turn % len(self.gateways)]
            state = {"bytes": 0}
            try:
                usage, first_s = await asyncio.wait_for(self._send(gateway.port, body, state), 120)
            except (OSError, ValueError, EOFError, asyncio.TimeoutError) as error:
                problems.append(f"{gateway.name}: {type(error).__name__}: {error}"[:200])
                if state["bytes"]:
                    self.broken.append((time.monotonic(), problems))
                    return False
                self.retried += 1
                continue
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            self.answers.append((time.monotonic(), turn, usage["prompt_tokens"], cached, first_s))
            return True
        self.lost.append((time.monotonic(), time.monotonic() - began, problems))
        return False

    async def _send(self, port, body, state):
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            line = await reader.readline()
            # 503 is sent to the next one, too.
            state["bytes"] += 0 if b" 503 " in line else len(line)
            if b" 200 " not in line:
                raise ValueError(f"{line} {(await reader.read(4096))[-300:]}")
            first_s, usage, done = None, None, False
            while line := await reader.readline():
                if line.startswith(b"data: "):
                    first_s = first_s or time.monotonic() - began
                    if line.startswith(b"data: [DONE]"):
                        done = True
                    elif b'"usage":{' in line:
                        usage = json.loads(line[6:])["usage"]
            if not done or usage is None:
                raise EOFError("the stream ended early")
            return usage, first_s
        finally:
            writer.close()

    def between(self, since, until_s):
        """Answers between two times: their number, the cached share of later turns' prompts, and the mean TTFT, s."""
        seen = [answer for answer in list(self.answers) if since <= answer[0] < until_s]
        later = [answer for answer in seen if answer[1] > 0]
        cached, prompts = sum(answer[3] for answer in later), sum(answer[2] for answer in later)
        mean_s = sum(answer[4] for answer in seen) / max(len(seen), 1)
        return len(seen), cached / max(prompts, 1), mean_s

    def stop(self):
        self.stopping = True
        self.work.result(timeout=180)

    def verdict(self):
        text = f"{len(self.answers)} answered, {self.retried} retried, {len(self.broken)} broken, {len(self.lost)} lost"
        for kind, problems in [("broken", self.broken), ("lost", self.lost)]:
            for problem in problems[:5]:
                text += f"\n    {kind}: {problem}"
        return text
