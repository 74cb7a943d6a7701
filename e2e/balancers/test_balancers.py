"""nginx, HAProxy and Envoy in front of two replicas of kvlane, as deploy/balancers configures them.

    apt-get install nginx-light haproxy && e2e/envoy/setup.sh && cargo build --release -p kvlane
    python3 e2e/balancers/test_balancers.py -v

Balancers that are missing are skipped. `Shares` prints the table of docs/replicas.md, "Affinity".
"""

import collections
import http.client
import os
import random
import re
import shutil
import sys
import threading
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from engines import KVLANE, WORK, Engine, Gateway, Process, free_port, metrics, request, start, until

SAMPLES = HERE.parents[1] / "deploy" / "balancers"
INFRA = Path(os.environ.get("KVLANE_INFRA", Path.home() / ".cache" / "kvlane-infra"))
CHAT = "/v1/chat/completions"
SESSIONS = 20
CONVERSATIONS, TURNS, CLIENTS, ENGINES = 48, 6, 6, 4


class Mock(Engine):
    """`kvlane mock-engine` without KV events: each gateway knows only what it has sent, or was told."""

    def __init__(self, number):
        self.port = free_port()
        super().__init__(f"balancers-mock-{number}", [
            KVLANE, "mock-engine", "--port", str(self.port), "--model", "mock",
        ])


class Balancer(Process):
    """A balancer with its sample in front of these gateways."""

    FILES = {"nginx": "nginx.conf", "haproxy": "haproxy.cfg", "envoy": "envoy.yaml"}

    def __init__(self, name, gateways, change=lambda text: text):
        self.port, directory = free_port(), WORK / f"balancer-{name}"
        directory.mkdir(parents=True, exist_ok=True)
        text = change((SAMPLES / self.FILES[name]).read_text())
        # Where there is only one gateway, the second server of the sample is it, too.
        for number, gateway in enumerate([*gateways, *gateways][:2], 1):
            text = text.replace(f"10.0.1.{number}:30000", f"127.0.0.1:{gateway.port}")
            text = text.replace(f"10.0.1.{number}, port_value: 30000", f"127.0.0.1, port_value: {gateway.port}")
        text = text.replace("0.0.0.0, port_value: 8080", f"127.0.0.1, port_value: {self.port}")
        text = re.sub(r"\b(listen|bind) :?8080", rf"\1 127.0.0.1:{self.port}", text)
        if name == "nginx":
            # What the distribution's own file sets.
            kinds = "".join(f"  {kind}_temp_path {directory}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
            text = text.replace("http {\n", f"http {{\n  access_log off;\n{kinds}", 1)
            text = f"pid {directory}/pid;\nerror_log {directory}/log;\n{text}"
        file = directory / self.FILES[name]
        file.write_text(text)
        super().__init__(f"balancer-{name}", {
            "nginx": ["nginx", "-p", str(directory), "-c", str(file), "-g", "daemon off;"],
            "haproxy": ["haproxy", "-db", "-f", str(file)],
            "envoy": [str(INFRA / "envoy" / "envoy"), "-c", str(file), "--use-dynamic-base-id", "-l", "error"],
        }[name])
        until(f"{name} answers", self.answers)

    @staticmethod
    def is_there(name):
        return (INFRA / "envoy" / "envoy").exists() if name == "envoy" else bool(shutil.which(name))

    def answers(self):
        self.check_alive()
        try:
            return self.ask("hello").status == 200
        except (OSError, http.client.HTTPException):
            return False

    def ask(self, text, session=None):
        body = {"model": "mock", "max_tokens": 8, "messages": [{"role": "user", "content": text}]}
        return request(self.port, CHAT, body, headers={"x-session-id": session} if session else None)


def replicas(mocks, together, count=2):
    """Gateways, which tell each other what they do or not."""
    at = [f"127.0.0.1:{free_port()}" for _ in range(count)]
    flags = [["--replicas-listen", own, "--replicas-peer", *at] if together else [] for own in at]
    gateways = [Gateway(mocks, "fleet_cost", *own, name=f"balancers-gateway-{n}") for n, own in enumerate(flags)]
    until("both are ready", lambda: all(request(gateway.admin_port, "/readiness").status == 200 for gateway in gateways))
    if together:
        until("they hear each other", lambda: all(metrics(gateway.admin_port)["kvlane_replicas"] == count - 1 for gateway in gateways))
    return gateways


def placed(gateway):
    """Requests that a gateway has placed. One that has ended places none."""
    try:
        return metrics(gateway.admin_port).get("kvlane_worker_selection_total", 0)
    except OSError:
        return 0


class Sessions(unittest.TestCase):
    def check(self, name):
        if not Balancer.is_there(name):
            self.skipTest(f"{name} is not installed")
        mocks = [Mock(number) for number in range(2)]
        for mock in mocks:
            self.addCleanup(mock.stop)
        start(mocks)
        gateways = replicas(mocks, True)
        for gateway in gateways:
            self.addCleanup(gateway.stop)
        balancer = Balancer(name, gateways)
        self.addCleanup(balancer.stop)
        split = collections.Counter()
        for session in range(SESSIONS):
            before = [placed(gateway) for gateway in gateways]
            for _ in range(3):
                self.assertEqual(200, balancer.ask("hello", f"s{session}").status)
            taken = [placed(gateway) - count for gateway, count in zip(gateways, before)]
            self.assertEqual([0, 3], sorted(taken), "a session is at one gateway")
            split[taken.index(3)] += 1
        before = [placed(gateway) for gateway in gateways]
        for _ in range(SESSIONS):
            self.assertEqual(200, balancer.ask("hello").status)
        without = [placed(gateway) - count for gateway, count in zip(gateways, before)]
        self.assertGreater(min(without), 0, "requests without a session are spread")
        print(f"{name}: {SESSIONS} sessions split {split[0]} to {split[1]}, requests without one {without[0]:.0f} to {without[1]:.0f}", flush=True)
        gateways[0].kill()
        statuses = collections.Counter(balancer.ask("hello", f"s{session}").status for session in range(SESSIONS))
        self.assertEqual({200: SESSIONS}, dict(statuses), "one gateway was killed")

    def test_nginx(self):
        self.check("nginx")

    def test_haproxy(self):
        self.check("haproxy")

    def test_envoy(self):
        self.check("envoy")


@unittest.skipUnless(Balancer.is_there("haproxy"), "haproxy is not installed")
class Shares(unittest.TestCase):
    """The cached share of follow-up turns, with and without affinity, with and without the exchange."""

    def test_shares(self):
        shares = {}
        alone = self.measure(False, False, 1)
        for together in (False, True):
            for affinity in (False, True):
                shares[together, affinity] = self.measure(together, affinity)
        print(f"one gateway: {alone:.3f} of follow-up tokens cached", flush=True)
        for (together, affinity), share in shares.items():
            print(f"{'exchange' if together else 'no exchange'}, {'by session' if affinity else 'in turns'}: {share:.3f} of follow-up tokens cached", flush=True)
        self.assertGreater(shares[False, True], shares[False, False], "affinity without the exchange")
        self.assertGreater(shares[True, False], shares[False, False], "the exchange without affinity")

    def measure(self, together, affinity, count=2):
        mocks = [Mock(number) for number in range(ENGINES)]
        start(mocks)
        processes = list(mocks)
        try:
            gateways = replicas(mocks, together, count)
            processes += gateways
            plain = "balance hdr(x-session-id)"
            balancer = Balancer("haproxy", gateways, lambda text: text if affinity else text.replace(plain, "balance roundrobin"))
            processes.append(balancer)
            return self.follow_up_share(balancer)
        finally:
            for process in processes:
                process.stop()

    def follow_up_share(self, balancer):
        """Each client has its conversations side by side, one turn of each after the other in an order that is drawn."""
        totals, lock = [0, 0], threading.Lock()

        def run(client):
            order = random.Random(client)
            texts = {f"c{client}-{n}": f"conversation {client} {n}. " + "It begins. " * 150 for n in range(CONVERSATIONS // CLIENTS)}
            for turn in range(TURNS):
                for session in order.sample(sorted(texts), len(texts)):
                    texts[session] += f" Turn {turn} of {session}. " + "And so on. " * 60
                    usage = balancer.ask(texts[session], session).json()["usage"]
                    if turn:
                        with lock:
                            totals[0] += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                            totals[1] += usage["prompt_tokens"]

        clients = [threading.Thread(target=run, args=(client,)) for client in range(CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        return totals[0] / totals[1]


if __name__ == "__main__":
    unittest.main()
