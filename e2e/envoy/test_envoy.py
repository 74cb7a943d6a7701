#!/usr/bin/env python3
"""A real Envoy with kvlane's endpoint picker, in front of engines that say what has reached them.

    e2e/envoy/setup.sh && e2e/k8s/setup.sh helm && python3 e2e/envoy/test_envoy.py -v
    python3 e2e/envoy/test_envoy.py -v Dying                # one group

What is in the way of a request is in data_plane.py. REQUESTS (800) and PER_S (200) are the load of `Dying`.
"""

import asyncio
import base64
import collections
import hashlib
import json
import os
import random
import signal
import unittest

import load
from arena import WORK, Envoy, Picker, Upstreams, chat, until

REQUESTS = int(os.environ.get("REQUESTS", "800"))
PER_S = int(os.environ.get("PER_S", "200"))
BAD_MAX = 2
DESTINATION = "x-gateway-destination-endpoint"
# Those of llm-d's sidecars; the first is the address of the engine that prefills.
SIDECAR_HEADERS = ("x-prefiller-host-port", "x-encoder-hosts-ports", "x-data-parallel-host-port", "x-kv-cache-source-host-port")
EVIL = "127.0.0.1:1"
# Long enough for an index of prefixes to know them apart: a hundred and more blocks.
PREFIX_WORDS = 3000


def words(seed, count):
    order = random.Random(seed)
    return " ".join(order.choice("lane block cache prefix route token queue shard pool rank".split()) for _ in range(count))


def settings(*keys):
    return [word for key in keys for word in ("--set", key)]


class Group(unittest.TestCase):
    """Engines for all tests of a class."""

    engines = 3

    @classmethod
    def setUpClass(cls):
        cls.upstreams = Upstreams(cls.engines)

    @classmethod
    def tearDownClass(cls):
        cls.upstreams.kill()

    def start(self, way, pickers=1, options=(), urls=None, tls=True):
        """Pickers that are ready, and an Envoy that has found them so."""
        urls = self.upstreams.urls if urls is None else urls
        started = [Picker(urls, *options, name=f"picker-{way}-{index}", tls=tls) for index in range(pickers)]
        for picker in started:
            self.addCleanup(picker.kill)
        for picker in started:
            picker.wait_ready(len(urls))
        envoy = Envoy(way, self.upstreams.addresses, started, tls=tls)
        self.addCleanup(envoy.kill)
        return envoy, started


class Passing:
    """What holds for every way in which a data plane asks the picker."""

    way: str
    options = ()

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.picker = Picker(cls.upstreams.urls, *cls.options, name=f"picker-{cls.way}").wait_ready(cls.engines)
        cls.envoy = Envoy(cls.way, cls.upstreams.addresses, [cls.picker])

    @classmethod
    def tearDownClass(cls):
        cls.envoy.kill()
        cls.picker.kill()
        super().tearDownClass()

    def test_bodies_arrive_byte_for_byte(self):
        for size in (1, 300, 6_000, 62_001, 400_000, 3_000_000):
            body = chat("x" * size)
            reply = load.once(self.envoy.port, body)
            self.assertEqual(200, reply.status, (size, reply.error, reply.body[:300]))
            self.assertEqual(hashlib.sha256(body).hexdigest(), reply.seen["sha256"], size)
            self.assertEqual(len(body), reply.seen["bytes"])

    def test_streams_arrive_event_by_event(self):
        reply = load.once(self.envoy.port, chat("tell me", stream=True, max_tokens=20, gap_ms=20))
        self.assertTrue(reply.good, reply)
        events = [line for line in reply.body.decode().split("\n\n") if line]
        self.assertEqual(21, len(events))
        self.assertEqual("data: [DONE]", events[-1])
        # Held back, they would come together. On a busy machine a few do.
        self.assertGreater(len(reply.pieces_s), len(events) // 2)
        self.assertGreater(reply.pieces_s[-1] - reply.pieces_s[0], 0.2)

    def test_a_prefix_stays_with_its_engine(self):
        at = collections.defaultdict(list)
        for turn in range(4):
            for session in range(6):
                reply = load.once(self.envoy.port, chat(words(session, PREFIX_WORDS) + f" turn {turn}"))
                self.assertTrue(reply.good, reply)
                at[session].append(reply.seen["engine"])
        for session, engines in at.items():
            self.assertEqual(1, len(set(engines)), (session, engines))
        self.assertGreater(len({engines[0] for engines in at.values()}), 1, "all prefixes at one engine")

    def test_a_destination_of_the_client_is_overwritten(self):
        reply = load.once(self.envoy.port, chat("mine"), headers={DESTINATION: "127.0.0.1:1"})
        self.assertTrue(reply.good, reply)
        self.assertIn(reply.seen["engine"], self.upstreams.names)
        self.assertNotIn("127.0.0.1:1", reply.seen["headers"].get(DESTINATION, "").split(","))

    def test_requests_without_a_body_are_answered(self):
        reply = load.once(self.envoy.port, None, path="/v1/models", method="GET")
        self.assertTrue(reply.good, reply)
        self.assertEqual("tiny", reply.json()["data"][0]["id"])

    def test_many_at_a_time_are_answered(self):
        bodies = [chat(words(index, 200)) for index in range(400)]
        replies = asyncio.run(load.together(self.envoy.port, bodies, 32))
        self.assertEqual(400, sum(reply.good for reply in replies), collections.Counter(r.status for r in replies))


class Shipped(Passing, Group):
    way = "shipped"


class Observed(Passing, Group):
    way, options = "observed", settings("epp.observe_responses=true")


class OriginalDestination(Passing, Group):
    """This data plane takes a single endpoint and no list."""

    way, options = "original_dst", settings("epp.observe_responses=true", "epp.fallbacks=0")


class Buffered(Passing, Group):
    way = "buffered"


class Plaintext(Group):
    def test_a_picker_without_tls_is_asked(self):
        envoy, _ = self.start("closed", tls=False)
        self.assertTrue(load.once(envoy.port, chat("hello")).good)


class Refusing(Group):
    def test_without_an_engine_clients_get_503(self):
        picker = Picker(["http://127.0.0.1:9"], name="picker-none")
        self.addCleanup(picker.kill)
        envoy = Envoy("closed", self.upstreams.addresses, [picker], wait=False)
        self.addCleanup(envoy.kill)
        until("the picker answers", lambda: picker.readiness() is not None)
        reply = load.once(envoy.port, chat("hello"))
        self.assertEqual(503, reply.status, reply)

    def test_a_shed_request_gets_429(self):
        """Two streams are all that the pool may have in flight, and nothing may wait."""
        envoy, _ = self.start(
            "observed", options=settings("epp.observe_responses=true", "routing.max_concurrent_requests=2", "routing.queue_size=0"),
        )

        async def run():
            client = load.Client(envoy.port)
            replies = [load.Reply(), load.Reply()]
            body = chat("tell me", stream=True, max_tokens=40, gap_ms=50)
            long = [asyncio.create_task(client.post(body, reply=reply)) for reply in replies]
            while not all(reply.status for reply in replies):
                await asyncio.sleep(0.01)
            reply = await client.post(chat("third"))
            ended = await asyncio.gather(*long)
            after = await client.post(chat("fourth"))
            client.close()
            return reply, ended, after

        reply, ended, after = asyncio.run(run())
        self.assertEqual(429, reply.status, reply)
        self.assertIn("retry-after", reply.headers)
        self.assertTrue(all(stream.good for stream in ended), ended)
        self.assertTrue(after.good, after)


class Subsets(Group):
    """A gateway may name the endpoints that a request can be sent to."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.picker = Picker(cls.upstreams.urls, name="picker-subsets").wait_ready(cls.engines)
        cls.envoy = Envoy("subsets", cls.upstreams.addresses, [cls.picker])

    @classmethod
    def tearDownClass(cls):
        cls.envoy.kill()
        cls.picker.kill()
        super().tearDownClass()

    def engines_of(self, headers):
        """The engines that twelve prompts are sent to."""
        replies = [load.once(self.envoy.port, chat(words(seed, 500)), headers=headers) for seed in range(12)]
        self.assertTrue(all(reply.good for reply in replies), replies)
        return {reply.seen["engine"] for reply in replies}

    def test_only_endpoints_of_a_string_are_picked(self):
        subset = sorted(self.upstreams.names)[:2]
        self.assertLessEqual(self.engines_of({"x-e2e-subset": ",".join(subset)}), set(subset))

    def test_only_endpoints_of_a_list_are_picked(self):
        subset = sorted(self.upstreams.names)[1:]
        self.assertLessEqual(self.engines_of({"x-e2e-subset-list": protobuf_list(subset)}), set(subset))

    def test_a_host_without_a_port_is_all_its_ports(self):
        self.assertLessEqual(self.engines_of({"x-e2e-subset": "127.0.0.1"}), self.upstreams.names)

    def test_a_subset_of_unknown_endpoints_gets_503(self):
        for headers in ({"x-e2e-subset": "10.9.8.7:1"}, {"x-e2e-subset-list": protobuf_list([])}):
            reply = load.once(self.envoy.port, chat("hello"), headers=headers)
            self.assertEqual(503, reply.status, (headers, reply))


def protobuf_list(texts):
    """google.protobuf.Value with a list of strings, in base64: field 6 of values (field 1) with strings (field 3). Short ones."""
    def field(number, data):
        assert len(data) < 128
        return bytes([number << 3 | 2, len(data)]) + data

    values = b"".join(field(1, field(3, text.encode())) for text in texts)
    return base64.b64encode(field(6, values)).decode()


class Sidecars(Group):
    """llm-d's sidecar in front of an engine that decodes connects to the addresses in a header."""

    def start_split(self, way):
        """Each prompt is prefilled at the first engine and decoded at another."""
        roles = {url: "decode" for url in self.upstreams.urls} | {self.upstreams.urls[0]: "prefill"}
        WORK.mkdir(parents=True, exist_ok=True)
        file = WORK / "sidecars.json"
        file.write_text(json.dumps({
            "workers": [{"url": url, "role": role} for url, role in roles.items()],
            "disaggregation": {"connector": "llm-d", "split_tokens_min": 1},
        }))
        picker = Picker([], "--config", str(file), name=f"picker-sidecars-{way}")
        self.addCleanup(picker.kill)
        picker.wait_ready(self.engines)
        envoy = Envoy(way, self.upstreams.addresses, [picker])
        self.addCleanup(envoy.kill)
        return envoy, picker

    def test_the_engine_that_decodes_learns_the_one_that_prefills(self):
        envoy, _ = self.start_split("closed")
        prefill = "{}:{}".format(*self.upstreams.addresses[0])
        # Few: the picker sees no answers and counts each for a while, and with more of them it is cheaper not to split.
        for seed in range(3):
            reply = load.once(envoy.port, chat(words(seed, PREFIX_WORDS)), headers={name: EVIL for name in SIDECAR_HEADERS})
            self.assertTrue(reply.good, reply)
            self.assertNotEqual(prefill, reply.seen["engine"])
            self.assertEqual(prefill, reply.seen["headers"].get(SIDECAR_HEADERS[0]))
            self.assertNotIn(EVIL, reply.seen["headers"].values())

    def test_without_a_picker_clients_name_no_address(self):
        envoy, picker = self.start_split("shipped")
        picker.kill()
        until("Envoy does without", lambda: load.once(envoy.port, chat("hello")).good)
        reply = load.once(envoy.port, chat("hello"), headers={name: EVIL for name in SIDECAR_HEADERS})
        self.assertTrue(reply.good, reply)
        self.assertNotIn(EVIL, reply.seen["headers"].values())


class Fallbacks(unittest.TestCase):
    """An engine of its own process each, one of which is killed."""

    def test_the_next_endpoint_of_the_list_takes_over(self):
        self.kill_an_engine("closed", ())

    def test_the_endpoint_that_has_served_is_reported(self):
        """The picker reads back which one it was, and says so to the client."""
        for reply in self.kill_an_engine("observed", settings("epp.observe_responses=true")):
            self.assertEqual(f"http://{reply.seen['engine']}", reply.headers["x-router-backend"])

    def kill_an_engine(self, way, options):
        engines = [Upstreams(1) for _ in range(3)]
        for engine in engines:
            self.addCleanup(engine.kill)
        urls = [url for engine in engines for url in engine.urls]
        # Probes that come late: the picker does not know what Envoy finds.
        picker = Picker(urls, *settings("health.interval=60s"), *options, name="picker-fallbacks")
        self.addCleanup(picker.kill)
        picker.wait_ready(3)
        envoy = Envoy(way, [engine.addresses[0] for engine in engines], [picker])
        self.addCleanup(envoy.kill)
        body = chat(words(1, PREFIX_WORDS))
        victim = load.once(envoy.port, body).seen["engine"]
        next(engine for engine in engines if victim in engine.names).kill()
        replies = [load.once(envoy.port, body) for _ in range(10)]
        for reply in replies:
            self.assertTrue(reply.good, reply)
            self.assertNotEqual(victim, reply.seen["engine"])
        return replies


class Dying(Group):
    """SIGKILL, under load."""

    def load_while(self, envoy, act, after):
        """`REQUESTS` at `PER_S` a second; `act` runs once `after` of them have been sent."""
        bodies = [chat(words(index % 40, 200)) for index in range(REQUESTS)]

        async def run():
            asyncio.get_running_loop().call_later(after / PER_S, act)
            return await load.open_loop(envoy.port, bodies, PER_S)

        replies = asyncio.run(run())
        bad = [reply for reply in replies if not reply.good]
        slowest = max(reply.end_s for reply in replies)
        statuses = dict(collections.Counter(reply.status for reply in bad))
        print(f"{self._testMethodName}: {len(bad)} of {REQUESTS} bad {statuses or ''}, slowest {slowest:.2f} s", flush=True)
        return bad

    def test_one_of_two_pickers_dies(self):
        envoy, pickers = self.start("closed", pickers=2)
        bad = self.load_while(envoy, pickers[0].kill, REQUESTS // 4)
        self.assertLessEqual(len(bad), BAD_MAX)

    def test_one_of_two_pickers_stops_answering(self):
        envoy, pickers = self.start("closed", pickers=2)
        bad = self.load_while(envoy, lambda: os.kill(pickers[0].child.pid, signal.SIGSTOP), REQUESTS // 4)
        self.assertLessEqual(len(bad), BAD_MAX)

    def test_one_of_two_pickers_is_stopped_and_none_is_lost(self):
        envoy, pickers = self.start("closed", pickers=2)
        bad = self.load_while(envoy, lambda: os.kill(pickers[0].child.pid, signal.SIGTERM), REQUESTS // 4)
        self.assertEqual(0, len(bad))

    def test_streams_outlive_the_picker(self):
        envoy, pickers = self.start("shipped")
        bodies = [chat(words(index, 200), stream=True, max_tokens=60, gap_ms=50) for index in range(16)]

        async def run():
            asyncio.get_running_loop().call_later(1.0, pickers[0].kill)
            return await load.together(envoy.port, bodies, len(bodies))

        replies = asyncio.run(run())
        broken = [reply for reply in replies if not reply.good or not reply.body.endswith(b"data: [DONE]\n\n")]
        print(f"{self._testMethodName}: {len(broken)} of {len(bodies)} broken", flush=True)
        self.assertEqual([], broken)

    def test_without_a_picker_engines_share_the_requests(self):
        envoy, pickers = self.start("shipped", pickers=2)
        for picker in pickers:
            picker.kill()
        # Its worker thread learns of it a moment after its main thread.
        until("Envoy does without", lambda: load.once(envoy.port, chat("hello")).good)
        replies = asyncio.run(load.together(envoy.port, [chat(f"{index} " + "x" * 6000) for index in range(60)], 4))
        self.assertEqual(60, sum(reply.good for reply in replies), collections.Counter(r.status for r in replies))
        self.assertEqual(self.upstreams.names, {reply.seen["engine"] for reply in replies})

    def test_closed_without_a_picker_clients_get_503(self):
        envoy, pickers = self.start("closed")
        pickers[0].kill()
        until("Envoy finds no picker healthy", lambda: envoy.healthy_pickers() == 0)
        self.assertEqual(503, load.once(envoy.port, chat("hello")).status)

    def test_a_picker_that_comes_back_is_asked_again(self):
        envoy, pickers = self.start("shipped")
        port = pickers[0].port
        os.kill(pickers[0].child.pid, signal.SIGSTOP)
        until("Envoy finds no picker healthy", lambda: envoy.healthy_pickers() == 0)
        os.kill(pickers[0].child.pid, signal.SIGCONT)
        until(f"Envoy finds the picker on {port} healthy", lambda: envoy.healthy_pickers() == 1)
        self.assertTrue(load.once(envoy.port, chat("hello")).good)


if __name__ == "__main__":
    unittest.main()
