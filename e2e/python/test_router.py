"""The router from Python: its books are right whatever is called in whatever order, and what is wrong is said."""

import array
import random
import threading
import unittest

import kvlane

# Without them, as in CI (`plain.sh`), the tests that need them are left out.
try:
    import msgspec
    import numpy
except ImportError:
    msgspec = numpy = None

needs_arrays = unittest.skipUnless(numpy, "wants NumPy and msgspec")

A, B, C = "http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://10.0.0.3:8000"


def router_of(*endpoints, policy="fleet_cost", **settings):
    router = kvlane.Router(policy, **settings)
    for endpoint in endpoints:
        router.join(endpoint, kv_events=settings.get("kv_events", False), now=0)
    return router


def loads(router):
    return {endpoint.name: (endpoint.requests, endpoint.prefill_tokens, endpoint.context_tokens) for endpoint in router.endpoints}


def stored(names, tokens, parent=None, size=4):
    """A message as vLLM publishes it."""
    return msgspec.msgpack.encode([0.0, [["BlockStored", names, parent, tokens, size]]])


class Placement(unittest.TestCase):
    def test_a_follow_up_goes_to_its_prefix(self):
        router = router_of(A, B, C)
        prompts = {name: list(range(start, start + 640)) for name, start in (("x", 0), ("y", 10_000), ("z", 20_000))}
        homes = {}
        for name, prompt in prompts.items():
            decision = router.arrive(prompt, now=0)
            homes[name] = decision.endpoint
            router.settle(decision.request, now=1)
        for name, prompt in prompts.items():
            decision = router.arrive([*prompt, 1, 2, 3], now=2)
            self.assertEqual((decision.endpoint, decision.overlap_tokens), (homes[name], 640))

    def test_lists_tuples_arrays_and_bytes_are_the_same_prompt(self):
        ids = [2**32 - 1, 7, 70_000, *range(4, 101)]
        as_bytes = b"".join(id.to_bytes(4, "little") for id in ids)
        wide = array.array("q", ids)
        forms = [tuple(ids), array.array("I", ids), array.array("Q", ids), wide, memoryview(wide), as_bytes, iter(ids)]
        router = router_of(A, B)
        router.settle(router.arrive(ids, now=0).request, now=0)
        for form in forms:
            decision = router.arrive(form, now=1)
            self.assertEqual(decision.overlap_tokens, 96, form)
            router.settle(decision.request, "cancelled", now=1)
        small = [1, 2, 127, *range(4, 36)]
        router.settle(router.arrive(small, now=2).request, now=2)
        for kind in "bBhHiIlLqQ":
            decision = router.arrive(array.array(kind, small), now=3)
            self.assertEqual(decision.overlap_tokens, 32, kind)
            router.settle(decision.request, "cancelled", now=3)

    def test_the_first_token_that_is_no_id_is_named(self):
        router = router_of(A)
        for wrong, said in (
            (array.array("q", [1, -1, -2]), "tokens[1] is -1"), (array.array("i", [1, 2, -3]), "tokens[2] is -3"),
            (array.array("Q", [2**32]), "tokens[0] is 4294967296"), (array.array("b", [-1]), "tokens[0] is -1"),
            ([1, 2**32], "tokens[1] is 4294967296"), ((1, "x"), "tokens[1] is 'x'"), ([0.5], "tokens[0] is 0.5"), (b"12345", "5 bytes"),
        ):
            with self.assertRaises(ValueError) as raised:
                router.arrive(wrong, now=0)
            self.assertIn(said, str(raised.exception))

    @needs_arrays
    def test_prompts_in_any_form_are_the_same_prompt(self):
        ids = [7, 70_000, *range(3, 101)]
        forms = [
            tuple(ids), array.array("I", ids), array.array("q", ids), numpy.array(ids), numpy.array(ids, dtype=numpy.uint32),
            numpy.array([ids, ids], dtype=numpy.int64)[1], numpy.array(ids).astype("<u4").tobytes(), iter(ids), numpy.array(ids * 2)[: len(ids)],
            numpy.repeat(numpy.array(ids), 2)[::2],
        ]
        router = router_of(A, B)
        router.settle(router.arrive(ids, now=0).request, now=0)
        for form in forms:
            decision = router.arrive(form, now=1)
            self.assertEqual(decision.overlap_tokens, 96, form)
            router.settle(decision.request, "cancelled", now=1)

    def test_texts_and_block_hashes_have_prefixes_too(self):
        router = router_of(A, block_tokens=4)
        router.settle(router.arrive(text="All happy families are alike; each", now=0).request, now=0)
        self.assertEqual(router.arrive(text="All happy families are alike; every", now=1).overlap_tokens, 4)
        router.settle(router.arrive(block_hashes=[11, 12, 13], now=0).request, now=0)
        self.assertEqual(router.arrive(block_hashes=[11, 12, 99], prompt_tokens=15, now=1).overlap_tokens, 8)

    def test_models_adapters_and_salts_share_nothing(self):
        router, prompt = router_of(A, model="m"), list(range(64))
        router.settle(router.arrive(prompt, now=0).request, now=0)
        for separate in ({"lora": "a"}, {"cache_salt": "s"}, {"lora": "s"}, {"lora": "a", "cache_salt": "s"}):
            self.assertEqual(router.arrive(prompt, now=1, **separate).overlap_tokens, 0, separate)
        self.assertEqual(router.arrive([*prompt, 1], now=1).overlap_tokens, 64)

    def test_the_same_calls_give_the_same_decisions(self):
        def play(seed):
            router = router_of(A, B, C, policy="power_of_two", seed=seed)
            return [router.arrive(list(range(n, n + 50)), now=n / 10).endpoint for n in range(100)]

        self.assertEqual(play(5), play(5))
        self.assertNotEqual(play(5), play(6))

    def test_a_policy_may_have_parameters_and_engines_a_timing(self):
        self.assertEqual(kvlane.Router({"name": "cache_aware", "cache_threshold": 0.3}).policy, "cache_aware")
        self.assertEqual(kvlane.Router().policy, "fleet_cost")
        self.assertEqual(router_of(A, timing="llama-3.1-8b@h100").arrive([1]).endpoint, A)

    def test_endpoints_that_are_down_drained_excluded_or_gone_get_nothing(self):
        router = router_of(A, B, C, policy="least_load")
        router.set_health(A, False, now=1)
        router.drain(B, now=1)
        self.assertEqual({router.arrive([1], now=1).endpoint for _ in range(5)}, {C})
        router.leave(C, now=2)
        refused = router.arrive([1], now=2)
        self.assertEqual((refused.outcome, refused.reason, refused.endpoint), ("rejected", "no_endpoint", None))
        router.drain(B, False, now=3)
        router.set_health(A, True, now=3)
        self.assertEqual({router.arrive([1], now=3, excluded=[A, "gone"]).endpoint for _ in range(3)}, {B})

    def test_an_endpoint_that_fails_gets_no_more_for_a_while(self):
        router = router_of(A, B, policy="round_robin")
        states = set()
        for _ in range(60):
            decision = router.arrive([1, 2], now=1)
            router.settle(decision.request, "failed" if decision.endpoint == A else "ok", now=1)
            states |= {endpoint.breaker for endpoint in router.endpoints if endpoint.name == A}
        self.assertIn("open", states)
        self.assertEqual({router.arrive([1], now=1).endpoint for _ in range(4)}, {B})
        router.settle(router.arrive([3], now=1).request, "busy", retry_after_s=2, now=1)


class Books(unittest.TestCase):
    def test_what_is_settled_weighs_nothing_however_it_ended(self):
        router = router_of(A, B)
        for outcome in ("ok", "failed", "busy", "cancelled"):
            for tokens in (0, 1, 5):
                decision = router.arrive(list(range(100)), now=1)
                self.assertEqual(sum(requests for requests, *_ in loads(router).values()), 1)
                for _ in range(tokens):
                    router.progress(decision.request, now=1)
                router.settle(decision.request, outcome, now=2)
                self.assertEqual(set(loads(router).values()), {(0, 0, 0)})
        self.assertEqual((router.in_flight, router.queued), (0, 0))

    def test_any_order_of_calls_keeps_the_books(self):
        for seed in range(8):
            self.play(random.Random(seed))

    def play(self, draw):
        """Random calls; the router's books are compared with ours after each."""
        limits = {"max_requests_per_endpoint": 3, "queue_size": 4, "queue_timeout_s": 5}
        router = router_of(A, policy=draw.choice(["fleet_cost", "cache_aware", "least_load", "random"]), **limits)
        fleet, placed, waiting, now = {A}, {}, set(), 0.0
        for _ in range(600):
            now += draw.random() / 4
            match draw.randrange(8):
                case 0 | 1 | 2:
                    decision = router.arrive(list(range(draw.randrange(200))), now=now, session=str(draw.randrange(5)))
                    if decision.outcome == "placed":
                        self.assertIn(decision.endpoint, fleet)
                        placed[decision.request] = decision.endpoint
                    elif decision.outcome == "queued":
                        waiting.add(decision.request)
                    else:
                        self.assertIn(decision.reason, {"queue_full", "no_endpoint"})
                case 3 | 4 if placed:
                    request = draw.choice(sorted(placed))
                    if draw.random() < 0.5:
                        router.progress(request, draw.randrange(1, 9), now=now)
                    else:
                        router.settle(request, draw.choice(["ok", "ok", "failed", "busy", "cancelled"]), now=now)
                        del placed[request]
                case 5 if waiting and draw.random() < 0.3:
                    request = draw.choice(sorted(waiting))
                    # Its turn may have come: then it is settled like any other.
                    router.settle(request, "cancelled", now=now)
                    waiting.discard(request)
                case 6 if draw.random() < 0.3:
                    absent = sorted({A, B, C} - fleet)
                    if absent:
                        router.join(absent[0], now=now)
                        fleet.add(absent[0])
                case 7 if draw.random() < 0.1 and len(fleet) > 1:
                    gone = draw.choice(sorted(fleet))
                    router.leave(gone, now=now)
                    fleet.discard(gone)
                case _:
                    pass
            for decision in router.poll(now=now):
                if decision.request not in waiting:
                    continue
                waiting.discard(decision.request)
                if decision.outcome == "placed":
                    placed[decision.request] = decision.endpoint
                else:
                    self.assertIn(decision.reason, {"queue_timeout", "no_endpoint"})
            self.assertEqual(router.queued, len(waiting))
            self.assertEqual(router.in_flight, len(placed))
            of = loads(router)
            self.assertEqual(set(of), fleet)
            self.assertLessEqual(sum(requests for requests, *_ in of.values()), len(placed))
        for request in placed:
            router.settle(request, now=now)
        for request in waiting:
            router.settle(request, "cancelled", now=now)
        router.poll(now=now)
        self.assertEqual((router.in_flight, router.queued), (0, 0))
        self.assertTrue(all(load == (0, 0, 0) for load in loads(router).values()))

    def test_requests_wait_their_turn_and_their_timeout(self):
        router = router_of(A, max_concurrent_requests=1, queue_size=2, queue_timeout_s=10)
        first, second, third, fourth = (router.arrive([n], now=0) for n in range(4))
        outcomes = [decision.outcome for decision in (first, second, third, fourth)]
        self.assertEqual(outcomes, ["placed", "queued", "queued", "rejected"])
        self.assertEqual((fourth.reason, router.queued, router.next_deadline()), ("queue_full", 2, 10.0))
        router.settle(first.request, now=4)
        (decided,) = router.poll(now=4)
        self.assertEqual((decided.request, decided.outcome, decided.endpoint), (second.request, "placed", A))
        (late,) = router.poll(now=10.5)
        self.assertEqual((late.request, late.outcome, late.reason), (third.request, "rejected", "queue_timeout"))
        self.assertEqual((router.poll(now=11), router.next_deadline()), ([], None))

    def test_a_request_that_is_settled_is_not_decided_any_more(self):
        router = router_of(A, max_concurrent_requests=1, queue_size=2)
        first, second, third = (router.arrive([n], now=0) for n in range(3))
        router.settle(first.request, now=1)
        # Its turn has come, but its client has gone.
        router.settle(second.request, "cancelled", now=1)
        self.assertEqual([decision.request for decision in router.poll(now=1)], [third.request])

    def test_threads_share_a_router(self):
        router, wrong = router_of(A, B, C), []

        def work(seed):
            draw = random.Random(seed)
            try:
                for _ in range(300):
                    decision = router.arrive([draw.randrange(1000) for _ in range(64)], session=str(seed))
                    router.progress(decision.request)
                    router.settle(decision.request, cached_tokens=0)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual((wrong, router.in_flight), ([], 0))
        self.assertEqual(set(loads(router).values()), {(0, 0, 0)})

    def test_tokens_that_call_the_router_back_do_not_lock_it(self):
        router = router_of(A)

        def tokens():
            for token in range(20):
                router.arrive([token])
                yield token

        self.assertEqual(router.arrive(tokens()).outcome, "placed")
        self.assertEqual(router.in_flight, 21)


@needs_arrays
class Events(unittest.TestCase):
    def test_blocks_are_known_from_the_message_that_stores_them_to_the_one_that_removes_them(self):
        router = router_of(A, B, kv_events=True, block_tokens=4)
        prompt = list(range(1, 14))
        applied = router.apply_events(B, stored([101, 102], prompt[:8]))
        self.assertEqual((applied.stored, applied.unknown), (2, 0))
        self.assertEqual(router.apply_events(B, stored([103], prompt[8:12], parent=102)).stored, 1)
        decision = router.arrive(prompt)
        self.assertEqual((decision.endpoint, decision.overlap_tokens, decision.knowledge), (B, 12, "exact"))
        router.settle(decision.request, cached_tokens=12)
        removed = router.apply_events(B, msgspec.msgpack.encode([0.0, [["BlockRemoved", [103]]]]))
        self.assertEqual(removed.removed, 1)
        self.assertEqual(router.arrive([*prompt[:12], 99, 98]).overlap_tokens, 8)
        router.apply_events(B, msgspec.msgpack.encode([0.0, [["AllBlocksCleared"]]]))
        self.assertEqual(router.arrive(prompt).overlap_tokens, 0)

    def test_single_events_are_those_of_messages(self):
        router, prompt = router_of(A, B, kv_events=True, block_tokens=4), list(range(1, 14))
        digest = bytes(range(32))
        self.assertEqual(router.stored(B, [-5, digest], prompt[:8]).stored, 2)
        self.assertEqual(router.stored(B, [7], numpy.array(prompt[8:12]), parent=digest).stored, 1)
        self.assertEqual(router.arrive(prompt).overlap_tokens, 12)
        self.assertEqual(router.removed(B, [-5, digest, 7, 1]).removed, 3)
        self.assertEqual(router.stored(B, [9], prompt[:4], parent=123).unknown, 1)
        router.cleared(B)
        self.assertEqual(router.removed(B, [9]).unknown, 1)

    def test_what_a_feed_misses_is_not_used(self):
        router, prompt = router_of(A, B, kv_events=True, block_tokens=4), list(range(1, 14))
        router.apply_events(B, stored([101, 102], prompt[:8]))
        router.set_feed(B, "syncing")
        self.assertEqual(router.arrive(prompt).overlap_tokens, 0)
        router.set_feed(B, "live")
        self.assertEqual({endpoint.knowledge for endpoint in router.endpoints}, {"exact"})

    def test_threads_apply_events_while_others_place(self):
        router = router_of(A, B, kv_events=True, block_tokens=4)
        over = threading.Event()

        def events(endpoint, first):
            for n in range(first, first + 2000):
                router.apply_events(endpoint, stored([n], [n, n, n, n]))
            over.set()

        threads = [threading.Thread(target=events, args=(A, 0)), threading.Thread(target=events, args=(B, 10_000))]
        for thread in threads:
            thread.start()
        while not over.is_set():
            router.settle(router.arrive([1, 1, 1, 1, 2]).request)
        for thread in threads:
            thread.join()
        self.assertEqual(router.arrive([10_001] * 4 + [3]).endpoint, B)


class Errors(unittest.TestCase):
    def check(self, kind, words, call, *arguments, **keywords):
        with self.assertRaises(kind) as caught:
            call(*arguments, **keywords)
        self.assertIn(words, str(caught.exception))

    @needs_arrays
    def test_arguments_that_are_wrong_are_named(self):
        router = router_of(A)
        for kind, words, arguments, keywords in [
            (TypeError, "exactly one of tokens, text and block_hashes", [], {}),
            (TypeError, "exactly one of tokens, text and block_hashes", [[1]], {"text": "x"}),
            (TypeError, "prompt_tokens is for block_hashes", [[1]], {"prompt_tokens": 3}),
            (TypeError, "must be a sequence of integers or an array, not int", [7], {}),
            (TypeError, "one-dimensional array of integers", [numpy.array([1.5])], {}),
            (TypeError, "one-dimensional array of integers", [numpy.zeros((2, 2), dtype=int)], {}),
            (ValueError, "tokens[1] is -1", [[1, -1]], {}),
            (ValueError, "tokens[1] is -1", [numpy.array([1, -1])], {}),
            (ValueError, "tokens[0] is 4294967296", [numpy.array([2**32])], {}),
            (ValueError, "tokens[0] is 'a'", ["ab"], {}),
            (ValueError, "5 bytes are not whole ids of 4 bytes", [b"abcde"], {}),
            (ValueError, "2 blocks of 16 tokens are more than prompt_tokens=31", [], {"block_hashes": [1, 2], "prompt_tokens": 31}),
            (ValueError, "now nan", [[1]], {"now": float("nan")}),
            (ValueError, "now -1", [[1]], {"now": -1}),
            (OverflowError, "", [[1]], {"priority": 1000}),
        ]:
            with self.subTest(words=words):
                self.check(kind, words.replace("nan", "NaN"), router.arrive, *arguments, **keywords)
        self.assertEqual(loads(router), {A: (0, 0, 0)})

    def test_endpoints_and_requests_that_are_not_there_are_named(self):
        router = router_of(A, max_concurrent_requests=1, queue_size=1)
        for call, arguments in [
            (router.leave, [B]), (router.set_health, [B, True]), (router.drain, [B]), (router.forget, [B]),
            (router.set_feed, [B, "absent"]), (router.cleared, [B]),
        ]:
            self.check(LookupError, f"endpoint {B}: has not joined", call, *arguments)
        self.check(ValueError, f"endpoint {A}: has joined already", router.join, A)
        placed, queued = router.arrive([1]), router.arrive([2])
        self.check(ValueError, "is queued: it has no answer yet", router.progress, queued.request)
        self.check(ValueError, "is queued: it can only be cancelled", router.settle, queued.request)
        self.check(ValueError, "outcome fine: must be ok, failed, busy or cancelled", router.settle, placed.request, "fine")
        self.check(ValueError, "cached_tokens must be at most 1", router.settle, placed.request, cached_tokens=2)
        self.check(ValueError, "tokens 0", router.progress, placed.request, 0)
        self.assertEqual(router.in_flight, 1)
        router.settle(placed.request)
        for call in (router.settle, router.progress):
            self.check(LookupError, "is neither queued nor in flight", call, placed.request)
            self.check(LookupError, "is neither queued nor in flight", call, 10**15)

    def test_settings_that_are_wrong_are_named(self):
        for kind, words, keywords in [
            (ValueError, "policy: unknown policy 'best': did you mean", {"policy": "best"}),
            (ValueError, "unknown field `x`", {"policy": {"name": "cache_aware", "x": 1}}),
            (ValueError, "block_tokens 0: must be from 1 to", {"block_tokens": 0}),
            (ValueError, "queue_timeout_s inf", {"queue_timeout_s": float("inf")}),
            (ValueError, "index_ttl_s -1", {"index_ttl_s": -1.0}),
            (FileNotFoundError, "timing nowhere: neither a preset", {"timing": "nowhere"}),
        ]:
            self.check(kind, words, kvlane.Router, **keywords)
        router = router_of(A)
        self.check(ValueError, "must be from 0 to 1", router.report_load, A, running=0, waiting=0, kv_usage_ratio=1.5)
        self.check(ValueError, "must be from 0 to 1", router.report_load, A, running=0, waiting=0, kv_usage_ratio=float("nan"))

    @needs_arrays
    def test_events_that_are_wrong_are_refused(self):
        self.check(ValueError, "Router(kv_events=True)", router_of(A).apply_events, A, stored([1], [1] * 4))
        self.check(ValueError, "Router(kv_events=True)", router_of(A).join, B, kv_events=True)
        router = router_of(A, kv_events=True, block_tokens=4)
        self.check(ValueError, "not a batch of KV events", router.apply_events, A, b"nonsense")
        self.check(ValueError, "Router(block_tokens=8)", router.apply_events, A, stored([1], [1] * 8, size=8))
        self.check(ValueError, "5 tokens for 1 blocks of 4 tokens", router.stored, A, [1], [1] * 5)
        self.check(ValueError, "64-bit integer or a digest", router.stored, A, ["x"], [1] * 4)
        self.check(ValueError, "tier moon", router.removed, A, [1], tier="moon")
        self.check(ValueError, "feed good", router.set_feed, A, "good")


if __name__ == "__main__":
    unittest.main()
