"""Starts and stops what the tests talk to: engines and the gateway, each in a process group of its own.

Everything listens on loopback. Nothing here sleeps for a guessed time: `until` waits for a condition, up to a limit.
"""

import atexit
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORK = Path(os.environ.get("E2E_WORK", HERE / ".work")).resolve()
KVLANE = os.environ.get("KVLANE", str(HERE.parent / "target" / "release" / "kvlane"))
MODEL = "tiny"
# Half a minute on an idle machine; several minutes next to a compiler.
READY_S_MAX = 600
POLL_S = 0.05


def until(what, condition, limit_s=30.0):
    """The first true answer of `condition`; fails with `what` when none comes within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {limit_s} s in vain until {what}")
        time.sleep(POLL_S)
    return answer


class Answer:
    """A whole HTTP answer."""

    def __init__(self, response):
        self.status, self.headers, self.body = response.status, response.headers, response.read()

    def json(self):
        return json.loads(self.body)

    def events(self):
        """The data of a server-sent event stream, JSON decoded where it is JSON."""
        data = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [item if item == "[DONE]" else json.loads(item) for item in data]


def request(port, path, body=None, method=None, headers=None, timeout_s=60):
    """One exchange on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request(*_line(path, body, method), _encoded(body), _headers(body, headers))
        return Answer(connection.getresponse())
    finally:
        connection.close()


def begin(port, path, body, headers=None, timeout_s=60):
    """A request whose answer has begun: the connection, to close when one likes, and the response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    connection.request(*_line(path, body, None), _encoded(body), _headers(body, headers))
    return connection, connection.getresponse()


def _line(path, body, method):
    return method or ("GET" if body is None else "POST"), path


def _encoded(body):
    return body if body is None or isinstance(body, bytes) else json.dumps(body).encode()


def _headers(body, headers):
    return ({} if body is None else {"content-type": "application/json"}) | (headers or {})


def metrics(port):
    """Prometheus samples by name, summed over their labels."""
    samples = {}
    for line in request(port, "/metrics").body.decode().splitlines():
        if sample := re.match(r"([A-Za-z_:][\w:]*)(?:\{.*\})? (\S+)", line):
            samples[sample[1]] = samples.get(sample[1], 0.0) + float(sample[2])
    return samples


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Process:
    """A program in a session of its own, its output in a log file. Ends with this one at the latest."""

    started: list["Process"] = []

    def __init__(self, name, command, environment=None):
        WORK.mkdir(parents=True, exist_ok=True)
        self.name, self.log = name, WORK / f"{name}.log"
        with self.log.open("wb") as log:
            self.child = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                env=os.environ | (environment or {}),
            )
        self.started.append(self)

    def end_of_log(self):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])

    def check_alive(self):
        if self.child.poll() is not None:
            raise AssertionError(f"{self.name} ended with {self.child.returncode}:\n{self.end_of_log()}")

    def kill(self, how=signal.SIGKILL):
        """Ends the whole group: vLLM's workers outlive their API process otherwise."""
        try:
            os.killpg(self.child.pid, how)
        except ProcessLookupError:
            pass
        self.child.wait(timeout=60)

    def stop(self):
        """Asks first."""
        try:
            self.kill(signal.SIGTERM)
        except subprocess.TimeoutExpired:
            pass
        self.kill()


@atexit.register
def kill_all():
    for process in Process.started:
        process.kill()


# Otherwise SIGTERM would end Python without its exit handlers, and leave the servers behind.
signal.signal(signal.SIGTERM, signal.default_int_handler)


class Engine(Process):
    """A server with an HTTP port on loopback and `/health`. `wait_ready` before use."""

    port: int

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def is_ready(self):
        self.check_alive()
        try:
            return request(self.port, "/health", timeout_s=5).status == 200
        except OSError:
            return False

    def wait_ready(self):
        until(f"{self.name} is ready", self.is_ready, READY_S_MAX)


def start(engines):
    """All at once, since most of a start is waiting; says how long it took."""
    began = time.monotonic()
    for engine in engines:
        engine.wait_ready()
    print(f"{len(engines)} engines ready after {time.monotonic() - began:.0f} s", flush=True)


class Gateway(Process):
    """`kvlane serve` in front of `servers`, all of them healthy."""

    def __init__(self, servers, policy, *options, name=None):
        urls = [server.url for server in servers]
        command = [KVLANE, "serve", "--port", "0", "--prometheus-port", "0", "--policy", policy, *options]
        super().__init__(name or f"kvlane-{policy}", [*command, *self.naming(urls)])
        try:
            self.port, self.admin_port = until("kvlane says where it serves", self._ports)
            until("all workers are ready", lambda: self.healthy() == set(urls))
        except BaseException:
            self.stop()
            raise

    def naming(self, urls):
        """Options that name the workers."""
        return ["--worker-urls", *urls]

    def _ports(self):
        self.check_alive()
        text = re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text())
        said = re.search(r"clients\W+127\.0\.0\.1:(\d+)\W+metrics\W+127\.0\.0\.1:(\d+)", text)
        return said and (int(said[1]), int(said[2]))

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def workers(self):
        return request(self.admin_port, "/workers").json()["workers"]

    def healthy(self):
        return {worker["url"] for worker in self.workers() if worker["healthy"]}

    def in_flight(self):
        """What the gateway believes to be under way, over all workers: requests, prompt and context tokens."""
        loads = [pool for worker in self.workers() for pool in worker["pools"]]
        return tuple(sum(load[what] for load in loads) for what in ("requests", "prefill_tokens", "context_tokens"))

    def ask(self, path, body=None, **more):
        return request(self.port, path, body, **more)

    def knowledge(self):
        """How each worker's caches are known, by URL: one name for each rank and model."""
        return {worker["url"]: [pool["knowledge"] for pool in worker["pools"]] for worker in self.workers()}

    def wait_exact(self):
        """Until the events of all workers are read from the first to the last."""
        until(
            "all caches are known exactly",
            lambda: all(of and set(of) == {"exact"} for of in self.knowledge().values()), 60,
        )

    def decisions(self, limit=1):
        """The last ones, newest first."""
        (pool,) = request(self.admin_port, f"/decisions?limit={limit}").json()["pools"]
        return pool["decisions"]

    def samples(self, name):
        """A metric's values, by labels."""
        exposition = request(self.admin_port, "/metrics").body.decode()
        samples = {}
        for labels, value in re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", exposition, re.MULTILINE):
            samples[frozenset(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels))] = float(value)
        return samples
