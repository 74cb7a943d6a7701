"""The catalogue of models, the engines' APIs, and adapters that kvlane has them load, in front of real vLLM servers: two
generate, of which one has adapters, and one embeds.

    e2e/vllm/setup.sh && e2e/.work/venv/bin/python e2e/models/test_models.py -v
"""

import json
import sys
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "vllm")]

import anthropic
import openai
import rows
from engines import WORK, Gateway, request, start, until
from fleet import Vllm

LARGE, SMALL, EMBEDS = "large", "small", "embeds"
ADAPTERS = ["sql", "law"]
CATALOGUE = {
    "chat": {
        "targets": [
            {"model": LARGE, "weight": 1},
            {"model": SMALL, "weight": 0, "headers": {"x-canary": "yes"}},
        ],
        "fallbacks": [{"model": SMALL}],
    },
    "both": {"targets": [{"model": LARGE, "weight": 1}, {"model": SMALL, "weight": 1}]},
    "query": {"targets": [{"model": ADAPTERS[0]}]},
    "vectors": {"targets": [{"model": EMBEDS}]},
}


class Named(Vllm):
    """One that serves the model under another name."""

    context_tokens = 4096

    def __init__(self, number, name, more=(), port=None):
        self.serves, self.more = name, list(more)
        super().__init__(number, port)

    def options(self):
        # The last of an option counts.
        return ["--served-model-name", self.serves, *self.more]

    def environment(self):
        return {"VLLM_ENABLE_RESPONSES_API_STORE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}

    def restarted(self):
        return type(self)(self.number, self.serves, self.more, self.port)


def with_adapters():
    modules = [f"{name}={WORK / 'model-lora'}" for name in ADAPTERS]
    return ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", *modules]


class OnRealEngines(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.large = Named(0, LARGE, with_adapters())
        cls.small = Named(1, SMALL)
        cls.embeds = Named(2, EMBEDS, ["--runner", "pooling", "--convert", "embed"])
        cls.engines = [cls.large, cls.small, cls.embeds]
        for engine in cls.engines:
            cls.addClassCleanup(engine.stop)
        start(cls.engines)
        config = WORK / "catalogue.yaml"
        config.write_text(json.dumps({"models": CATALOGUE}))
        cls.gateway = Gateway(cls.engines, "fleet_cost", "--config", str(config), name="kvlane-models")
        cls.addClassCleanup(cls.gateway.stop)
        cls.openai = openai.OpenAI(base_url=f"{cls.gateway.url}/v1", api_key="none", max_retries=0)
        cls.anthropic = anthropic.Anthropic(base_url=cls.gateway.url, api_key="none", max_retries=0)

    def ask(self, model, text="the river", **more):
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        return self.gateway.ask("/v1/chat/completions", body, **more)

    def test_every_row_of_vllm(self):
        taken = {}
        for engine in (self.large, self.embeds):
            with self.subTest(engine=engine.serves):
                taken[engine.serves] = rows.check(self, "vLLM", engine.port, self.gateway, engine.serves)
        print({name: f"{took} of {count} taken" for name, (count, took) in taken.items()}, flush=True)
        self.assertGreater(taken[LARGE][1], 10)
        self.assertGreater(taken[EMBEDS][1], 3)

    def test_names_of_the_catalogue(self):
        answer = self.ask("chat")
        self.assertEqual((answer.status, answer.json()["model"], answer.headers["x-router-model"]), (200, "chat", LARGE))
        self.assertEqual(self.ask("chat", headers={"x-canary": "yes"}).headers["x-router-model"], SMALL)
        answer = self.ask("query")
        self.assertEqual((answer.json()["model"], answer.headers["x-router-model"]), ("query", ADAPTERS[0]))
        ids = {model.id for model in self.openai.models.list()}
        self.assertEqual(ids, {LARGE, SMALL, EMBEDS, *ADAPTERS, *CATALOGUE})
        events = list(self.openai.chat.completions.create(
            model="chat", messages=[{"role": "user", "content": "the road"}], max_tokens=4, stream=True
        ))
        self.assertEqual({event.model for event in events}, {"chat"})
        message = self.anthropic.messages.create(
            model="chat", max_tokens=4, messages=[{"role": "user", "content": "the road"}]
        )
        self.assertEqual(message.model, "chat")

    def test_turns_keep_their_target(self):
        served = set()
        for conversation in range(12):
            messages, first = [], None
            for turn in range(3):
                messages.append({"role": "user", "content": f"{conversation} of {turn}"})
                body = {"model": "both", "messages": messages, "max_tokens": 2}
                answer = self.gateway.ask("/v1/chat/completions", body)
                first = first or answer.headers["x-router-model"]
                self.assertEqual(answer.headers["x-router-model"], first, conversation)
                messages.append(answer.json()["choices"][0]["message"] | {"content": "yes"})
            served.add(first)
        self.assertEqual(served, {LARGE, SMALL})

    def test_embeddings_and_scores(self):
        embedded = self.openai.embeddings.create(model="vectors", input=["the river", "the road"])
        self.assertEqual((embedded.model, len(embedded.data)), ("vectors", 2))
        answer = self.gateway.ask("/v1/embeddings", {"input": "the river"}, headers={"x-kvlane-model": EMBEDS})
        self.assertEqual(answer.json()["model"], EMBEDS)
        answer = self.gateway.ask("/v1/embeddings", {"input": "the river"})
        self.assertEqual(answer.status, 400)
        self.assertIn("name one of", answer.json()["error"]["message"])

    def test_stored_responses(self):
        last, models = {}, {}
        for conversation in range(6):
            for _ in range(3):
                made = self.openai.responses.create(
                    model="both", input=f"conversation {conversation}", max_output_tokens=16,
                    previous_response_id=last.get(conversation),
                )
                self.assertEqual((made.model, made.previous_response_id), ("both", last.get(conversation)))
                last[conversation] = made.id
            self.assertEqual(self.openai.responses.retrieve(made.id).id, made.id)
            models[conversation] = made.id
        with self.assertRaises(openai.NotFoundError) as refused:
            self.openai.responses.create(model="both", input="more", previous_response_id="resp_of_nobody")
        self.assertEqual(refused.exception.code, "object_not_found")

    def adapters_at(self, engine):
        """What it lists beside its model."""
        return {card["id"] for card in request(engine.port, "/v1/models").json()["data"] if card["parent"]}

    def test_adapters_are_loaded_where_the_configuration_asks_and_for_requests(self):
        named = {
            name: {"path": str(WORK / "model-lora"), "model": LARGE, "copies": copies}
            for name, copies in [("kept", 1), ("one", 0), ("two", 0)]
        }
        # vLLM reports its slots once it has had a request.
        body = {"model": LARGE, "prompt": "the river", "max_tokens": 2}
        self.assertEqual(request(self.large.port, "/v1/completions", body).status, 200)
        config = WORK / "adapters.yaml"
        config.write_text(json.dumps({"adapters": {"names": named}}))
        gateway = Gateway(self.engines, "fleet_cost", "--config", str(config), name="kvlane-loads")
        self.addCleanup(gateway.stop)
        self.addCleanup(lambda: [
            request(self.large.port, "/v1/unload_lora_adapter", {"lora_name": name}) for name in named
        ])
        until("the one with a copy is loaded", lambda: "kept" in self.adapters_at(self.large))
        self.assertEqual(self.adapters_at(self.large), {*ADAPTERS, "kept"})
        for name in ("kept", "one", "two", "one", "kept"):
            answer = gateway.ask("/v1/completions", body | {"model": name}, timeout_s=120)
            self.assertEqual((answer.status, answer.json().get("model")), (200, name), answer.body)
            self.assertLessEqual({name, "kept"}, self.adapters_at(self.large))
        # Two slots: each of the others was unloaded for the other one.
        self.assertEqual(self.adapters_at(self.large), {*ADAPTERS, "kept", "one"})
        changes = {
            dict(labels)["outcome"]: count for labels, count in gateway.samples("kvlane_adapter_changes_total").items()
        }
        self.assertEqual(changes, {"loaded": 4.0, "unloaded": 2.0})
        self.assertEqual(gateway.ask("/v1/completions", {"model": "unknown", "prompt": "a"}).status, 404)

    def test_z_a_fallback_answers_when_the_engine_is_dead_and_what_it_kept_is_lost(self):
        made = self.openai.responses.create(model=LARGE, input="keep this", max_output_tokens=16)
        self.large.kill()
        answer = until("the fallback answers", lambda: (a := self.ask("chat")).status == 200 and a)
        self.assertEqual(answer.headers["x-router-model"], SMALL)
        self.assertEqual(answer.json()["model"], "chat")
        self.assertIn(answer.headers["x-router-fallback"], ("failed", "no_endpoint"))
        again = self.large.restarted()
        self.addCleanup(again.stop)
        again.wait_ready()
        until("it serves again", lambda: self.ask(LARGE).status == 200, 60)
        with self.assertRaises(openai.NotFoundError) as lost:
            self.openai.responses.create(model=LARGE, input="more", previous_response_id=made.id)
        self.assertEqual(lost.exception.code, "object_lost")


if __name__ == "__main__":
    unittest.main()
