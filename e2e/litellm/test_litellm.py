"""LiteLLM's library, unmodified, through the gateway, in front of real vLLM servers: one generates, and one embeds.

    e2e/vllm/setup.sh && e2e/venv.sh litellm && e2e/.work/litellm/bin/python e2e/litellm/test_litellm.py -v
"""

import asyncio
import os
import sys
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "vllm")]

# Otherwise it fetches a list of prices when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from engines import MODEL, Gateway, start
from fleet import Vllm

EMBEDS = "embeds"
# Otherwise it advertises itself beside each error.
litellm.suppress_debug_info = True
USER = [{"role": "user", "content": "the river and the road"}]
TOOLS = [{
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}]


class Generates(Vllm):
    context_tokens = 4096

    def options(self):
        return ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]

    def environment(self):
        return {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}


class Embeds(Vllm):
    """One whose answers are vectors; vLLM ranks documents by them, too."""

    context_tokens = 4096

    def options(self):
        # The last of an option counts.
        return ["--served-model-name", EMBEDS, "--runner", "pooling", "--convert", "embed"]


class ThroughTheGateway(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        engines = [Generates(0), Embeds(1)]
        for engine in engines:
            cls.addClassCleanup(engine.stop)
        start(engines)
        cls.gateway = Gateway(engines, "fleet_cost", name="kvlane-litellm")
        cls.addClassCleanup(cls.gateway.stop)
        cls.openai = {"api_base": f"{cls.gateway.url}/v1", "api_key": "none", "num_retries": 0}
        cls.anthropic = {"api_base": cls.gateway.url, "api_key": "none", "num_retries": 0}

    def answered(self):
        """Answers that the gateway has counted."""
        return sum(self.gateway.samples("kvlane_requests_total").values())

    def test_a_chat_of_either_provider(self):
        for provider in ("openai", "hosted_vllm"):
            with self.subTest(provider=provider):
                answer = litellm.completion(f"{provider}/{MODEL}", USER, max_tokens=6, **self.openai)
                self.assertEqual((answer.usage.completion_tokens, answer.choices[0].finish_reason), (6, "length"))
                self.assertTrue(answer.choices[0].message.content)

    def test_a_streamed_chat_says_what_the_whole_says(self):
        asked = {"max_tokens": 12, "temperature": 0} | self.openai
        whole = litellm.completion(f"openai/{MODEL}", USER, **asked)
        chunks = list(litellm.completion(
            f"openai/{MODEL}", USER, stream=True, stream_options={"include_usage": True}, **asked
        ))
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        self.assertEqual(said, whole.choices[0].message.content)
        self.assertEqual([chunk.usage for chunk in chunks if getattr(chunk, "usage", None)][-1].completion_tokens, 12)

    def test_chats_asynchronously_many_at_a_time(self):
        async def ask():
            return await asyncio.gather(*(
                litellm.acompletion(
                    f"openai/{MODEL}", [{"role": "user", "content": f"number {n}"}], max_tokens=2, **self.openai
                )
                for n in range(16)
            ))

        self.assertEqual(len({answer.id for answer in asyncio.run(ask())}), 16)

    def test_a_chat_with_tools(self):
        answer = litellm.completion(f"openai/{MODEL}", USER, tools=TOOLS, max_tokens=4, **self.openai)
        self.assertEqual(answer.usage.completion_tokens, 4)

    def test_a_completion_whole_and_streamed(self):
        asked = {"prompt": "the river", "max_tokens": 6, "temperature": 0} | self.openai
        for provider in ("text-completion-openai", "hosted_vllm"):
            with self.subTest(provider=provider):
                whole = litellm.text_completion(model=f"{provider}/{MODEL}", **asked)
                chunks = litellm.text_completion(model=f"{provider}/{MODEL}", stream=True, **asked)
                said = "".join(chunk.choices[0].text or "" for chunk in chunks if chunk.choices)
                self.assertEqual((said, whole.usage.completion_tokens), (whole.choices[0].text, 6))

    def test_embeddings(self):
        for provider in ("openai", "hosted_vllm"):
            answer = litellm.embedding(f"{provider}/{EMBEDS}", input=["the river", "the road"], **self.openai)
            self.assertEqual([row["index"] for row in answer.data], [0, 1])

    def test_documents_are_ranked(self):
        documents = ["the road", "the river bank", "the river"]
        answer = litellm.rerank(f"hosted_vllm/{EMBEDS}", query="the river", documents=documents, **self.openai)
        self.assertEqual(sorted(row["index"] for row in answer.results), [0, 1, 2])
        self.assertEqual(answer.results[0]["index"], 2, "the same text is nearest")

    def test_responses_whole_streamed_and_continued(self):
        asked = {"max_output_tokens": 16} | self.openai
        whole = litellm.responses(model=f"openai/{MODEL}", input="the river", temperature=0, **asked)
        self.assertEqual(whole.usage.output_tokens, 16)
        kinds = [event.type for event in litellm.responses(model=f"openai/{MODEL}", input="the river", stream=True, **asked)]
        self.assertEqual((kinds[0], kinds[-1]), ("response.created", "response.completed"))
        more = litellm.responses(model=f"openai/{MODEL}", input="go on", previous_response_id=whole.id, **asked)
        self.assertGreater(more.usage.input_tokens, whole.usage.input_tokens, "it knows what was said")

    def test_messages_of_anthropic(self):
        asked = {"max_tokens": 8, "temperature": 0} | self.anthropic
        whole = litellm.completion(f"anthropic/{MODEL}", USER, **asked)
        self.assertEqual((whole.usage.completion_tokens, whole.choices[0].finish_reason), (8, "length"))
        chunks = litellm.completion(f"anthropic/{MODEL}", USER, stream=True, **asked)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        self.assertEqual(said, whole.choices[0].message.content)

    def test_messages_as_anthropic_writes_them(self):
        answer = asyncio.run(litellm.anthropic_messages(
            model=f"anthropic/{MODEL}", messages=USER, max_tokens=8, **self.anthropic
        ))
        self.assertEqual((answer["type"], answer["usage"]["output_tokens"]), ("message", 8))

    def test_errors_have_their_classes(self):
        with self.assertRaises(litellm.NotFoundError):
            litellm.completion("openai/unknown", USER, **self.openai)
        with self.assertRaises(litellm.BadRequestError):
            litellm.completion(f"openai/{MODEL}", USER, max_tokens=10**6, **self.openai)

    def test_it_all_passes_the_gateway(self):
        before = self.answered()
        litellm.completion(f"openai/{MODEL}", USER, max_tokens=1, **self.openai)
        self.assertEqual(self.answered(), before + 1)


if __name__ == "__main__":
    unittest.main()
