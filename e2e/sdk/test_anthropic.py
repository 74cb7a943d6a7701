"""Anthropic's own Python SDK, unmodified, through the gateway: in front of mock engines, and of one that does as told.

    e2e/venv.sh sdk && e2e/.work/sdk/bin/python e2e/sdk/test_anthropic.py -v
"""

import asyncio
import sys
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import anthropic
from anthropic import Anthropic, AsyncAnthropic

from fleet import MOCK, WithFleet
from scripted import MODEL

TOOLS = [{
    "name": "get_weather", "description": "Weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}]
PARIS = "Größe 你好 🙂 \"quoted\" \\ </s>"


def user(text, **more):
    return {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": text}]} | more


class WithAnthropic(WithFleet):
    @classmethod
    def client(cls, **options):
        options = {"max_retries": 0, "timeout": 60, "api_key": "sk-ant-e2e"} | options
        client = Anthropic(base_url=cls.gateway.url, **options)
        cls.addClassCleanup(client.close)
        return client

    @classmethod
    def asynchronous(cls, **options):
        options = {"max_retries": 0, "timeout": 60, "api_key": "sk-ant-e2e"} | options
        return AsyncAnthropic(base_url=cls.gateway.url, **options)


class Answers(WithAnthropic):
    def test_a_message(self):
        answer = self.client().messages.create(**user("hi", model=MOCK, max_tokens=5))
        self.assertEqual(len(answer.content[0].text.split()), 5)
        self.assertEqual((answer.stop_reason, answer.usage.output_tokens), ("max_tokens", 5))
        self.assertEqual((answer.type, answer.role, answer.model), ("message", "assistant", MOCK))

    def test_messages_asynchronously_many_at_a_time(self):
        async def ask():
            async with self.asynchronous() as client:
                asked = (client.messages.create(**user(f"number {n}", model=MOCK, max_tokens=4)) for n in range(40))
                return {answer.id for answer in await asyncio.gather(*asked)}

        self.assertEqual(len(asyncio.run(ask())), 40)

    def test_what_was_said_arrives_byte_for_byte(self):
        answer = self.client().messages.create(**user(PARIS, system="Be brief.", metadata={"user_id": "u"}))
        self.assertEqual(answer.content[0].text, PARIS.upper())
        self.assertEqual(self.engine.bodies[-1]["system"], "Be brief.")
        self.assertRegex(self.engine.headers[-1]["anthropic-version"], r"^\d{4}-\d\d-\d\d$")

    def test_tokens_are_counted_by_the_engine(self):
        counted = self.client().messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "hi"}])
        self.assertEqual(counted.input_tokens, 42)

    def test_headers_are_there_to_be_read(self):
        raw = self.client().messages.with_raw_response.create(**user("hi"), extra_headers={"x-request-id": "e2e-2"})
        self.assertEqual(raw.headers["x-request-id"], "e2e-2")
        self.assertEqual(raw.headers["x-router-backend"], self.engine.url)


class Streams(WithAnthropic):
    def test_a_stream_says_what_the_whole_says(self):
        client, asked = self.client(), user("tell me more", model=MOCK)
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            said = "".join(stream.text_stream)
            final = stream.get_final_message()
        self.assertEqual(said, whole.content[0].text)
        self.assertEqual(final.usage.output_tokens, whole.usage.output_tokens)
        self.assertEqual(final.stop_reason, "max_tokens")

    def test_events_one_by_one(self):
        kinds = [event.type for event in self.client().messages.create(**user("a story"), stream=True)]
        self.assertEqual((kinds[0], kinds[-1]), ("message_start", "message_stop"))

    def test_the_same_asynchronously(self):
        async def ask():
            async with self.asynchronous() as client, client.messages.stream(**user(PARIS)) as stream:
                said = "".join([text async for text in stream.text_stream])
                return said, await stream.get_final_text()

        self.assertEqual(asyncio.run(ask()), (PARIS.upper(), PARIS.upper()))


class Tools(WithAnthropic):
    def test_a_call_and_what_came_of_it(self):
        client, asked = self.client(), user("call the tool", tools=TOOLS)
        (call,) = client.messages.create(**asked).content
        self.assertEqual((call.type, call.name, call.input), ("tool_use", "get_weather", {"city": "Köln"}))
        self.assertEqual(self.engine.bodies[-1]["tools"], TOOLS)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        asked["messages"] += [
            {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]},
        ]
        self.assertEqual(client.messages.create(**asked).content[0].text, "RESULT RAIN")

    def test_a_call_in_pieces(self):
        with self.client().messages.stream(**user("call the tool", tools=TOOLS)) as stream:
            kinds = {event.type for event in stream}
            (call,) = stream.get_final_message().content
        self.assertIn("input_json", kinds)
        self.assertEqual(call.input, {"city": "Köln"})


class Leaving(WithAnthropic):
    def test_a_timeout_is_one_and_cancels_at_the_engine(self):
        gone = self.engine.gone
        with self.assertRaises(anthropic.APITimeoutError):
            self.client(timeout=anthropic.Timeout(10, read=0.5)).messages.create(**user("wait"))
        self.engine.wait_gone(gone + 1)
        self.settled()

    def test_a_stream_that_is_left_cancels_at_the_engine(self):
        gone = self.engine.gone
        with self.client().messages.create(**user("drip"), stream=True) as stream:
            self.assertEqual(next(iter(stream)).delta.text, "drop ")
        self.engine.wait_gone(gone + 1)
        self.settled()

    def test_a_task_that_is_cancelled_cancels_at_the_engine(self):
        gone, asked = self.engine.gone, len(self.engine.bodies)

        async def ask():
            async with self.asynchronous() as client:
                task = asyncio.create_task(client.messages.create(**user("wait")))
                await asyncio.to_thread(self.engine.wait_asked, asked + 1)
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task

        asyncio.run(ask())
        self.engine.wait_gone(gone + 1)
        self.settled()


class Refusals(WithAnthropic):
    def raised(self, kind, **asked):
        with self.assertRaises(kind) as caught:
            self.client().messages.create(**asked)
        return caught.exception

    def test_the_engines_own_refusals_have_their_classes(self):
        for status, kind, name in [
            (400, anthropic.BadRequestError, "invalid_request_error"),
            (401, anthropic.AuthenticationError, "authentication_error"),
            (403, anthropic.PermissionDeniedError, "permission_error"),
            (404, anthropic.NotFoundError, "not_found_error"),
            (500, anthropic.InternalServerError, "api_error"),
        ]:
            for stream in (False, True):
                error = self.raised(kind, **user(f"status {status}"), stream=stream)
                self.assertEqual((error.status_code, error.body["error"]["type"]), (status, name))
                self.assertIn(f"scripted {status}", error.message)

    def test_an_engine_that_has_too_much_to_do(self):
        error = self.raised(anthropic.RateLimitError, **user("status 429"))
        self.assertEqual(error.status_code, 429)

    def test_the_gateways_refusals_have_their_classes_and_anthropics_form(self):
        for asked, kind, name in [
            (user("hi", model="nobody"), anthropic.NotFoundError, "not_found_error"),
            (user("hi", extra_body={"messages": 3}), anthropic.BadRequestError, "invalid_request_error"),
        ]:
            error = self.raised(kind, **asked)
            self.assertEqual(error.body["type"], "error")
            self.assertEqual(error.body["error"]["type"], name)
            self.assertTrue(error.body["error"]["message"])
            self.assertTrue(error.response.headers["x-request-id"])

    def test_a_full_house_says_when_to_come_again(self):
        narrow = self.narrow_gateway()
        client = Anthropic(base_url=narrow.url, api_key="k", max_retries=0, timeout=60)
        with client.messages.create(**user("drip"), stream=True) as held:
            next(iter(held))
            with self.assertRaises(anthropic.RateLimitError) as caught:
                client.messages.create(**user("hi"))
            self.assertEqual(caught.exception.body["error"]["type"], "rate_limit_error")
            self.assertGreaterEqual(int(caught.exception.response.headers["retry-after"]), 1)
        self.until_free(narrow)
        self.assertEqual(client.with_options(max_retries=5).messages.create(**user("hi")).content[0].text, "HI")

    def test_nobody_is_there(self):
        with self.assertRaises(anthropic.APIConnectionError):
            Anthropic(base_url="http://127.0.0.1:9", api_key="k", max_retries=0).messages.create(**user("hi"))

    def test_a_stream_that_breaks_raises(self):
        with self.assertRaises(anthropic.APIStatusError) as caught:
            list(self.client().messages.create(**user("break"), stream=True))
        self.assertEqual(caught.exception.body["error"]["type"], "api_error")
        self.settled()


if __name__ == "__main__":
    unittest.main()
