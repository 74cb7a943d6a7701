"""Prefill on one vLLM server and decode on another, joined by NIXL: the two legs of a request by hand, without kvlane.

    e2e/pd/setup.sh && e2e/.work/venv/bin/python e2e/pd/test_wire.py -v
    e2e/.work/venv/bin/python e2e/pd/test_wire.py -v Leaving          # one group

What a router has to send, and what it may expect. RECORD names a folder that every exchange is written to, as JSON.
"""

import http.client
import json
import os
import signal
import struct
import sys
import threading
import time
import unittest
import uuid
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))

import msgspec
import zmq
from pair import BOTH, Nixl

from conversations import cached, text
from engines import MODEL, metrics, request, start, until
from fleet import BLOCK_TOKENS

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
# What a first leg has beside the body of the client; vLLM's answer has the same object, filled in.
ASKED = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None, "remote_host": None,
    "remote_port": None,
}
# Short, so that a test can wait for its end.
LEASE_S = 6
RECORD = os.environ.get("RECORD")
servers: list[Nixl] = []


class Pair(Nixl):
    lease_s = LEASE_S


class Recomputing(Pair):
    on_failure = "recompute"


def setUpModule():
    servers.extend([Pair("pd-0", BOTH), Pair("pd-1", BOTH), Recomputing("pd-2", BOTH)])
    start(servers)


def tearDownModule():
    for server in servers:
        server.stop()


def body_of(path, words, **more):
    prompt = {"messages": [{"role": "user", "content": words}]} if path == CHAT else {"prompt": words}
    return {"model": MODEL, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | prompt | more


def streamed(body):
    return body | {"stream": True, "stream_options": {"include_usage": True}}


def first_leg(body, **more):
    """The request for prefill that a client's request becomes."""
    kept = {key: value for key, value in body.items() if key not in ("stream_options", "min_tokens", "max_completion_tokens")}
    return kept | {"max_tokens": 1, "stream": False, "kv_transfer_params": ASKED} | more


def content(answer):
    """The text of each choice, of a whole answer or of a stream."""
    bodies = [answer.json()] if "json" in answer.headers["content-type"] else [e for e in answer.events() if e != "[DONE]"]
    texts = {}
    for choice in [choice for body in bodies for choice in body["choices"]]:
        piece = (choice.get("message") or choice.get("delta") or {}).get("content") or choice.get("text") or ""
        texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


class Legs(unittest.TestCase):
    def setUp(self):
        self.prefill, self.decode, self.recomputing = servers

    def send(self, server, path, body, **more):
        answer = request(server.port, path, body, **more)
        if RECORD:
            record(f"{self.id().split('.', 1)[1]}", server, path, body, answer)
        return answer

    def prefilled(self, path, body, **more):
        """The second leg's body, once the first has been answered."""
        answer = self.send(self.prefill, path, first_leg(body, **more))
        self.assertEqual(200, answer.status, answer.body)
        return body | {"kv_transfer_params": answer.json()["kv_transfer_params"]}

    def blocks_held(self, server):
        return round(metrics(server.port)["vllm:kv_cache_usage_perc"] * 4096)


class Answering(Legs):
    def test_two_legs_answer_as_one(self):
        for path in (CHAT, COMPLETION):
            for number, shape in enumerate((dict, streamed)):
                with self.subTest(path=path, shape=shape.__name__):
                    body = shape(body_of(path, text(f"{path[4:6]}{number}", 150)))
                    before = fetched(self.decode)
                    answer = self.send(self.decode, path, self.prefilled(path, body))
                    self.assertEqual(200, answer.status, answer.body)
                    self.assertGreater(fetched(self.decode), before, "no tokens have come from the prefill server")
                    self.assertEqual(content(self.send(self.prefill, path, body)), content(answer))

    def test_the_same_servers_work_the_other_way_round(self):
        self.prefill, self.decode = self.decode, self.prefill
        body = body_of(CHAT, text("reverse", 150))
        before = fetched(self.decode)
        answer = self.send(self.decode, CHAT, self.prefilled(CHAT, body))
        self.assertGreater(fetched(self.decode), before)
        self.assertEqual(content(self.send(self.prefill, CHAT, body)), content(answer))

    def test_cached_tokens_are_those_of_the_first_leg(self):
        """Decode answers with what prefill had cached, so that a client sees what was saved: not with what it has itself."""
        body = body_of(CHAT, text("turns", 150))
        first = self.send(self.decode, CHAT, self.prefilled(CHAT, body)).json()
        self.assertEqual(0, cached(first["usage"]))
        said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        body["messages"] += [said, {"role": "user", "content": text("more", 40)}]
        leg = self.prefilled(CHAT, body)
        had = leg["kv_transfer_params"]["remote_prefill_cached_tokens"]
        self.assertGreater(had, 0)
        self.assertEqual(had, cached(self.send(self.decode, CHAT, leg).json()["usage"]))


class Asking(Legs):
    """What a first leg says, and what it must not have."""

    def test_the_answer_says_where_the_blocks_are(self):
        for path, prefix in ((CHAT, "chatcmpl-"), (COMPLETION, "cmpl-")):
            name = str(uuid.uuid4())
            body = body_of(path, text(f"where{path[4:6]}", 100))
            answer = self.send(self.prefill, path, first_leg(body), headers={"x-request-id": name}).json()
            tokens, params = answer["usage"]["prompt_tokens"], answer["kv_transfer_params"]
            (blocks,) = params.pop("remote_block_ids")
            self.assertEqual(-(-tokens // BLOCK_TOKENS), len(blocks))
            self.assertTrue(params.pop("remote_request_id").startswith(prefix + name), answer)
            self.assertTrue(params.pop("remote_engine_id"), answer)
            self.assertEqual({
                "do_remote_prefill": True, "do_remote_decode": False, "remote_host": "127.0.0.1",
                "remote_port": self.prefill.side_channel_port, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": tokens,
                "remote_blocks_expiry_time": None, "transfer_mode": "pull", "remote_prefill_cached_tokens": 0,
            }, params)

    def test_a_streamed_first_leg_does_not_say_it(self):
        for path in (CHAT, COMPLETION):
            answer = self.send(self.prefill, path, streamed(body_of(path, text(path[4:6], 50))) | {"kv_transfer_params": ASKED})
            self.assertEqual((200, "[DONE]"), (answer.status, answer.events()[-1]))
            self.assertNotIn(b"kv_transfer_params", answer.body)

    def test_parameters_that_a_first_leg_must_not_have(self):
        body = body_of(CHAT, text("left", 50))
        for left, said in [({"min_tokens": 8}, "min_tokens must be"), ({"stream_options": {"include_usage": True}}, "Stream options")]:
            answer = self.send(self.prefill, CHAT, first_leg(body, **left))
            self.assertEqual(400, answer.status, left)
            self.assertIn(said, answer.json()["error"]["message"])
        answer = self.send(self.prefill, CHAT, first_leg(body, max_completion_tokens=5)).json()
        self.assertEqual(5, answer["usage"]["completion_tokens"], "max_completion_tokens is above max_tokens")

    def test_requests_that_cannot_be_split(self):
        """Of several prompts, blocks of the first are said; decode would take them for all. Of a beam search, none."""
        one, two = text("one", 50), text("two", 150)
        tokens = self.send(self.prefill, COMPLETION, body_of(COMPLETION, one)).json()["usage"]["prompt_tokens"]
        answer = self.send(self.prefill, COMPLETION, first_leg(body_of(COMPLETION, [one, two]))).json()
        (blocks,) = answer["kv_transfer_params"]["remote_block_ids"]
        self.assertEqual(-(-tokens // BLOCK_TOKENS), len(blocks))
        beams = body_of(COMPLETION, text("beam", 50), use_beam_search=True, n=2)
        self.assertIsNone(self.send(self.prefill, COMPLETION, first_leg(beams)).json()["kv_transfer_params"])


class Events(Legs):
    def test_decode_publishes_the_blocks_that_it_was_given(self):
        with Feed(self.prefill) as theirs, Feed(self.decode) as feed:
            body = body_of(CHAT, text("events", 200))
            leg = self.prefilled(CHAT, body)
            tokens = leg["kv_transfer_params"]["remote_num_tokens"]
            answer = self.send(self.decode, CHAT, leg | {"max_tokens": 1})
            self.assertEqual(200, answer.status)
            whole = tokens // BLOCK_TOKENS
            stored = feed.until_stored(whole)
            self.assertEqual(theirs.until_stored(whole)[:whole], stored[:whole], "hashes")


class Leaving(Legs):
    """Blocks of a first leg are kept until decode has them, and not for ever."""

    def setUp(self):
        super().setUp()
        until("nothing is held", lambda: self.blocks_held(self.prefill) == 0)

    def test_blocks_that_decode_never_asks_for_come_back(self):
        before = metrics(self.prefill.port)["vllm:nixl_num_kv_expired_reqs_total"]
        self.prefilled(CHAT, body_of(CHAT, text("never", 200)))
        self.assertGreater(self.blocks_held(self.prefill), 0)
        until("the lease is over", lambda: self.blocks_held(self.prefill) == 0, 10 * LEASE_S)
        self.assertEqual(before + 1, metrics(self.prefill.port)["vllm:nixl_num_kv_expired_reqs_total"])

    def test_decode_reads_blocks_after_the_lease_as_if_they_were_kept(self):
        """Whatever is in them by then: a router must not send a second leg that late."""
        before = metrics(self.prefill.port)["vllm:nixl_num_notifications_after_expiry_total"]
        leg = self.prefilled(CHAT, body_of(CHAT, text("late", 200)))
        until("the lease is over", lambda: self.blocks_held(self.prefill) == 0, 10 * LEASE_S)
        had = fetched(self.decode)
        self.assertEqual(200, self.send(self.decode, CHAT, leg).status)
        self.assertGreater(fetched(self.decode), had)

        def counted():
            """An idle engine counts nothing: each look comes with a request."""
            self.send(self.prefill, CHAT, body_of(CHAT, "look", max_tokens=1))
            return metrics(self.prefill.port)["vllm:nixl_num_notifications_after_expiry_total"] == before + 1

        until("prefill counts it", counted)

    def test_a_rejected_second_leg_gives_them_back(self):
        before = metrics(self.prefill.port)["vllm:nixl_num_kv_expired_reqs_total"]
        leg = self.prefilled(CHAT, body_of(CHAT, text("rejected", 200)))
        self.assertEqual(400, self.send(self.decode, CHAT, leg | {"max_tokens": 1_000_000}).status)
        until("they are back", lambda: self.blocks_held(self.prefill) == 0)
        self.assertEqual(before, metrics(self.prefill.port)["vllm:nixl_num_kv_expired_reqs_total"], "but by the lease")

    def test_a_client_that_leaves_costs_nothing(self):
        leg = self.prefilled(CHAT, streamed(body_of(CHAT, text("gone", 200), max_tokens=4000)))
        connection = http.client.HTTPConnection("127.0.0.1", self.decode.port)
        connection.request("POST", CHAT, json.dumps(leg), {"content-type": "application/json"})
        response = connection.getresponse()
        self.assertTrue(response.readline())
        response.close()
        connection.close()
        for server in (self.prefill, self.decode):
            until(f"{server.name} holds nothing", lambda: self.blocks_held(server) == 0 and not server.running())


class Stopping(Legs):
    def test_decode_waits_for_a_prefill_server_that_does_not_answer(self):
        """Without end: a router needs a deadline of its own."""
        body = body_of(CHAT, text("stopped", 200))
        leg, answers = self.prefilled(CHAT, body), []
        os.killpg(self.prefill.child.pid, signal.SIGSTOP)
        self.addCleanup(os.killpg, self.prefill.child.pid, signal.SIGCONT)
        client = threading.Thread(target=lambda: answers.append(self.send(self.decode, CHAT, leg)))
        client.start()
        until("decode waits", lambda: metrics(self.decode.port)["vllm:num_requests_kv_fetch_by_stage"] == 1)
        other = body_of(CHAT, text("other", 50))
        self.assertEqual(200, self.send(self.decode, CHAT, other).status, "others are served meanwhile")
        self.assertEqual(1, metrics(self.decode.port)["vllm:num_requests_kv_fetch_by_stage"])
        os.killpg(self.prefill.child.pid, signal.SIGCONT)
        client.join()
        self.assertEqual(200, answers[0].status)
        self.assertEqual(content(self.send(self.prefill, CHAT, body)), content(answers[0]))


class Vanishing(Legs):
    """The last group, by its name: ends the prefill server, and then the decode server."""

    def test_a_prefill_server_dies_between_the_legs(self):
        met = self.prefilled(CHAT, body_of(CHAT, text("met", 50)))
        self.assertEqual(200, self.send(self.recomputing, CHAT, met).status)
        legs = [self.prefilled(CHAT, shape(body_of(CHAT, text(f"dies{shape.__name__}", 200)))) for shape in (dict, streamed)]
        self.prefill.kill()
        whole, stream = (self.send(self.decode, CHAT, leg) for leg in legs)
        self.assertEqual((500, "Internal server error"), (whole.status, whole.json()["error"]["message"]))
        # The head has gone out before the blocks were asked for: an error event follows, after one without content.
        role, error, done = stream.events()
        self.assertEqual((200, "", "[DONE]"), (stream.status, role["choices"][0]["delta"]["content"], done))
        self.assertEqual(500, error["error"]["code"])
        again = {key: value for key, value in legs[0].items() if key != "kv_transfer_params"}
        alone = self.send(self.decode, CHAT, again)
        self.assertEqual(200, alone.status, "decode answers the same request by itself")
        healed = self.send(self.recomputing, CHAT, legs[0])
        self.assertEqual(200, healed.status, "kv_load_failure_policy: recompute")
        self.assertEqual(content(alone), content(healed))

    def test_an_object_without_blocks_ends_the_engine(self):
        """A client whose own object a router passes on can do that."""
        hostile = {"do_remote_prefill": True, "do_remote_decode": False}
        answer = self.send(self.decode, CHAT, body_of(CHAT, text("hostile", 50), kv_transfer_params=hostile))
        self.assertEqual(500, answer.status)
        until("the engine is dead", lambda: not alive(self.decode))


def alive(server):
    try:
        return request(server.port, "/health", timeout_s=5).status == 200
    except OSError:
        return False


def fetched(server):
    """Tokens of prompts that came from another server."""
    return metrics(server.port)["vllm:external_prefix_cache_hits_total"]


class Feed:
    """KV events of one server from the first: asked for again, so that none is missed."""

    def __init__(self, server):
        self.server = server

    def __enter__(self):
        self.context = zmq.Context()
        _, replay = self.server.events_ports
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(f"tcp://127.0.0.1:{replay}")
        self.next = 0
        self.next = len(self.batches())
        return self

    def __exit__(self, *_):
        self.context.destroy(linger=0)

    def batches(self):
        """All batches from `next` on."""
        self.socket.send_multipart([b"", struct.pack(">Q", self.next)])
        found = []
        while True:
            _, topic, sequence, payload = self.socket.recv_multipart()
            if sequence == b"\xff" * 8:
                return found
            found.append(msgspec.msgpack.decode(payload))

    def until_stored(self, count):
        """Hashes of blocks stored since the start, at least `count`."""
        def stored():
            hashes = [
                name for _, events, *_ in self.batches() for event in events if event["type"] == "BlockStored"
                for name in event["block_hashes"]
            ]
            return hashes if len(hashes) >= count else None

        return until(f"{self.server.name} has published {count} blocks", stored)


exchanges: dict[str, list] = {}


def record(name, server, path, body, answer):
    """One file for each test, with its exchanges in order."""
    text_of = answer.body.decode(errors="replace")
    is_json = "json" in (answer.headers["content-type"] or "")
    exchanges.setdefault(name, []).append({
        "server": server.name, "path": path, "request": body, "status": answer.status,
        "answer": json.loads(text_of) if is_json and text_of else text_of, "at": time.time(),
    })
    folder = Path(RECORD)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(exchanges[name], indent=1))


if __name__ == "__main__":
    unittest.main()
