"""Two real vLLM servers behind the gateway, one of which dies the ways that real engines die, under 24 requests.

    e2e/vllm/setup.sh && e2e/.work/venv/bin/python e2e/deaths/test_deaths.py

Each run measures an undisturbed round of requests and then a round in which one server dies after 1.5 s, and judges
each client of the second round:

  failed    had no content and saw a failure: a status that is not 200, an error event, a broken connection
  late      waited longer than twice the slowest usual answer of its kind (streamed or whole) plus 5 s
  broken    a stream with content that neither ended whole nor, where continuation is off, in an error event

E2E_RUNS=10 runs each death ten times; E2E_WORDS=600 sends shorter prompts, so that a run takes minutes less; E2E_DEATHS and E2E_MODES choose (comma-separated names of the tables below).
"""

import os
import signal
import sys
import time

# First, since it says where the others are.
from servers import DyingVllm

from clients import Client, is_error
from engines import Gateway, start
from record import body, words

RUNS = int(os.environ.get("E2E_RUNS", "1"))
REQUESTS, PROMPT_WORDS, ANSWER_TOKENS = 24, int(os.environ.get("E2E_WORDS", "2500")), 64
DEATH_AFTER_S = 1.5
# How much longer than allowed a client is looked at, to tell late from never.
PATIENCE_S = 20
APIS = ("/v1/chat/completions", "/v1/completions")

DEATHS = {
    "core_killed": lambda server: os.kill(server.core(), signal.SIGKILL),
    "core_stopped": lambda server: os.kill(server.core(), signal.SIGSTOP),
    "terminated": lambda server: os.kill(server.api_server(), signal.SIGTERM),
}
MODES = {"default": (), "continuation": ("--set", "continuation.enabled=true")}


class Asked(Client):
    """One of the round's clients."""

    def __init__(self, port, number):
        # Half of them streamed, in either API; no two prompts begin alike.
        prompt = f"{time.monotonic_ns()} {number} {words('w', PROMPT_WORDS)}"
        request = body(APIS[number // 2 % 2], prompt, ANSWER_TOKENS, number % 2 == 0)
        super().__init__(str(number), port, APIS[number // 2 % 2], request)
        self.whole_at = None

    def kind(self):
        return "streamed" if self.streamed else "whole"

    def waited(self):
        """Seconds to the end of the answer, or until now."""
        last = self.answer.pieces[-1][0] if self.answer.pieces else self.end_at
        return (last if self.is_over() else time.monotonic()) - self.began_at

    def run(self):
        self.began_at = time.monotonic()
        super().run()

    def ended_well(self):
        """A whole answer: framing complete, status 200, a stream with its [DONE] and without an error."""
        if self.answer.status() != 200 or not self.answer.body()[1]:
            return False
        if not self.streamed:
            return True
        events = [event for _, event in self.answer.events()]
        return events[-1:] == ["data: [DONE]"] and not any(map(is_error, events))

    def verdict(self, limit_s, continued):
        """None, or what is wrong with how the request went; and what its client saw, in short."""
        if not self.is_over():
            return "late", "nothing" if not self.answer.head() else f"{self.content_events()} events, then nothing"
        if self.ended_well():
            return ("late", "whole") if self.waited() > limit_s else (None, "whole")
        content = self.content_events() if self.streamed and self.answer.is_event_stream() else 0
        errors = [event for _, event in self.answer.events() if is_error(event)] if self.answer.head() else []
        if self.answer.status() not in (None, 200):
            seen = f"status {self.answer.status()}"
        else:
            seen = "error event" if errors else f"connection: {self.end}"
        if not content:
            return "failed", seen
        if continued or not errors:
            return "broken", f"{content} events, then {seen}"
        return (None if self.waited() <= limit_s else "late"), f"content, then {seen}"


def round_of(port, after_s=None, cause=None, until_s=600):
    """Sends the requests at once; `cause` happens after `after_s`."""
    clients = [Asked(port, number) for number in range(REQUESTS)]
    began = time.monotonic()
    for client in clients:
        client.start()
    if cause:
        time.sleep(max(0, began + after_s - time.monotonic()))
        cause()
    while time.monotonic() < began + until_s and not all(client.is_over() for client in clients):
        time.sleep(0.1)
    return clients


def slowest(clients):
    return {kind: max(c.waited() for c in clients if c.kind() == kind) for kind in ("streamed", "whole")}


def one_run(servers, mode, death):
    """The verdicts of one run, and its limits."""
    gateway = Gateway(servers, "fleet_cost", *MODES[mode])
    try:
        usual = round_of(gateway.port)
        bad = [c.name for c in usual if not c.ended_well()]
        assert not bad, f"undisturbed, and yet these did not end well: {bad}"
        limits = {kind: 2 * seconds + 5 for kind, seconds in slowest(usual).items()}
        clients = round_of(
            gateway.port, DEATH_AFTER_S, lambda: DEATHS[death](servers[0]), max(limits.values()) + PATIENCE_S
        )
        verdicts = [(*client.verdict(limits[client.kind()], mode == "continuation"), client) for client in clients]
        for client in [*usual, *clients]:
            client.stop.set()
        return verdicts, limits
    finally:
        gateway.kill()


def row(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def main():
    deaths = os.environ.get("E2E_DEATHS", ",".join(DEATHS)).split(",")
    modes = os.environ.get("E2E_MODES", ",".join(MODES)).split(",")
    servers = [DyingVllm(number) for number in range(2)]
    start(servers)
    wrong = 0
    head = (
        "death", "configuration", "run", "limit s (streamed, whole)", "slowest s", "ended well", "failed", "late", "broken",
        "seen by those",
    )
    row(*head)
    row(*["---"] * len(head))
    for mode in modes:
        for death in deaths:
            for run in range(RUNS):
                servers[0].wait_ready()
                verdicts, limits = one_run(servers, mode, death)
                counts = {what: sum(v == what for v, _, _ in verdicts) for what in ("failed", "late", "broken")}
                wrong += sum(counts.values())
                seen = {}
                for verdict, how, client in verdicts:
                    if verdict or how != "whole":
                        key = f"{client.kind()}: {how}"
                        seen[key] = seen.get(key, 0) + 1
                row(
                    death, mode, run, " ".join(f"{limit:.1f}" for limit in limits.values()),
                    f"{max(client.waited() for _, _, client in verdicts):.1f}", sum(v is None for v, _, _ in verdicts),
                    *counts.values(), "; ".join(f"{count} × {what}" for what, count in sorted(seen.items())) or "-",
                )
                # The whole group: the other processes of a server outlive one of them.
                servers[0].kill()
                servers[0] = servers[0].restarted()
    for server in servers:
        server.kill()
    print(f"{wrong} clients got what they must not")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
