"""Connectors beside NIXL's default, each with two vLLM servers, and both legs of a request by hand: three shapes of wire.

    e2e/pd/setup.sh && e2e/.work/venv/bin/python e2e/pd/test_connectors.py -v
    e2e/.work/venv/bin/python e2e/pd/test_connectors.py -v Pushing    # one connector

| Shape | Connector | What joins the legs |
|---|---|---|
| relay | `NixlConnector`, see test_wire.py | the answer to the first leg is part of the second |
| rendezvous | `NixlPushConnector` | the request id, and a prefill server whose engine id is known |
| rendezvous | `MooncakeConnector` | a name that the router makes, and the address of prefill's bootstrap server |
| store | `ExampleConnector` | the prompt: both legs have no field for it |
"""

import shutil
import sys
import threading
import unittest
import uuid
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))

from pair import CONSUMER, PRODUCER, Files, Mooncake, Push

from conversations import cached, text
from engines import WORK, request, start
from test_wire import ASKED, CHAT, COMPLETION, body_of, content, fetched, first_leg, streamed


class Joined:
    """A prefill and a decode server of one connector, for all tests of a class."""

    kind: type
    roles = (PRODUCER, CONSUMER)

    @classmethod
    def setUpClass(cls):
        names = (f"{cls.kind.__name__.lower()}-{role}" for role in ("prefill", "decode"))
        cls.servers = [cls.kind(name, role) for name, role in zip(names, cls.roles)]
        for server in cls.servers:
            cls.addClassCleanup(server.stop)
        start(cls.servers)
        cls.prefill, cls.decode = cls.servers

    def params(self, name):
        """`kv_transfer_params` of both legs of a request of this name, known before either is sent."""
        raise NotImplementedError

    def check(self, at_once):
        """Both legs of requests of every shape; the answers are those of one server."""
        for path in (CHAT, COMPLETION):
            for shape in (dict, streamed):
                with self.subTest(path=path, shape=shape.__name__):
                    name, before = str(uuid.uuid4()), fetched(self.decode)
                    body = shape(body_of(path, text(f"{path[4:6]}{shape.__name__}{at_once}", 150)))
                    one, two = self.params(name)
                    first, answers = first_leg(body, kv_transfer_params=one), []
                    if one is None:
                        del first["kv_transfer_params"]
                    second = body | ({"kv_transfer_params": two} if two else {})
                    prefill = threading.Thread(target=lambda: answers.append(self.send(self.prefill, path, first, name)))
                    prefill.start()
                    if not at_once:
                        prefill.join()
                    answer = self.send(self.decode, path, second, name)
                    prefill.join()
                    self.assertEqual((200, 200), (answers[0].status, answer.status), answer.body)
                    self.assertGreater(fetched(self.decode), before, "no tokens have come from the prefill server")
                    self.assertEqual(content(self.send(self.prefill, path, body, name)), content(answer))

    def send(self, server, path, body, name):
        return request(server.port, path, body, headers={"x-request-id": name})

    def test_two_legs_in_turn_answer_as_one(self):
        self.check(at_once=False)


class AtOnce(Joined):
    """The second leg need not wait for the answer to the first."""

    def test_two_legs_at_once_answer_as_one(self):
        self.check(at_once=True)


class Pushing(AtOnce, unittest.TestCase):
    kind = Push

    def params(self, name):
        return ASKED, {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self.prefill.engine_id,
            "remote_host": "127.0.0.1", "remote_port": self.prefill.side_channel_port, "tp_size": 1, "remote_request_id": name,
        }


class Mooncakes(AtOnce, unittest.TestCase):
    kind = Mooncake

    @classmethod
    def setUpClass(cls):
        if not (WORK / "mooncake" / "installed").exists():
            raise unittest.SkipTest(f"no Mooncake in {WORK}: apt-get install libibverbs1, and run e2e/pd/setup.sh")
        super().setUpClass()

    def params(self, name):
        """The engine id is asked of prefill's bootstrap server."""
        transfer = {"transfer_id": f"xfer-{name}"}
        (engine,) = request(self.prefill.bootstrap_port, "/query").json().values()
        theirs = {
            "remote_engine_id": engine["engine_id"], "remote_bootstrap_addr": f"http://127.0.0.1:{self.prefill.bootstrap_port}",
        }
        return (
            {"do_remote_decode": True, "do_remote_prefill": False} | transfer,
            {"do_remote_prefill": True, "do_remote_decode": False} | transfer | theirs,
        )

    def test_the_answer_to_a_first_leg_has_no_object(self):
        one, two = self.params("alone")
        body = body_of(CHAT, text("alone", 100))
        answer = self.send(self.prefill, CHAT, first_leg(body, kv_transfer_params=one), "alone")
        self.assertEqual((200, None), (answer.status, answer.json()["kv_transfer_params"]))
        usage = self.send(self.decode, CHAT, body | {"kv_transfer_params": two}, "alone").json()["usage"]
        self.assertEqual(usage["prompt_tokens"], cached(usage), "what was transferred counts as cached")


class Storing(Joined, unittest.TestCase):
    kind = Files

    @classmethod
    def setUpClass(cls):
        shutil.rmtree(Files.folder, ignore_errors=True)
        super().setUpClass()

    def params(self, name):
        return None, None


if __name__ == "__main__":
    unittest.main()
