"""Requests whose cached share is known twice: what the gateway predicted, and what the engine says."""

import random
import threading
import unittest

from engines import MODEL, request

WORDS = "able back cold deep east fast good high idle just kind late many near open past quick rare slow true".split()


class Asked:
    """One answer beside the decision that placed it."""

    def __init__(self, answer, decision):
        self.asked_by = None
        self.answer, self.decision, self.usage = answer, decision, answer.json()["usage"]
        self.worker, self.overlap, self.knowledge = (decision[key] for key in ("worker", "overlap_tokens", "knowledge"))
        (picked,) = (row for row in decision["candidates"] if row["worker"] == self.worker)
        self.predicted = picked["predicted"]["exact"]
        # Of these the tokens that its server holds below the GPU alone.
        self.lower = picked["lower_tokens"]
        self.cached = cached(self.usage)

    def is_right(self):
        return self.predicted == self.cached

    def __repr__(self):
        return (
            f"<predicted {self.predicted}, cached {self.cached} of {self.usage.get('prompt_tokens')} "
            f"(counted {self.decision['prompt_tokens']}) at {self.worker}, {self.knowledge}, {self.decision['feed']}>"
        )


def cached(usage):
    """Leading prompt tokens that the engine found in its cache. Engines leave out what is nothing."""
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def asked(gateway, path, body):
    """Sends one request while nothing else is sent, so that the last decision is its own."""
    answer = gateway.ask(path, body)
    if answer.status != 200:
        raise AssertionError(f"{answer.status}: {answer.body[:500]}")
    (decision,) = gateway.decisions()
    return Asked(answer, decision)


def text(topic, words):
    """Prose without repeats that differs from topic to topic from its first word on."""
    return " ".join(f"{topic}{number}" for number in range(words))


class Conversation:
    """A chat of which every turn repeats all that was said before, the answers included, and adds to it."""

    def __init__(self, name, first_words=200, turn_words=40, answer_tokens=24, **more):
        self.random = random.Random(name)
        self.turn_words, self.answer_tokens, self.more = turn_words, answer_tokens, more
        self.messages = [{"role": "system", "content": f"You are {name}. {self.words(first_words)}"}]

    def words(self, count):
        return " ".join(self.random.choices(WORDS, k=count))

    def body(self):
        """The next turn's request."""
        self.messages.append({"role": "user", "content": self.words(self.turn_words)})
        return {
            "model": MODEL, "messages": list(self.messages), "max_tokens": self.answer_tokens, "temperature": 0,
            "ignore_eos": True,
        } | self.more

    def hear(self, answer):
        content = answer.json()["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": content})

    def turn(self, gateway):
        one = asked(gateway, "/v1/chat/completions", self.body())
        self.hear(one.answer)
        one.asked_by = self
        return one


def one_by_one(gateway, conversations, turns, seed=0):
    """All turns of all conversations, shuffled, each request after the answer to the one before."""
    order = [conversation for conversation in conversations for _ in range(turns)]
    random.Random(seed).shuffle(order)
    return [conversation.turn(gateway) for conversation in order]


def at_once(gateway, conversations, turns, clients):
    """All turns of all conversations, `clients` at a time. The workers that answered, per conversation."""
    left, lock, workers, failures = list(conversations), threading.Lock(), {}, []

    def client():
        while True:
            with lock:
                if not left:
                    return
                conversation = left.pop()
            for _ in range(turns):
                answer = request(gateway.port, "/v1/chat/completions", conversation.body(), timeout_s=600)
                if answer.status != 200:
                    failures.append((answer.status, answer.body))
                    return
                conversation.hear(answer)
                workers.setdefault(conversation, []).append(answer.headers["x-router-backend"])

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise AssertionError(failures)
    return workers


class Predicting(unittest.TestCase):
    """Tests of what was predicted."""

    def check_right(self, answers, right_min=1.0):
        """At least this share of them to the block."""
        wrong = [one for one in answers if not one.is_right()]
        self.assertLessEqual(len(wrong), (1 - right_min) * len(answers), wrong)

    @staticmethod
    def report(name, answers):
        wrong = [one for one in answers if not one.is_right()]
        right = len(answers) - len(wrong)
        reused = sum(one.cached for one in answers) / sum(one.usage["prompt_tokens"] for one in answers)
        print(f"\n{name}: {right} of {len(answers)} predictions right to the block, {reused:.1%} of prompt tokens cached")
        for one in wrong:
            print(one)
