"""The gateway in front of two llama.cpp servers, which publish nothing: what their answers say of their caches is all.

    e2e/llamacpp/setup.sh && python3 e2e/llamacpp/test_llamacpp.py -v
"""

import http.client
import json
import sys
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rows
from conversations import Conversation, asked, at_once, one_by_one, text
from engines import MODEL, WORK, Engine, Gateway, free_port, request, start, until

# Answers that a worker is judged by at least, see docs/knowledge.md; 16 are looked at.
JUDGED = 16
SLOTS = 4
servers: list["Llama"] = []


class Llama(Engine):
    """One llama.cpp server: a slot keeps the last prompt that it answered, to the token."""

    def __init__(self, number, *options):
        self.port = free_port()
        super().__init__(
            f"llama-{number}",
            [
                "nice", "-n", "5", str(WORK / "llamacpp" / "build" / "bin" / "llama-server"),
                "--model", str(WORK / "llamacpp" / "model.gguf"), "--alias", MODEL,
                "--host", "127.0.0.1", "--port", str(self.port), "--ctx-size", "16384", "--parallel", str(SLOTS),
                "--threads", "1", "--metrics", "--no-webui", "--jinja", *options,
            ],
        )


def setUpModule():
    servers.extend(Llama(number) for number in range(2))
    start(servers)


def tearDownModule():
    for server in servers:
        server.stop()


class WithGateway(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.gateway = Gateway(servers, "cache_aware")
        cls.addClassCleanup(cls.gateway.stop)


def streamed(body):
    return body | {"stream": True, "stream_options": {"include_usage": True}}


class Answers(WithGateway):
    def test_answers_come_whole_and_streamed(self):
        body = {"model": MODEL, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        for path, prompt in [
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text("chat", 50)}]}),
            ("/v1/completions", {"prompt": text("complete", 50)}),
            ("/v1/completions", {"prompt": [300 + number for number in range(100)]}),
        ]:
            with self.subTest(path=path):
                whole = self.gateway.ask(path, body | prompt)
                self.assertEqual(whole.status, 200, whole.body)
                self.assertEqual(whole.json()["usage"]["completion_tokens"], 8)
                *events, done = self.gateway.ask(path, streamed(body | prompt)).events()
                self.assertEqual(done, "[DONE]")
                told = [event["usage"] for event in events if event.get("usage")]
                self.assertEqual(told[-1]["prompt_tokens"], whole.json()["usage"]["prompt_tokens"])

    def test_connections_that_die_after_a_stream_are_survived(self):
        # llama.cpp promises to keep a connection and closes it after a stream. The client's own stays open.
        connection = http.client.HTTPConnection("127.0.0.1", self.gateway.port, timeout=60)
        self.addCleanup(connection.close)
        for number in range(24):
            body = {"model": MODEL, "prompt": text(f"again{number}", 20), "max_tokens": 4}
            body = streamed(body) if number % 3 else body
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            self.assertEqual(response.status, 200, answer)
            if number % 3:
                self.assertTrue(answer.endswith(b"data: [DONE]\n\n"), answer[-200:])

    def test_a_refusal_comes_through_word_for_word(self):
        body = {"model": MODEL, "messages": [{"role": "user"}]}
        ours, theirs = (request(port, "/v1/chat/completions", body) for port in (self.gateway.port, servers[0].port))
        self.assertGreaterEqual(ours.status, 400)
        self.assertEqual((ours.status, ours.body), (theirs.status, theirs.body))


class Apis(WithGateway):
    def test_every_row_of_llama_cpp(self):
        embeds = Llama(len(servers), "--embeddings", "--pooling", "mean")
        self.addCleanup(embeds.stop)
        start([embeds])
        before = Gateway([embeds], "cache_aware", name="kvlane-embeds")
        self.addCleanup(before.stop)
        taken = {}
        for server, gateway in [(servers[0], self.gateway), (embeds, before)]:
            with self.subTest(server=server.name):
                taken[server.name] = rows.check(self, "llama.cpp", server.port, gateway, MODEL)
        print({name: f"{took} of {count} taken" for name, (count, took) in taken.items()}, flush=True)
        self.assertTrue(all(took > 10 for _, took in taken.values()), taken)


class Caches(WithGateway):
    def test_conversations_stay_where_their_slot_is(self):
        conversations = [Conversation(f"slot {number}") for number in range(4)]
        answers = one_by_one(self.gateway, conversations, turns=5)
        for conversation in conversations:
            turns = [one for one in answers if one.asked_by is conversation]
            self.assertEqual(len({one.worker for one in turns}), 1, turns)
            # From the second turn on what was said before is found.
            for one in turns[1:]:
                self.assertGreater(one.cached, one.usage["prompt_tokens"] // 2, turns)
        self.assertEqual({one.knowledge for one in answers}, {"approximate"})

    def test_usage_and_timings_say_the_same_and_are_counted(self):
        def counted():
            names = ("kvlane_prediction_answers_total", "kvlane_prediction_reported_tokens_total")
            return [sum(self.gateway.samples(name).values()) for name in names]

        before = counted()
        conversation = Conversation("counted")
        answers = [conversation.turn(self.gateway) for _ in range(4)]
        for one in answers:
            self.assertEqual(one.answer.json()["timings"]["cache_n"], one.cached, one)
        now = until(
            "the last answer is counted",
            lambda: (now := [after - at_first for after, at_first in zip(counted(), before)])[0] >= 3 and now,
        )
        # An answer that neither was predicted to reuse anything nor did says nothing and may be left out.
        self.assertLessEqual(now[0], len(answers))
        self.assertEqual(now[1], sum(one.cached for one in answers))

    def test_many_clients_at_once(self):
        conversations = [Conversation(f"crowd {number}", first_words=100) for number in range(2 * SLOTS)]
        workers = at_once(self.gateway, conversations, turns=4, clients=SLOTS)
        turns = [(first, second) for used in workers.values() for first, second in zip(used, used[1:])]
        stayed = sum(first == second for first, second in turns)
        print(f"\n{stayed} of {len(turns)} turns at the server of the turn before")
        self.assertGreaterEqual(stayed, 0.8 * len(turns))
        self.assertEqual(len({server for used in workers.values() for server in used}), 2, "both servers have some")


class NoCaches(unittest.TestCase):
    """A server that keeps nothing is found out by its answers."""

    def test_a_server_without_a_cache_is_placed_by_load_only(self):
        server = Llama(len(servers), "--no-cache-prompt")
        self.addCleanup(server.stop)
        start([server])
        gateway = Gateway([server], "cache_aware")
        self.addCleanup(gateway.stop)
        conversation = Conversation("forgotten", first_words=100)
        first = conversation.turn(gateway)
        self.assertEqual(first.knowledge, "approximate")
        answers = [conversation.turn(gateway) for _ in range(JUDGED)]
        self.assertEqual({one.cached for one in answers}, {0})
        last = conversation.turn(gateway)
        self.assertEqual((last.knowledge, last.overlap), ("load_only", 0), last)
        self.assertTrue(last.answer.headers["x-router-reason"].endswith("; knowledge=load_only"))
        (pool,) = request(gateway.admin_port, "/readiness").json()["pools"]
        self.assertEqual(pool["prefix_knowledge"], "load_only")
        changes = gateway.samples("kvlane_knowledge_changes_total")
        self.assertEqual({value for labels, value in changes.items() if ("to", "load_only") in labels}, {1.0})


if __name__ == "__main__":
    unittest.main()
