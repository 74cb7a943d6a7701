"""Prompts with images, in front of two real vLLM servers with a vision model that publish their KV events.

    e2e/vllm/setup.sh && e2e/.work/venv/bin/python e2e/vllm/test_images.py -v
"""

import base64
import io
import random
import sys
import time
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conversations import Predicting, asked
from engines import MODEL, Gateway, start
from fleet import BLOCK_TOKENS, Publishing
from PIL import Image

RIGHT_MIN = 0.99
SIZES = [(112, 84), (200, 150), (224, 224), (320, 100)]


class Seeing(Publishing):
    """One with a vision model and a cache in which all images have room."""

    CACHE_BLOCKS = 2000
    context_tokens = 4096
    weights = "model-vision"

    def options(self):
        options = super().options()
        return options[: options.index("--enable-lora")]


def picture(seed, size, mode="RGB", kind="PNG"):
    """A data URL of noise."""
    noise = random.Random(f"{seed}").randbytes(3 * size[0] * size[1])
    file = io.BytesIO()
    Image.frombytes("RGB", size, noise).convert(mode).save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def part(url, **more):
    return {"type": "image_url", "image_url": {"url": url}} | more


class OnRealEngines(Predicting):
    @classmethod
    def setUpClass(cls):
        cls.servers = [Seeing(number) for number in range(2)]
        for server in cls.servers:
            cls.addClassCleanup(server.stop)
        start(cls.servers)
        cls.gateway = Gateway(cls.servers, "fleet_cost", name="kvlane-images")
        cls.addClassCleanup(cls.gateway.stop)
        cls.gateway.wait_exact()

    def ask(self, content, path="/v1/chat/completions", **more):
        messages = content if isinstance(content[0], dict) and "role" in content[0] else [{"role": "user", "content": content}]
        return asked(self.gateway, path, {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0} | more)

    def check_counted(self, one):
        self.assertEqual(one.decision["prompt_tokens"], one.usage["prompt_tokens"], one)

    def test_a_repeated_image_is_found_whatever_its_file(self):
        for kind, modes in {"PNG": "RGB RGBA L P", "JPEG": "RGB L", "WEBP": "RGB RGBA", "GIF": "P"}.items():
            for mode in modes.split():
                with self.subTest(kind=kind, mode=mode):
                    content = [part(picture((kind, mode), (224, 168), mode, kind)), {"type": "text", "text": f"{kind} {mode}"}]
                    one, two = self.ask(content), self.ask(content)
                    self.check_counted(one)
                    whole = (two.usage["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                    self.assertEqual((two.predicted, two.cached, two.worker), (whole, whole, one.worker), two)

    def test_conversations_with_images_are_predicted_to_the_block(self):
        answers, chance = [], random.Random(0)
        for number in range(12):
            messages = []
            for turn in range(5):
                content = [{"type": "text", "text": f"Conversation {number}, turn {turn}. " + "What is to be seen? " * 20}]
                for image in range(chance.randrange(3)):
                    content.insert(chance.randrange(2), part(picture((number, turn, image), chance.choice(SIZES))))
                messages.append({"role": "user", "content": content})
                one = self.ask(messages)
                self.check_counted(one)
                answers.append(one)
                messages.append({"role": "assistant", "content": one.answer.json()["choices"][0]["message"]["content"]})
        self.report("with images", answers)
        self.check_right(answers, RIGHT_MIN)
        self.assertGreater(sum(one.cached > 0 for one in answers), len(answers) // 2)

    def test_two_images_of_one_size_are_told_apart(self):
        text = {"type": "text", "text": "the same words before it"}
        one = self.ask([text, part(picture("one", (224, 224)))])
        other = self.ask([text, part(picture("other", (224, 224)))])
        self.check_counted(other)
        self.assertEqual(other.predicted, other.cached, other)
        self.assertLess(other.cached, BLOCK_TOKENS, other)
        again = self.ask([text, part(picture("one", (224, 224)))])
        self.assertEqual((again.predicted, again.worker), (again.cached, one.worker), again)
        self.assertGreaterEqual(again.cached, 2 * BLOCK_TOKENS, again)

    def test_a_clients_own_name_of_an_image_is_the_engines(self):
        content = [part(picture("named", (224, 224)), uuid="mine"), {"type": "text", "text": "named"}]
        self.ask(content)
        two = self.ask(content)
        self.assertEqual(two.predicted, two.cached, two)
        self.assertGreaterEqual(two.cached, 2 * BLOCK_TOKENS, two)

    def test_an_image_and_a_salt_are_both_part_of_a_block(self):
        content = [part(picture("salted", (224, 224))), {"type": "text", "text": "salted"}]
        self.ask(content, cache_salt="mine")
        two, other = self.ask(content, cache_salt="mine"), self.ask(content, cache_salt="theirs")
        self.assertGreaterEqual(two.cached, 2 * BLOCK_TOKENS, two)
        self.assertEqual([two.predicted, other.predicted], [two.cached, 0], (two, other))

    def test_anthropics_images_are_counted_too(self):
        def body(text):
            data = picture("anthropic", (200, 150)).split(",")[1]
            source = {"type": "base64", "media_type": "image/png", "data": data}
            shot = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": source}]}
            use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
            return [
                {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": text}]},
                {"role": "assistant", "content": [{"type": "text", "text": "look"}, use]},
                {"role": "user", "content": [shot]},
            ]

        one, two = (self.ask(body("what is it"), "/v1/messages") for _ in range(2))
        keys = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        total = sum(one.usage.get(key) or 0 for key in keys)
        self.assertEqual(one.decision["prompt_tokens"], total, one)
        whole = (total - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        self.assertEqual(two.predicted, whole, two)

    def test_what_a_new_size_costs(self):
        """An engine prepares the first image of a size twice; printed, not judged."""
        for number in range(5):
            size = (532, 28 * (10 + number))
            for what in ("new", "known"):
                content = [part(picture((what, number), size))]
                began = time.monotonic()
                self.ask(content)
                print(f"\n{size}, a {what} size: {(time.monotonic() - began) * 1e3:.0f} ms")


if __name__ == "__main__":
    unittest.main()
