"""Native part of kvlane."""

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, SupportsIndex, final

from typing_extensions import Buffer

VERSION: str

_Tokens = Buffer | Iterable[SupportsIndex]
_BlockName = int | bytes

@final
class Records:
    def __len__(self) -> int: ...
    def columns(self) -> dict[str, list[Any]]: ...
    def write(self, path: str | PathLike[str]) -> None: ...

@final
class Report:
    @property
    def verdict(self) -> str | None: ...
    def to_html(self) -> str: ...
    def plots(self) -> list[tuple[str, str]]: ...

@final
class Simulated:
    @property
    def json(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def records(self) -> list[tuple[str, Records]]: ...
    def report(self) -> Report: ...

def simulate(settings: Mapping[str, object]) -> Simulated: ...
def read_records(path: str | PathLike[str]) -> Records: ...
def report(runs: Sequence[tuple[str, Records]], title: str | None) -> Report: ...

@final
class Decision:
    """What became of a request that arrived."""

    @property
    def request(self) -> int:
        """The request's number, for `Router.progress` and `Router.settle`."""
    @property
    def outcome(self) -> Literal["placed", "queued", "rejected"]: ...
    @property
    def endpoint(self) -> str | None:
        """The endpoint that it was placed at."""
    @property
    def overlap_tokens(self) -> int:
        """Leading prompt tokens that the endpoint is expected to have cached."""
    @property
    def reason(self) -> str | None:
        """Why this endpoint, or why the request was rejected."""
    @property
    def knowledge(self) -> Literal["exact", "degraded", "approximate", "load_only"] | None:
        """How the overlap is known."""
    @property
    def retry_after_s(self) -> float | None:
        """For a rejected request: seconds after which the queue should have drained, if that is known."""

@final
class Endpoint:
    """An endpoint as the router sees it."""

    @property
    def name(self) -> str: ...
    @property
    def healthy(self) -> bool: ...
    @property
    def draining(self) -> bool: ...
    @property
    def requests(self) -> int:
        """Requests in flight."""
    @property
    def prefill_tokens(self) -> int:
        """Uncached prompt tokens in flight, by prediction."""
    @property
    def context_tokens(self) -> int:
        """Prompt and output tokens in flight."""
    @property
    def knowledge(self) -> Literal["exact", "degraded", "approximate", "load_only"]: ...
    @property
    def breaker(self) -> str:
        """The state of its circuit breaker."""

@final
class Applied:
    """What KV events changed."""

    @property
    def stored(self) -> int: ...
    @property
    def removed(self) -> int: ...
    @property
    def unknown(self) -> int:
        """Blocks that the router does not know, or whose parent it does not know."""
    @property
    def refused(self) -> int:
        """Blocks refused for lack of memory."""
    @property
    def ignored(self) -> int:
        """Events that do not concern prefix reuse or cannot be interpreted."""

@final
class Router:
    """Places requests at endpoints, as the gateway does.

    Nothing here waits or opens a socket: the caller sends the requests and tells the router what happens to them.
    All methods may be called from any thread. `now` is the time in seconds; either every call has one, from a clock
    that does not go back, or none, and the router reads its own.
    """

    def __new__(
        cls,
        policy: str | Mapping[str, object] | None = None,
        *,
        model: str = "",
        block_tokens: int = 16,
        kv_events: bool = False,
        timing: str | PathLike[str] | None = None,
        max_concurrent_requests: int = 0,
        max_requests_per_endpoint: int = 0,
        queue_size: int = 0,
        queue_timeout_s: float = 60.0,
        session_admission: bool = False,
        seed: int = 0,
        index_memory: int = 268435456,
        index_ttl_s: float = 1800.0,
        kv_index_memory: int = 1073741824,
    ) -> Router: ...
    def join(
        self,
        endpoint: str,
        *,
        healthy: bool = True,
        draining: bool = False,
        kv_events: bool = False,
        now: float | None = None,
    ) -> None:
        """Adds an endpoint. With `kv_events`, `apply_events` or `stored` will report its cache from its start."""
    def leave(self, endpoint: str, *, now: float | None = None) -> None:
        """Removes an endpoint and what is known of its cache. Its requests must still be settled."""
    def set_health(self, endpoint: str, healthy: bool, *, now: float | None = None) -> None:
        """Sets whether requests may be placed at an endpoint."""
    def drain(self, endpoint: str, draining: bool = True, *, now: float | None = None) -> None:
        """Sets whether an endpoint accepts no new requests; those in flight go on."""
    def forget(self, endpoint: str, *, now: float | None = None) -> None:
        """Forgets what is known of an endpoint's cache: it has restarted, or dropped its cache."""
    def report_load(
        self,
        endpoint: str,
        *,
        running: int,
        waiting: int,
        kv_usage_ratio: float,
        kv_capacity_tokens: int | None = None,
        now: float | None = None,
    ) -> None:
        """An endpoint's own report of its load."""
    def set_feed(
        self,
        endpoint: str,
        feed: Literal["live", "syncing", "refused", "absent"],
        *,
        now: float | None = None,
    ) -> None:
        """Sets the state of an endpoint's KV events: `live` if all have been applied, `syncing` if some are missing."""
    def arrive(
        self,
        tokens: _Tokens | None = None,
        *,
        text: str | None = None,
        block_hashes: Sequence[int] | None = None,
        prompt_tokens: int | None = None,
        lora: str | None = None,
        cache_salt: str | None = None,
        session: str | None = None,
        tenant: str | None = None,
        priority: int = 0,
        output_tokens_max: int | None = None,
        streamed: bool = True,
        excluded: Sequence[str] | None = None,
        attempt: int = 0,
        slo_ttft_ms: int | None = None,
        slo_tpot_ms: int | None = None,
        now: float | None = None,
    ) -> Decision:
        """A request arrives: where to send it, or that it waits, or that it is rejected.

        The prompt is given as `tokens` (ids: a list, an array, or little-endian 32-bit integers as bytes), as `text`
        (four bytes count as a token), or as `block_hashes`, each of which covers the blocks before it, with
        `prompt_tokens`.
        """
    def progress(self, request: int, tokens: int = 1, *, now: float | None = None) -> None:
        """`tokens` of a request's answer have arrived."""
    def settle(
        self,
        request: int,
        outcome: Literal["ok", "failed", "busy", "cancelled"] = "ok",
        *,
        output_tokens: int | None = None,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        retry_after_s: float | None = None,
        now: float | None = None,
    ) -> None:
        """A request is over: its load is released, and queued requests may be placed (`poll`)."""
    def apply_events(self, endpoint: str, payload: bytes) -> Applied:
        """Applies a message that an engine published about its cache: the payload of vLLM's or SGLang's KV events.

        Messages must come in the engine's order, and all of them; `set_feed(endpoint, "syncing")` says that one is
        missing.
        """
    def stored(
        self,
        endpoint: str,
        names: Sequence[_BlockName],
        tokens: _Tokens,
        *,
        parent: _BlockName | None = None,
        lora: str | None = None,
        cache_salt: str | None = None,
        tier: Literal["gpu", "cpu"] = "gpu",
    ) -> Applied:
        """An endpoint has stored blocks of these tokens, by the engine's names; `parent` is the block before them."""
    def removed(
        self, endpoint: str, names: Sequence[_BlockName], *, tier: Literal["gpu", "cpu"] = "gpu"
    ) -> Applied:
        """An endpoint has removed a copy of each of these blocks."""
    def cleared(self, endpoint: str) -> Applied:
        """An endpoint has removed all blocks."""
    def poll(self, *, now: float | None = None) -> list[Decision]:
        """Decisions on queued requests since the last call.

        Time passes: requests that have waited too long are rejected.
        """
    def next_deadline(self) -> float | None:
        """When to call `poll` if nothing else happens before, in the router's seconds; `None` while no request waits."""
    @property
    def endpoints(self) -> list[Endpoint]: ...
    @property
    def queued(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def policy(self) -> str: ...
    @property
    def block_tokens(self) -> int: ...
