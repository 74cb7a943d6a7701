#!/usr/bin/env python3
"""Two real vLLM servers that publish KV events, behind Envoy with kvlane's endpoint picker.

    e2e/vllm/setup.sh && e2e/envoy/setup.sh && python3 e2e/envoy/test_vllm.py -v
    python3 e2e/envoy/test_vllm.py -v Answers               # one group

Left out, with a line that says so, where vLLM's environment is not installed (E2E_WORK, see e2e/README.md). CLIENTS (8) and REQUESTS
(160) are the load of `Dying`.
"""

import asyncio
import json
import os
import sys
import time
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "vllm")]

import load
from arena import Envoy, Picker
from conversations import Conversation, Predicting, asked, at_once, one_by_one, text
from engines import MODEL, WORK, Gateway, request, start, until
from fleet import Publishing

SERVERS = 2
CLIENTS = int(os.environ.get("CLIENTS", "8"))
REQUESTS = int(os.environ.get("REQUESTS", "160"))
OBSERVED = ("--set", "epp.observe_responses=true")
# A server that starts again while the machine is busy takes minutes.
BACK_S_MAX = 600
# What differs from answer to answer of the same engine to the same request.
OWN = ("id", "created", "system_fingerprint")
servers: list[Publishing] = []


def setUpModule():
    if not (WORK / "installed").exists() or not (WORK / "made").exists():
        raise unittest.SkipTest(f"no vLLM in {WORK}: run e2e/vllm/setup.sh, or set E2E_WORK to where it is installed")
    servers.extend(Publishing(f"envoy-{number}") for number in range(SERVERS))
    start(servers)


def tearDownModule():
    for server in servers:
        server.stop()


class Route(Picker):
    """A picker and an Envoy that asks it, with the questions that `conversations` asks a gateway."""

    workers, healthy, knowledge, wait_exact, decisions = (
        getattr(Gateway, name) for name in ("workers", "healthy", "knowledge", "wait_exact", "decisions")
    )

    def __init__(self, way, *options):
        super().__init__([server.url for server in servers], *options, name=f"picker-vllm-{way}")
        try:
            self.wait_ready(len(servers))
            self.wait_exact()
            self.envoy = Envoy(way, [("127.0.0.1", server.port) for server in servers], [self])
        except BaseException:
            self.kill()
            raise

    def ask(self, path, body=None, **more):
        return request(self.envoy.port, path, body, **more)

    def stop(self):
        self.envoy.kill()
        super().stop()


class Routed(Predicting):
    """A route of its own for each group."""

    way, options = "shipped", ()

    @classmethod
    def setUpClass(cls):
        cls.route = Route(cls.way, *cls.options)
        cls.addClassCleanup(cls.route.stop)


class Knowing:
    """The picker reads the events of the engines, and so knows what each has cached."""

    def test_a_second_turn_goes_to_the_server_that_has_the_first(self):
        conversations = [Conversation(f"{self.way} {number}", first_words=300) for number in range(4)]
        answers = one_by_one(self.route, conversations, turns=4)
        self.report(self.way, answers)
        self.check_right(answers)
        for conversation in conversations:
            turns = [one for one in answers if one.asked_by is conversation]
            self.assertEqual(1, len({one.worker for one in turns}), turns)
            self.assertEqual(0, turns[0].cached, turns)
            self.assertTrue(all(one.cached >= 200 for one in turns[1:]), turns)
        self.assertTrue(all(one.knowledge == "exact" for one in answers), answers)
        self.assertEqual({server.url for server in servers}, {one.worker for one in answers})

    def test_what_an_engine_was_asked_directly_is_known(self):
        """Blocks that no request through Envoy has made."""
        holder, body = servers[-1], Conversation(f"direct {self.way}", first_words=300).body()
        self.assertEqual(200, request(holder.port, "/v1/chat/completions", body).status)

        def at_the_holder():
            one = asked(self.route, "/v1/chat/completions", body)
            return one if one.worker == holder.url else None

        one = until("the picker knows the blocks", at_the_holder)
        self.check_right([one])
        self.assertGreater(one.cached, 200)


class Leaving(Knowing, Routed):
    """The call of a request ends with the pick, which is the default."""


class Observing(Knowing, Routed):
    way, options = "observed", OBSERVED


class Answers(Routed):
    """A client gets what it would get from the engine."""

    way, options = "observed", OBSERVED

    def test_chats_and_completions_are_those_of_the_engine(self):
        words = text("equal", 120)
        for path, body in [
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": words}]}),
            ("/v1/completions", {"prompt": words}),
        ]:
            body |= {"model": MODEL, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
            stream = body | {"stream": True, "stream_options": {"include_usage": True}}
            for asked in (body, stream):
                with self.subTest(path=path, stream="stream" in asked):
                    # Numbers depend on how much of a prompt is computed: all of these find it cached.
                    for server in servers:
                        request(server.port, path, asked)
                    direct = [shown(request(server.port, path, asked)) for server in servers]
                    self.assertEqual(direct[0], direct[1])
                    self.assertEqual(direct[0], shown(self.route.ask(path, asked)))

    def test_an_error_is_the_engine_s(self):
        body = {"model": MODEL, "prompt": "x", "max_tokens": -5}
        direct, routed = request(servers[0].port, "/v1/completions", body), self.route.ask("/v1/completions", body)
        self.assertEqual(400, direct.status)
        self.assertEqual((direct.status, direct.json()), (routed.status, routed.json()))

    def test_conversations_at_once_stay_with_their_servers(self):
        conversations = [Conversation(f"crowd {number}", first_words=200) for number in range(12)]
        workers = at_once(self.route.envoy, conversations, turns=4, clients=6)
        stayed = sum(len(set(at)) == 1 for at in workers.values())
        print(f"{stayed} of {len(workers)} conversations at one server", flush=True)
        self.assertEqual(len(conversations), len(workers))


def shown(answer):
    """All of an answer but what differs each time. Of a stream its text, ends and usage: a busy engine puts several tokens in an event."""
    assert answer.status == 200, (answer.status, answer.body)
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.headers["content-type"], without_own(answer.json())
    *events, done = answer.events()
    said, ends = "", []
    for choice in [choice for event in events for choice in event["choices"]]:
        said += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        ends.append(choice["finish_reason"])
    return answer.headers["content-type"], said, [end for end in ends if end], events[-1]["usage"], done


def without_own(body):
    return {key: value for key, value in body.items() if key not in OWN}


class Dying(Routed):
    """SIGKILL of a whole server under load."""

    def test_a_killed_engine_costs_what_it_had_begun(self):
        victim = servers[0]
        ended, killed_at = [], []

        async def client(number, connections):
            while len(ended) < REQUESTS:
                turn = len(ended)
                body = {
                    "model": MODEL, "prompt": text(f"c{number}t{turn}", 60), "max_tokens": 24, "temperature": 0, "ignore_eos": True,
                    "stream": number % 2 == 0,
                }
                begun = time.monotonic()
                reply = await connections.post(json.dumps(body).encode(), path="/v1/completions")
                ended.append((begun, reply, body["stream"]))
                if len(ended) >= REQUESTS // 3 and not killed_at:
                    victim.kill()
                    killed_at.append(time.monotonic())

        async def run():
            connections = load.Client(self.route.envoy.port, timeout_s=120.0)
            await asyncio.gather(*(client(number, connections) for number in range(CLIENTS)))
            connections.close()

        asyncio.run(run())
        bad = [(begun, reply, stream) for begun, reply, stream in ended if not reply.good or stream and not is_done(reply)]
        whole = [reply for _, reply, stream in bad if not stream]
        streams = [reply for _, reply, stream in bad if stream]
        print(
            f"{len(bad)} of {len(ended)} bad with {CLIENTS} clients: {len(whole)} whole answers "
            f"{sorted(reply.status for reply in whole)}, {len(streams)} streams {sorted(reply.status for reply in streams)}, "
            f"slowest {max(reply.end_s for _, reply, _ in ended):.1f} s",
            flush=True,
        )
        self.assertGreater(len(ended), REQUESTS // 2)
        late = [reply for begun, reply, _ in bad if begun > killed_at[0]]
        self.assertEqual([], late, "begun when the engine was dead")

        until("the picker has taken it out", lambda: victim.url not in self.route.healthy())
        servers[0] = victim.restarted()
        until(f"{victim.name} is ready", servers[0].is_ready, BACK_S_MAX)
        ready = time.monotonic()
        until("the picker has taken it back", lambda: victim.url in self.route.healthy())
        print(f"back {time.monotonic() - ready:.1f} s after it was ready", flush=True)
        self.route.wait_exact()
        conversations = [Conversation(f"after {number}", first_words=200) for number in range(4)]
        answers = one_by_one(self.route, conversations, turns=2)
        self.check_right(answers)
        self.assertTrue(all(one.knowledge == "exact" for one in answers), answers)
        # One by one, all may go to the server that was faster so far.
        crowd = [Conversation(f"crowd after {number}", first_words=200) for number in range(12)]
        at_once(self.route.envoy, crowd, turns=1, clients=CLIENTS)
        used = {decision["worker"] for decision in self.route.decisions(len(crowd))}
        self.assertEqual({server.url for server in servers}, used)


def is_done(reply):
    return reply.body.endswith(b"data: [DONE]\n\n")


if __name__ == "__main__":
    unittest.main()
