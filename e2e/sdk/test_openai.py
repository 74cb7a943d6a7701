"""OpenAI's own Python SDK, unmodified, through the gateway: in front of mock engines, and of one that does as it is told.

    e2e/venv.sh sdk && e2e/.work/sdk/bin/python e2e/sdk/test_openai.py -v
"""

import asyncio
import json
import sys
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import openai
from openai import AsyncOpenAI, OpenAI

from fleet import MOCK, WithFleet
from scripted import MODEL

TOOLS = [{
    "type": "function",
    "function": {
        "name": "get_weather", "description": "Weather", "strict": True,
        "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
            "additionalProperties": False,
        },
    },
}]
FLAT_TOOLS = [{"type": "function", **TOOLS[0]["function"]}]
PARIS = "Größe 你好 🙂 \"quoted\" \\ </s>"


def user(text):
    return [{"role": "user", "content": text}]


class WithOpenAI(WithFleet):
    @classmethod
    def client(cls, **options):
        options = {"max_retries": 0, "timeout": 60, "api_key": "sk-e2e"} | options
        client = OpenAI(base_url=f"{cls.gateway.url}/v1", **options)
        cls.addClassCleanup(client.close)
        return client

    @classmethod
    def asynchronous(cls, **options):
        options = {"max_retries": 0, "timeout": 60, "api_key": "sk-e2e"} | options
        return AsyncOpenAI(base_url=f"{cls.gateway.url}/v1", **options)


class Answers(WithOpenAI):
    def test_a_chat(self):
        answer = self.client().chat.completions.create(model=MOCK, messages=user("hi"), max_completion_tokens=5)
        self.assertEqual(len(answer.choices[0].message.content.split()), 5)
        self.assertEqual(answer.choices[0].finish_reason, "length")
        self.assertEqual(answer.usage.completion_tokens, 5)
        self.assertTrue(answer._request_id, "the gateway gave it one")

    def test_a_chat_asynchronously_many_at_a_time(self):
        async def ask():
            async with self.asynchronous() as client:
                answers = await asyncio.gather(*(
                    client.chat.completions.create(model=MOCK, messages=user(f"number {n}"), max_tokens=4)
                    for n in range(40)
                ))
            return {answer.id for answer in answers}

        self.assertEqual(len(asyncio.run(ask())), 40)

    def test_what_was_said_arrives_byte_for_byte(self):
        answer = self.client().chat.completions.create(model=MODEL, messages=user(PARIS), user="somebody")
        self.assertEqual(answer.choices[0].message.content, PARIS.upper())
        self.assertEqual(self.engine.bodies[-1]["messages"], user(PARIS))

    def test_a_completion_whole_and_streamed(self):
        client, asked = self.client(), {"model": MOCK, "prompt": "once upon a time", "max_tokens": 6}
        whole = client.completions.create(**asked)
        streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))
        self.assertEqual(whole.choices[0].text, streamed)

    def test_embeddings(self):
        answer = self.client().embeddings.create(model=MOCK, input=["a", "b"])
        self.assertEqual([len(row.embedding) for row in answer.data], [16, 16])

    def test_a_response(self):
        answer = self.client().responses.create(model=MOCK, input="hi", max_output_tokens=5)
        self.assertEqual(len(answer.output_text.split()), 5)
        self.assertEqual(answer.usage.output_tokens, 5)

    def test_models(self):
        client = self.client()
        self.assertEqual({model.id for model in client.models.list()}, {MOCK, MODEL})
        self.assertEqual(client.models.retrieve(MOCK).id, MOCK)
        with self.assertRaises(openai.NotFoundError):
            client.models.retrieve("nobody/nothing")

    def test_headers_are_there_to_be_read(self):
        asked = {"model": MODEL, "messages": user("hi"), "extra_headers": {"x-request-id": "e2e-1"}}
        raw = self.client().chat.completions.with_raw_response.create(**asked)
        self.assertEqual(raw.headers["x-request-id"], "e2e-1")
        self.assertEqual(raw.headers["x-router-backend"], self.engine.url)
        self.assertTrue(raw.headers["x-router-reason"])
        self.assertEqual(raw.parse().choices[0].message.content, "HI")


class Streams(WithOpenAI):
    def test_a_stream_says_what_the_whole_says_and_its_usage(self):
        client = self.client()
        asked = {"model": MOCK, "messages": user("tell me more"), "max_tokens": 50}
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        self.assertEqual(said, whole.choices[0].message.content)
        self.assertEqual(chunks[-1].usage.completion_tokens, 50)

    def test_the_same_asynchronously(self):
        async def ask():
            async with self.asynchronous() as client:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=user(PARIS), stream=True, stream_options={"include_usage": True}
                )
                return [chunk async for chunk in stream]

        chunks = asyncio.run(ask())
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        self.assertEqual((said, chunks[-1].usage.total_tokens), (PARIS.upper(), 10))

    def test_the_helper_that_accumulates(self):
        with self.client().chat.completions.stream(model=MODEL, messages=user("a story")) as stream:
            deltas = [event.delta for event in stream if event.type == "content.delta"]
            final = stream.get_final_completion()
        self.assertEqual("".join(deltas), "A STORY")
        self.assertEqual(final.choices[0].message.content, "A STORY")

    def test_a_response_as_events(self):
        with self.client().responses.stream(model=MODEL, input="a story") as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        self.assertEqual(final.output_text, "A STORY")
        self.assertEqual((kinds[0], kinds[-1]), ("response.created", "response.completed"))

    def test_a_response_of_a_mock_engine_as_events(self):
        asked = {"model": MOCK, "input": "hi", "max_output_tokens": 9}
        events = list(self.client().responses.create(**asked, stream=True))
        said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        self.assertEqual(said, self.client().responses.create(**asked).output_text)


class Tools(WithOpenAI):
    def test_a_call_and_what_came_of_it(self):
        client = self.client()
        messages = user("call the tool")
        first = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        (call,) = first.choices[0].message.tool_calls
        self.assertEqual(first.choices[0].finish_reason, "tool_calls")
        self.assertEqual((call.function.name, json.loads(call.function.arguments)), ("get_weather", {"city": "Köln"}))
        self.assertEqual(self.engine.bodies[-1]["tools"], TOOLS)
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        second = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        self.assertEqual(second.choices[0].message.content, "RESULT RAIN")

    def test_a_call_in_pieces(self):
        asked = {"model": MODEL, "messages": user("call the tool"), "tools": TOOLS}
        with self.client().chat.completions.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            (call,) = stream.get_final_completion().choices[0].message.tool_calls
        self.assertIn("tool_calls.function.arguments.delta", kinds)
        self.assertEqual(json.loads(call.function.arguments), {"city": "Köln"})

    def test_a_call_in_a_response_whole_and_as_events(self):
        client = self.client()
        asked = {"model": MODEL, "input": user("call the tool"), "tools": FLAT_TOOLS}
        whole = client.responses.create(**asked).output[0]
        with client.responses.stream(**asked) as stream:
            stream.until_done()
            streamed = stream.get_final_response().output[0]
        for call in (whole, streamed):
            self.assertEqual((call.type, json.loads(call.arguments)), ("function_call", {"city": "Köln"}))
        answer = client.responses.create(model=MODEL, input=[
            {"type": "function_call_output", "call_id": whole.call_id, "output": "rain"},
        ])
        self.assertEqual(answer.output_text, "RESULT RAIN")

    def test_what_is_asked_of_the_form_reaches_the_engine(self):
        schema = {"name": "city", "schema": TOOLS[0]["function"]["parameters"], "strict": True}
        form = {"type": "json_schema", "json_schema": schema}
        self.client().chat.completions.create(
            model=MODEL, messages=user("hi"), response_format=form, extra_body={"top_k": 7}
        )
        self.assertEqual(self.engine.bodies[-1]["response_format"], form)
        self.assertEqual(self.engine.bodies[-1]["top_k"], 7)


class Leaving(WithOpenAI):
    def test_a_timeout_is_one_and_cancels_at_the_engine(self):
        gone = self.engine.gone
        with self.assertRaises(openai.APITimeoutError):
            self.client(timeout=openai.Timeout(10, read=0.5)).chat.completions.create(
                model=MODEL, messages=user("wait")
            )
        self.engine.wait_gone(gone + 1)
        self.settled()

    def test_a_timeout_asynchronously(self):
        gone = self.engine.gone

        async def ask():
            async with self.asynchronous() as client:
                await client.with_options(timeout=0.5).chat.completions.create(model=MODEL, messages=user("wait"))

        with self.assertRaises(openai.APITimeoutError):
            asyncio.run(ask())
        self.engine.wait_gone(gone + 1)
        self.settled()

    def test_a_stream_that_is_closed_cancels_at_the_engine(self):
        gone = self.engine.gone
        with self.client().chat.completions.create(model=MODEL, messages=user("drip"), stream=True) as stream:
            for _, chunk in zip(range(3), stream):
                self.assertEqual(chunk.choices[0].delta.content, "drop ")
        self.engine.wait_gone(gone + 1)
        self.settled()

    def test_a_task_that_is_cancelled_cancels_at_the_engine(self):
        gone, asked = self.engine.gone, len(self.engine.bodies)

        async def ask():
            async with self.asynchronous() as client:
                task = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=user("wait")))
                await asyncio.to_thread(self.engine.wait_asked, asked + 1)
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task

        asyncio.run(ask())
        self.engine.wait_gone(gone + 1)
        self.settled()

    def test_a_stream_that_is_left_asynchronously_cancels_at_the_engine(self):
        gone = self.engine.gone

        async def ask():
            async with self.asynchronous() as client:
                stream = await client.responses.create(model=MODEL, input="drip", stream=True)
                async with stream:
                    async for event in stream:
                        return event.delta

        self.assertEqual(asyncio.run(ask()), "drop ")
        self.engine.wait_gone(gone + 1)
        self.settled()


class Refusals(WithOpenAI):
    def raised(self, kind, **asked):
        with self.assertRaises(kind) as caught:
            self.client().chat.completions.create(**({"model": MODEL, "messages": user("hi")} | asked))
        return caught.exception

    def test_the_engines_own_refusals_have_their_classes(self):
        for status, kind in [
            (400, openai.BadRequestError), (401, openai.AuthenticationError), (403, openai.PermissionDeniedError),
            (404, openai.NotFoundError), (409, openai.ConflictError), (422, openai.UnprocessableEntityError),
            (500, openai.InternalServerError),
        ]:
            for stream in (False, True):
                error = self.raised(kind, messages=user(f"status {status}"), stream=stream)
                self.assertEqual((error.status_code, error.code, error.type), (status, str(status), "scripted"))
                self.assertIn(f"scripted {status}", error.message)
                self.assertTrue(error.request_id)

    def test_an_engine_that_has_too_much_to_do(self):
        error = self.raised(openai.RateLimitError, messages=user("status 429"))
        self.assertEqual(error.status_code, 429)

    def test_the_gateways_refusals_have_their_classes_and_codes(self):
        error = self.raised(openai.NotFoundError, model="nobody")
        self.assertEqual((error.code, error.type), ("model_not_found", "invalid_request_error"))
        error = self.raised(openai.BadRequestError, extra_body={"messages": 3})
        self.assertEqual((error.code, error.type), ("invalid_body", "invalid_request_error"))
        with self.assertRaises(openai.NotFoundError):
            self.client().responses.create(model="nobody", input="hi")
        with self.assertRaises(openai.NotFoundError):
            self.client().embeddings.create(model="nobody", input="hi")

    def test_nobody_is_there(self):
        with self.assertRaises(openai.APIConnectionError):
            OpenAI(base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=0).models.list()

    def test_a_full_house_says_when_to_come_again_and_the_sdk_comes_again(self):
        narrow = self.narrow_gateway()
        client = OpenAI(base_url=f"{narrow.url}/v1", api_key="k", max_retries=0, timeout=60)
        with client.chat.completions.create(model=MODEL, messages=user("drip"), stream=True) as held:
            next(iter(held))
            with self.assertRaises(openai.RateLimitError) as caught:
                client.chat.completions.create(model=MODEL, messages=user("hi"))
            self.assertEqual(caught.exception.code, "queue_full")
            self.assertGreaterEqual(int(caught.exception.response.headers["retry-after"]), 1)
            refused = narrow.samples("kvlane_requests_total")
            patient = client.with_options(max_retries=1)
            with self.assertRaises(openai.RateLimitError):
                patient.chat.completions.create(model=MODEL, messages=user("hi"))
            again = narrow.samples("kvlane_requests_total")
            self.assertEqual(sum(again.values()) - sum(refused.values()), 2, "it came again")
        self.until_free(narrow)
        answer = client.with_options(max_retries=5).chat.completions.create(model=MODEL, messages=user("hi"))
        self.assertEqual(answer.choices[0].message.content, "HI")

    def test_a_chat_that_breaks_raises_and_a_response_ends_in_an_error_event(self):
        with self.assertRaises(openai.APIError) as caught:
            list(self.client().chat.completions.create(model=MODEL, messages=user("break"), stream=True))
        self.assertEqual((caught.exception.type, caught.exception.code), ("api_error", "stream_broken"))
        # As OpenAI's own: the SDK hands errors of responses over as events.
        last = list(self.client().responses.create(model=MODEL, input="break", stream=True))[-1]
        self.assertEqual((last.type, last.code), ("error", "stream_broken"))
        self.settled()


if __name__ == "__main__":
    unittest.main()
