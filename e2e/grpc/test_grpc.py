"""The gateway in front of two of vLLM's gRPC servers.

    e2e/grpc/setup.sh && e2e/.work/venv/bin/python e2e/grpc/test_grpc.py -v

A gRPC client speaks to the gateway as it speaks to vLLM, with the messages that vLLM's server is made with.
"""

import json
import sys
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))

from servers import BLOCK_TOKENS, WORK, Client, GrpcServer, grpc, messages, tokens
from engines import MODEL, Gateway, request, start, until

LONG = 3000
servers: list[GrpcServer] = []


def setUpModule():
    servers.extend(GrpcServer(number) for number in range(2))
    start(servers)


def tearDownModule():
    for server in servers:
        server.stop()


def prompt(first, length):
    """Token ids that begin like no other prompt of these tests."""
    return [first, *((first * 7 + place) % 900 + 20 for place in range(length - 1))]


class OnGrpc(Gateway):
    """A gateway that knows where its workers publish their events."""

    def naming(self, urls):
        path = WORK / "grpc-gateway.json"
        path.write_text(json.dumps({"workers": [server.worker for server in servers if server.url in urls]}))
        return ["--config", str(path)]


class Grpc(unittest.TestCase):
    def setUp(self):
        self.gateway = OnGrpc(servers, "cache_aware", name="kvlane-grpc")
        self.addCleanup(self.gateway.stop)
        self.gateway.wait_exact()
        self.client = Client(self.gateway.port)

    def idle(self):
        until("nothing is in flight", lambda: self.gateway.in_flight() == (0, 0, 0))

    def test_answers_are_those_of_the_server(self):
        direct = Client(servers[0].port)
        for stream in (True, False):
            for length in (1, 40, 700):
                with self.subTest(stream=stream, length=length):
                    ids = prompt(100 + length, length)
                    theirs, ours = list(direct.generate(ids, stream=stream)), list(self.client.generate(ids, stream=stream))
                    self.assertEqual(tokens(ours), tokens(theirs))
                    self.assertEqual(len(ours), len(theirs))
                    self.assertEqual((len(tokens(ours)), ours[-1].complete.prompt_tokens), (8, length))
        self.idle()
        samples = self.gateway.samples("kvlane_requests_total")
        self.assertEqual(samples, {frozenset({("model", MODEL), ("api", "grpc_generate"), ("code", "200")}): 6.0})
        self.assertEqual(sum(self.gateway.samples("kvlane_output_tokens_total").values()), 48)

    def test_a_text_is_answered_as_the_server_answers_it(self):
        def asked(client):
            params = messages.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            text = messages.GenerateRequest(request_id="text", text="Where is the café? " * 20, sampling_params=params)
            (answer,) = client.stub.Generate(text)
            return answer.complete

        theirs, ours = asked(Client(servers[1].port)), asked(self.client)
        self.assertEqual(list(ours.output_ids), list(theirs.output_ids))
        self.assertEqual(self.gateway.decisions()[0]["prompt_tokens"], ours.prompt_tokens, "counted by the model's tokenizer")

    def test_a_turn_goes_to_the_server_that_has_the_turns_before_it(self):
        conversations = {first: prompt(first, 300) for first in range(200, 212)}
        homes = {}
        for turn in range(4):
            for first, ids in conversations.items():
                call = self.client.generate(ids, max_tokens=20)
                answer = list(call)
                home = dict(call.initial_metadata())["x-router-backend"]
                self.assertEqual(homes.setdefault(first, home), home, f"conversation {first}, turn {turn}")
                decision = self.gateway.decisions()[0]
                self.assertEqual(decision["prompt_tokens"], len(ids))
                self.assertEqual(decision["overlap_tokens"], answer[-1].complete.cached_tokens, f"turn {turn}")
                if turn > 0:
                    self.assertGreaterEqual(decision["overlap_tokens"], len(ids) - 40 - BLOCK_TOKENS)
                conversations[first] = ids + tokens(answer) + prompt(first, 20)
                self.stored(home)
        self.assertEqual(set(homes.values()), {server.url for server in servers}, "both have some")

    def stored(self, home):
        """Waits until the gateway has read all events of a server."""
        (server,) = [server for server in servers if server.url == home]
        until("the server is idle", lambda: server.running() == 0)
        self.idle()
        self.gateway.wait_exact()

    def test_a_call_that_is_given_up_ends_at_the_server(self):
        for begins in (True, False):
            with self.subTest(begins=begins):
                call = self.client.generate(prompt(300 + begins, 40), max_tokens=LONG, stream=begins)
                if begins:
                    next(call)
                until("a server works on it", lambda: sum(server.running() for server in servers) == 1)
                call.cancel()
                until("no server works on it", lambda: sum(server.running() for server in servers) == 0)
                self.idle()

    def test_errors_of_the_server_and_of_the_gateway_are_statuses(self):
        for ids, max_tokens in ((prompt(1, 5000), 8), (prompt(1, 40), 0)):
            ours, theirs = (self.refused(client, ids, max_tokens) for client in (self.client, Client(servers[0].port)))
            self.assertEqual(ours.code(), grpc.StatusCode.INVALID_ARGUMENT, ours)
            self.assertEqual((ours.code(), ours.details()), (theirs.code(), theirs.details()))
        self.assertEqual(self.refused(self.client, [], 8).code(), grpc.StatusCode.INVALID_ARGUMENT)
        unknown = self.refused(self.client, [1, 2], 8, x_kvlane_model="other")
        self.assertEqual(unknown.code(), grpc.StatusCode.NOT_FOUND, unknown)
        answer = request(self.gateway.port, "/v1/completions", {"model": MODEL, "prompt": "Hello"})
        self.assertEqual(answer.status, 404, answer.body)
        self.idle()

    def refused(self, client, ids, max_tokens, **metadata):
        with self.assertRaises(grpc.RpcError) as refused:
            list(client.generate(ids, max_tokens=max_tokens, **metadata))
        return refused.exception

    def test_other_methods_answer_as_the_server_does(self):
        direct = Client(servers[0].port).stub
        ours, theirs = (stub.GetModelInfo(messages.GetModelInfoRequest()) for stub in (self.client.stub, direct))
        self.assertEqual(ours, theirs)
        self.assertTrue(self.client.stub.HealthCheck(messages.HealthCheckRequest()).healthy)
        ours, theirs = (stub.GetServerInfo(messages.GetServerInfoRequest()) for stub in (self.client.stub, direct))
        self.assertGreater(ours.block_size, 0)
        self.assertEqual((ours.block_size, ours.max_num_seqs), (theirs.block_size, theirs.max_num_seqs))
        self.assertEqual(len(self.client.stub.GetLoads(messages.GetLoadsRequest()).loads), 1)

    def test_requests_are_aborted_by_id(self):
        params = messages.SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True)
        input = messages.TokenizedInput(input_ids=prompt(400, 40))
        call = self.client.stub.Generate(
            messages.GenerateRequest(request_id="to-abort", tokenized=input, sampling_params=params, stream=True)
        )
        next(call)
        self.client.stub.Abort(messages.AbortRequest(request_ids=["to-abort"]))
        rest = list(call)
        self.assertLess(len(tokens(rest)), LONG - 1)
        self.idle()

    def test_a_server_that_is_killed_costs_only_the_streams_that_had_begun(self):
        calls = [self.client.generate(prompt(500 + number, 40), max_tokens=400) for number in range(8)]
        firsts = [next(call) for call in calls]
        self.assertEqual(len(firsts), 8)
        homes = [dict(call.initial_metadata())["x-router-backend"] for call in calls]
        victim = servers[1]
        self.assertIn(victim.url, homes)
        victim.kill()
        # While it is not known to be dead, and after.
        later = [self.client.generate(prompt(600 + number, 40), max_tokens=8) for number in range(8)]
        with ThreadPoolExecutor(16) as pool:
            ends, answers = list(pool.map(outcome, calls)), list(pool.map(outcome, later))
        for home, end in zip(homes, ends):
            if home == victim.url:
                self.assertEqual(end[0], grpc.StatusCode.UNAVAILABLE, end)
                self.assertIn("the answer is incomplete", end[1])
            else:
                self.assertEqual(end[0], grpc.StatusCode.OK, end)
        self.assertEqual([answer[0] for answer in answers], [grpc.StatusCode.OK] * 8, answers)
        self.idle()
        servers[1] = GrpcServer(victim.number, victim.port)
        servers[1].wait_ready()
        until("the new server gets requests", lambda: len(self.gateway.healthy()) == 2, 60)


def outcome(call):
    """How a call ends."""
    try:
        return grpc.StatusCode.OK, tokens(list(call))
    except grpc.RpcError as error:
        return error.code(), error.details()


if __name__ == "__main__":
    unittest.main()
