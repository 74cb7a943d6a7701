"""Records how a real engine dies: what its clients, its health endpoint, its metrics and its KV feed show.

    E2E_WORK=... e2e/.work/venv/bin/python e2e/deaths/record.py vllm core_killed core_stopped
    E2E_WORK=... e2e/.work/venv/bin/python e2e/deaths/record.py sglang

Without names all deaths of that engine. A capture is written to crates/kvlane-mock/data/deaths/ENGINE-VERSION/DEATH.jsonl;
the README there describes its lines. Times are seconds after the cause of death.
"""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path

# First, since it says where the others are.
from servers import is_running, limit_memory, made

from clients import CONNECT_S_MAX, Answer, Client, has_content, is_error, request_bytes
from engines import MODEL, until

DATA = Path(__file__).resolve().parents[2] / "crates" / "kvlane-mock" / "data" / "deaths"
HEALTH_PERIOD_S, METRICS_PERIOD_S = 0.25, 1.0
# What a long prompt of these many words takes to be read is long enough to be in flight at the death.
LONG_WORDS = 2_500
LONG_ANSWER = 3_000
NEW_REQUESTS_S = (0.05, 1.0, 5.0)


def words(topic, count):
    """About three tokens each."""
    return " ".join(f"{topic}{number}" for number in range(count))


def body(api, prompt, tokens, stream):
    """A request of `tokens` tokens in the API at this path."""
    # Drawn, not the likeliest: a model of random weights may repeat a token that has no text for ever.
    common = {"model": MODEL, "temperature": 1.0, "ignore_eos": True} | ({"stream": True} if stream else {})
    turns = [{"role": "user", "content": prompt}]
    return common | {
        "/v1/chat/completions": {"messages": turns, "max_tokens": tokens},
        "/v1/completions": {"prompt": prompt, "max_tokens": tokens},
        "/v1/messages": {"messages": turns, "max_tokens": tokens},
        "/v1/responses": {"input": prompt, "max_output_tokens": tokens},
    }[api]


APIS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]


class Watch(threading.Thread):
    """Does `look` each `period_s` until stopped, and keeps what changes: (from, to, what)."""

    def __init__(self, look, period_s):
        super().__init__(daemon=True)
        self.look, self.period_s, self.seen, self.stopped = look, period_s, [], threading.Event()

    def run(self):
        while not self.stopped.is_set():
            began = time.monotonic()
            what = self.look()
            if self.seen and self.seen[-1][2] == what:
                self.seen[-1][1] = began
            else:
                self.seen.append([began, began, what])
            self.stopped.wait(max(0, self.period_s - (time.monotonic() - began)))

    def stop(self):
        self.stopped.set()
        self.join(10)
        return self.seen


def exchange(port, path):
    """A short exchange on a connection of its own: status, head and body, or what happened instead."""
    answer = Answer()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=CONNECT_S_MAX) as connection:
            try:
                connection.settimeout(CONNECT_S_MAX)
                connection.sendall(request_bytes(path))
                while data := connection.recv(65536):
                    answer.add(time.monotonic(), data)
            except TimeoutError:
                if not answer.raw:
                    return {"connect": "accepted", "answer": f"nothing within {CONNECT_S_MAX:g} s"}
            except (BrokenPipeError, ConnectionResetError):
                if not answer.raw:
                    return {"connect": "accepted", "answer": "reset"}
    except ConnectionRefusedError:
        return {"connect": "refused"}
    except OSError as error:
        return {"connect": type(error).__name__}
    if not answer.head():
        return {"connect": "accepted", "answer": "closed"}
    text = b"".join(data for _, data in answer.body()[0]).decode(errors="replace")
    return {"connect": "accepted", "status": answer.status(), "body": text}


class Feed(threading.Thread):
    """Reads the KV feed and keeps when each batch came."""

    def __init__(self, port):
        super().__init__(daemon=True)
        import zmq

        self.zmq, self.batches, self.stopped, self.port = zmq, [], threading.Event(), port
        self.connection = []

    def run(self):
        zmq = self.zmq
        context = zmq.Context()
        subscriber = context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        monitor = subscriber.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECTED)
        subscriber.connect(f"tcp://127.0.0.1:{self.port}")
        from zmq.utils.monitor import recv_monitor_message

        while not self.stopped.is_set():
            while subscriber.poll(50):
                frames = subscriber.recv_multipart()
                self.batches.append((time.monotonic(), int.from_bytes(frames[1], "big")))
            while monitor.poll(0):
                how = {zmq.EVENT_DISCONNECTED: "disconnected", zmq.EVENT_CONNECTED: "connected"}
                self.connection.append((time.monotonic(), how[recv_monitor_message(monitor)["event"]]))
        context.destroy(linger=0)

    def stop(self):
        self.stopped.set()
        self.join(5)


class Scene:
    """A server with requests in flight, what is done to it, and what is seen."""

    def __init__(self, server):
        self.server, self.clients, self.watches, self.lines = server, [], {}, []
        self.roles = server.processes()
        self.gone = {}
        self.feed, self.idle = None, None

    def client(self, name, api, words_of_prompt, tokens, stream, **more):
        # The first words differ, so that no prompt is found in the cache.
        prompt = f"{time.monotonic_ns()} {words('w', words_of_prompt)}"
        client = Client(name, self.server.port, api, body(api, prompt, tokens, stream) | more)
        self.clients.append(client)
        client.start()
        return client

    def watch(self):
        self.watches["health"] = Watch(lambda: exchange(self.server.port, "/health"), HEALTH_PERIOD_S)
        self.watches["metrics"] = Watch(self.progress, METRICS_PERIOD_S)
        self.watches["processes"] = Watch(lambda: {role: is_running(pid) for role, pid in self.roles.items()}, 0.05)
        if port := getattr(self.server, "events_port", None):
            self.feed = Feed(port)
            self.feed.start()
        for watch in self.watches.values():
            watch.start()

    def progress(self):
        seen = exchange(self.server.port, "/metrics")
        if seen.get("status") != 200:
            return {key: value if len(str(value)) < 500 else str(value)[:500] for key, value in seen.items()}
        samples = {}
        for name, value in re.findall(r"^([A-Za-z_:][\w:]*)(?:\{.*\})? (\S+)$", seen["body"], re.MULTILINE):
            if name in self.server.progress:
                samples[name] = samples.get(name, 0.0) + float(value)
        return {"status": 200, "samples": samples}

    def busy(self):
        """Streams with content and without, whole answers, in every API, and a connection that is kept."""
        self.idle = Client("idle connection", self.server.port, "/health", None)
        self.idle.start()
        begun = [self.client("begun stream", api, 20, LONG_ANSWER, True) for api in self.server.apis]
        begun += [self.client("begun short stream", self.server.apis[0], 20, 400, True)]
        for api in self.server.apis:
            self.client("begun whole", api, 20, LONG_ANSWER, False)
        self.client("begun short whole", self.server.apis[0], 20, 400, False)
        until("streams have content", lambda: all(c.content_events() >= 3 or c.is_over() for c in begun), 60)
        for api in self.server.apis:
            self.client("reading stream", api, LONG_WORDS, 16, True)
            self.client("reading whole", api, LONG_WORDS, 16, False)
        until("requests are sent", lambda: all(c.sent_at for c in self.clients), 10)
        time.sleep(0.3)

    def die(self, what, cause, window_s, undo=None, undo_after_s=None):
        """Causes it, sends new requests, looks for `window_s`, and writes down what was seen."""
        self.phases = {client: client.phase() for client in self.clients if not client.is_over()}
        before = {client: client.content_events() for client in self.clients}
        self.epoch = time.monotonic()
        cause()
        self.lines.append({"line": "cause", "at": 0.0, "what": what})
        for after in NEW_REQUESTS_S:
            time.sleep(max(0, self.epoch + after - time.monotonic()))
            for stream in (True, False):
                client = self.client(f"new {'stream' if stream else 'whole'}", self.server.apis[0], 20, 16, stream)
                self.phases[client] = "sent afterwards"
        if undo:
            time.sleep(max(0, self.epoch + undo_after_s - time.monotonic()))
            undo[1]()
            self.lines.append({"line": "cause", "at": self.since(time.monotonic()), "what": undo[0]})
        deadline = self.epoch + window_s
        while time.monotonic() < deadline:
            time.sleep(0.1)
        watched = {name: watch.stop() for name, watch in self.watches.items()}
        for client in [*self.clients, self.idle]:
            client.stop.set()
        for client in [*self.clients, self.idle]:
            client.join(5)
        self.write(before, watched, window_s)

    def since(self, at):
        return None if at is None else round(at - self.epoch, 3)

    def write(self, before, watched, window_s):
        for client in self.clients:
            if client in self.phases:
                self.lines.append(self.of_client(client, before.get(client, 0)))
        if self.idle:
            ended_at = None if self.idle.end == "open" else self.since(self.idle.end_at)
            self.lines.append({"line": "idle_connection", "end": self.idle.end, "end_at": ended_at})
        # From the last look before the death on.
        for name, seen in watched.items():
            for began, to, what in seen:
                if to < self.epoch - 1.5 or name == "processes" and to < self.epoch:
                    continue
                self.lines.append({"line": name, "from": max(self.since(began), -2.0), "to": self.since(to)} | what)
        if self.feed:
            self.feed.stop()
            self.lines.append({
                "line": "feed",
                "batches_before": sum(at < self.epoch for at, _ in self.feed.batches),
                "batches_after": [[self.since(at), seq] for at, seq in self.feed.batches if at >= self.epoch][-8:],
                "connection": [[self.since(at), how] for at, how in self.feed.connection if at >= self.epoch][:6],
            })
        log = re.sub(r"\x1b\[[0-9;]*m", "", self.server.log.read_text(errors="replace"))
        wrong = re.compile("Error: |bad_alloc|not allocate|terminate called")
        said = [text.strip()[-200:] for text in log.splitlines() if wrong.search(text)]
        self.lines.append({"line": "process", "exit": self.server.child.poll(), "log": list(dict.fromkeys(said))[:4]})
        print(log[-1500:], file=sys.stderr)

    def of_client(self, client, content_before):
        answer = client.answer
        line = {
            "line": "client", "name": client.name, "api": client.path, "stream": client.streamed,
            "phase": self.phases[client], "sent_at": self.since(client.sent_at),
        }
        if head := answer.head():
            line |= {"head_at": self.since(answer.at(0)), "head": head[0]}
            pieces, whole = answer.body()
            if answer.is_event_stream():
                events = answer.events()
                content = [at for at, event in events if has_content(event)]
                told = next((n for n, (_, event) in enumerate(events) if is_error(event)), len(events))
                line |= {
                    "content_before": content_before, "content_after": len(content) - content_before,
                    "last_content_at": self.since(content[-1]) if content else None,
                    "done": bool(events) and events[-1][1] == "data: [DONE]",
                    "last_event": events[told - 1][1][-200:] if told else None,
                    "events": [[self.since(at), event] for at, event in events[told:]],
                }
            else:
                text = b"".join(data for _, data in pieces).decode(errors="replace")
                # A whole answer is words of no meaning.
                line["body"] = text if answer.status() != 200 or len(text) < 300 else text[:80] + "…" + text[-200:]
                line["body_at"] = self.since(answer.pieces[-1][0])
            line["framing_ended"] = whole
        line |= {"end": client.end, "end_at": self.since(client.end_at) if client.end not in ("silent", "open") else None}
        return line


def kill(pid, how):
    return lambda: os.kill(pid, how)


def deaths(server):
    """By name: what is done, to which process, and how long is looked at what comes of it."""
    core, worker, api = server.core(), server.worker(), server.api_server()
    stop, go_on = signal.SIGSTOP, signal.SIGCONT
    table = {
        "server_stopped": ("SIGSTOP to the API server", kill(api, stop), 32, ("SIGCONT", kill(api, go_on)), 16),
        "server_killed": ("SIGKILL to the API server", kill(api, signal.SIGKILL), 20),
        "terminated": ("SIGTERM to the API server", kill(api, signal.SIGTERM), 75),
        "out_of_memory": ("no further memory for the process that runs the model", lambda: limit_memory(worker), 25),
    }
    if core:
        table |= {
            "core_stopped": ("SIGSTOP to the engine core", kill(core, stop), 32, ("SIGCONT", kill(core, go_on)), 16),
            "core_killed": ("SIGKILL to the engine core", kill(core, signal.SIGKILL), 25),
        }
    if worker not in (core, api):
        table |= {
            "worker_stopped": ("SIGSTOP to the worker", kill(worker, stop), 32, ("SIGCONT", kill(worker, go_on)), 16),
            "worker_killed": ("SIGKILL to the worker", kill(worker, signal.SIGKILL), 25),
        }
    return table


def save(server, death, lines):
    folder = DATA / server.directory()
    folder.mkdir(parents=True, exist_ok=True)
    meta = {"line": "meta", "engine": server.engine, "version": server.version, "death": death}
    path = folder / f"{death}.jsonl"
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in [meta, *lines]))
    print(f"{path}: {path.stat().st_size} bytes", flush=True)


def refusals(server):
    """What is answered to requests that the engine cannot take. Nothing dies."""
    for death, api_model_prompt in {
        "wrong_model": [(api, {"model": "no-such-adapter"}, 20) for api in server.apis],
        "context_too_long": [(api, {}, 9_000) for api in server.apis],
    }.items():
        scene = Scene(server)
        scene.epoch, scene.phases = time.monotonic(), {}
        for api, more, count in api_model_prompt:
            for stream in (True, False):
                client = scene.client(death.replace("_", " "), api, count, 16, stream, **more)
                until("it is answered", client.is_over, 60)
                client.give_up()
                scene.phases[client] = "refused"
        save(server, death, [scene.of_client(client, 0) for client in scene.clients])


def client_gone(server):
    """Clients that leave before the head and in mid-stream: how soon the engine hears of it."""
    scene = Scene(server)
    idle = lambda: (scene.progress().get("samples") or {}).get(server.progress[0]) == 0
    lines = []
    for name, count, tokens, stream in [
        ("before the head", LONG_WORDS, LONG_ANSWER, False), ("in mid-stream", 20, LONG_ANSWER, True),
        ("before the content", LONG_WORDS, LONG_ANSWER, True),
    ]:
        until("nothing runs", idle, 180)
        client = scene.client(name, server.apis[0], count, tokens, stream)
        until("the request runs", lambda: not idle(), 30)
        if name == "in mid-stream":
            until("it has content", lambda: client.content_events() > 3, 30)
        left = time.monotonic()
        client.leave()
        try:
            until("nothing runs", idle, 180)
            lines.append({"line": "client", "name": f"gone {name}", "idle_after": round(time.monotonic() - left, 2)})
        except AssertionError:
            lines.append({"line": "client", "name": f"gone {name}", "idle_after": None})
    save(server, "client_gone", lines)


def preempting(engine):
    """Requests that together need more KV cache than there is: no request fails, all are slower."""
    server = made(engine, 0, **made_small(engine))
    server.wait_ready()
    try:
        scene = Scene(server)
        scene.watch()
        scene.epoch, scene.phases = time.monotonic(), {}
        for number in range(8):
            client = scene.client(f"one of eight {number}", server.apis[number % 2], 100, 400, number % 2 == 0)
            scene.phases[client] = "sent at once"
        until("all are answered", lambda: all(client.is_over() for client in scene.clients), 600)
        for client in scene.clients:
            client.give_up()
        watched = {name: watch.stop() for name, watch in scene.watches.items()}
        scene.write({}, {"metrics": watched["metrics"][-1:], "health": watched["health"]}, 0)
        save(server, "out_of_kv", scene.lines)
    finally:
        server.kill()


def made_small(engine):
    """Options that leave too little KV cache for eight requests, and enough for each."""
    return {
        "vllm": {"blocks": 40, "context_tokens": 1024},
        "sglang": {"tokens": 1280},
        "llamacpp": {"context_tokens": 4096, "unified": True},
    }[engine]


def main(engine, names):
    # What leaves the server alive comes first; a start takes half a minute and more.
    server = None
    gentle = {"refusals": refusals, "client_gone": client_gone}
    every = [*gentle, "core_stopped", "worker_stopped", "server_stopped", "terminated", "core_killed", "worker_killed",
             "server_killed", "out_of_memory", "out_of_kv"]
    try:
        for name in names or every:
            if name == "out_of_kv":
                if server:
                    server.kill()
                    server = None
                preempting(engine)
                continue
            if server is None:
                server = made(engine, 0)
                server.wait_ready()
                warm(server)
            if name in gentle:
                gentle[name](server)
                continue
            table = deaths(server)
            if name not in table:
                print(f"{engine} has no {name}")
                continue
            what, cause, window_s, *undone = table[name]
            scene = Scene(server)
            scene.watch()
            scene.busy()
            scene.die(what, cause, window_s, *undone)
            save(server, name, scene.lines)
            # llama.cpp goes on reading prompts whose clients have left, and starts in half a second.
            if not undone or engine == "llamacpp":
                server.kill()
                server = None
            else:
                until("nothing runs", lambda: (scene.progress().get("samples") or {}).get(server.progress[0]) == 0, 240)
    finally:
        if server:
            server.kill()


def warm(server):
    """The first request of each kind loads what later ones find loaded."""
    for api in server.apis:
        client = Client("warm", server.port, api, body(api, words("warm", 300), 8, False))
        client.start()
        until("it is answered", client.is_over, 120)
        client.give_up()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
