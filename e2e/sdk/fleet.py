"""The gateway in front of two mock engines and one that does as it is told, for the SDKs' tests."""

import unittest

from engines import KVLANE, Engine, Gateway, free_port, start, until
from scripted import ScriptedEngine

MOCK = "mock"


class Mock(Engine):
    """`kvlane mock-engine`, fast."""

    def __init__(self, number):
        self.port = free_port()
        command = [KVLANE, "mock-engine", "--port", str(self.port), "--model", MOCK, "--speed", "50"]
        super().__init__(f"mock-{number}", command)


class WithFleet(unittest.TestCase):
    """One gateway for the tests of a class."""

    @classmethod
    def setUpClass(cls):
        cls.engine = ScriptedEngine()
        cls.addClassCleanup(cls.engine.stop)
        mocks = [Mock(number) for number in range(2)]
        for mock in mocks:
            cls.addClassCleanup(mock.stop)
        start(mocks)
        cls.gateway = Gateway([*mocks, cls.engine], "fleet_cost")
        cls.addClassCleanup(cls.gateway.stop)

    def settled(self):
        """Nothing is in flight any more."""
        until("the ledger is zero", lambda: self.gateway.in_flight() == (0, 0, 0))

    def narrow_gateway(self):
        """Another one, that accepts one request at a time and queues none."""
        narrow = Gateway(
            [self.engine], "round_robin", "--max-concurrent-requests", "1", "--queue-size", "0",
            # Nobody is told to come again later than this.
            "--queue-timeout-secs", "2",
        )
        self.addCleanup(narrow.stop)
        return narrow

    @staticmethod
    def until_free(gateway):
        until("it has room", lambda: gateway.in_flight() == (0, 0, 0))
