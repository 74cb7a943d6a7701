"""Simulations and reports: arguments as notebooks write them, for the code that the commands run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

from ._core import read_records as native_read_records
from ._core import report as native_report
from ._core import simulate as native_simulate
from ._results import Records, Report, Simulation, Sweep

if TYPE_CHECKING:
    from typing_extensions import Unpack

AnyPath = str | PathLike[str]
AnyRecords = Records | AnyPath

ONLY_PLAIN = (
    "trace", "workload", "policy", "engines", "preset", "model", "gpu", "tp", "timing", "kv_dtype", "block_tokens", "load",
    "rate", "concurrency", "warm_up", "stagger_s", "length_spread", "cache_knowledge",
)  # fmt: skip
"""Settings that a scenario has in itself."""


class Settings(TypedDict, total=False):
    """The keywords of `simulate`."""

    scenario: AnyPath | Mapping[str, Any] | None
    trace: AnyPath | None
    workload: str | None
    policy: str | Sequence[str] | None
    engines: int | None
    preset: str | None
    model: str | None
    gpu: str | None
    tp: int | None
    timing: AnyPath | None
    kv_dtype: Literal["bf16", "fp8"] | None
    block_tokens: int | None
    load: float | Sequence[float] | None
    rate: tuple[float, float] | Sequence[tuple[float, float]] | None
    concurrency: int | Sequence[int] | None
    warm_up: int | None
    stagger_s: float | None
    length_spread: float | None
    cache_knowledge: Literal["approximate", "exact"] | None
    seeds: int | None
    first_seed: int | None
    jobs: int | None
    slo_ttft_s: float | None
    slo_tpot_ms: float | None
    records: bool


def simulate(
    *,
    scenario: AnyPath | Mapping[str, Any] | None = None,
    trace: AnyPath | None = None,
    workload: str | None = None,
    policy: str | Sequence[str] | None = None,
    engines: int | None = None,
    preset: str | None = None,
    model: str | None = None,
    gpu: str | None = None,
    tp: int | None = None,
    timing: AnyPath | None = None,
    kv_dtype: Literal["bf16", "fp8"] | None = None,
    block_tokens: int | None = None,
    load: float | Sequence[float] | None = None,
    rate: tuple[float, float] | Sequence[tuple[float, float]] | None = None,
    concurrency: int | Sequence[int] | None = None,
    warm_up: int | None = None,
    stagger_s: float | None = None,
    length_spread: float | None = None,
    cache_knowledge: Literal["approximate", "exact"] | None = None,
    seeds: int | None = None,
    first_seed: int | None = None,
    jobs: int | None = None,
    slo_ttft_s: float | None = None,
    slo_tpot_ms: float | None = None,
    records: bool = False,
) -> Simulation:
    """Compares policies, fleets and loads in virtual time: `kvlane simulate`, whose flags have the same names.

    scenario: a built-in scenario's name, a file, or a mapping with a scenario file's keys. Or, without one:
    trace: a trace file, or the name of one that comes with kvlane; or
    workload: the kind of a workload to generate.
    policy: the policies to compare.
    engines, preset, model, gpu, tp, timing, kv_dtype, block_tokens: the fleet.
    load, rate, concurrency: factors on the trace's rate; (conversations per second, seconds); closed-loop clients.
    warm_up, stagger_s, length_spread: with concurrency: conversations of each client before those that count (1); seconds within
    which clients begin (5); by which share answers are longer or shorter (0).
    cache_knowledge: `approximate` (the router's own dispatches) or `exact` (the engines' KV events).
    seeds, first_seed: runs of each, under consecutive seeds. The same seeds give the same bytes.
    jobs: threads; one for each core unless given.
    slo_ttft_s, slo_tpot_ms: limits for goodput.
    records: whether the result has the records of each request under the first seed.
    """
    settings: dict[str, Any] = dict(locals())
    if scenario is not None:
        given = [name for name in ONLY_PLAIN if settings[name] is not None]
        if given:
            raise ValueError(f"scenario has {', '.join(given)} in itself: change it there")
    is_document = isinstance(scenario, Mapping)
    settings["document"] = json.dumps(scenario) if is_document else None
    settings["scenario"] = None if scenario is None or is_document else fspath(scenario)
    settings["policy"] = [policy] if isinstance(policy, str) else policy
    settings["load"] = [load] if isinstance(load, int | float) else load
    settings["concurrency"] = [concurrency] if isinstance(concurrency, int) else concurrency
    if isinstance(rate, tuple) and len(rate) == 2 and not isinstance(rate[0], tuple):
        settings["rate"] = [rate]
    return Simulation(native_simulate(settings))


def sweep(vary: Mapping[str, Sequence[Any]], **settings: Unpack[Settings]) -> Sweep:
    """Runs a simulation for every combination of varied settings.

    `vary` maps keywords of `simulate` to the values that each takes in turn; the other keywords are the same for all.
    """
    if not vary or not all(vary.values()):
        raise ValueError("vary: at least one setting with at least one value is needed")
    known = Settings.__annotations__
    for name in vary:
        if name not in known or name == "records":
            raise ValueError(f"vary {name}: simulate() has no such setting; it has {', '.join(sorted(known))}")
        if name in settings:
            raise ValueError(f"{name} is given and varied")
    cells: list[tuple[dict[str, Any], Simulation]] = []
    for values in itertools.product(*vary.values()):
        varied: dict[str, Any] = dict(zip(vary, values, strict=True))
        cells.append((varied, simulate(**cast("Settings", {**settings, **varied}))))
    return Sweep(cells)


def read_records(path: AnyPath) -> Records:
    """Reads records that `kvlane replay`, `bench` or `simulate` wrote with `--records`."""
    return Records(native_read_records(path))


def report(runs: AnyRecords | Sequence[AnyRecords] | Mapping[str, AnyRecords], *, title: str | None = None) -> Report:
    """A report of recorded runs: `kvlane report`.

    Runs are records or their files; a mapping gives them names. The others are compared with the first: request by
    request if both sent the same.
    """
    if isinstance(runs, Records | str | PathLike):
        runs = [runs]
    if isinstance(runs, Mapping):
        named = list(runs.items())
    else:
        named = [(f"run {place}" if isinstance(run, Records) else Path(run).stem, run) for place, run in enumerate(runs, 1)]
        for place, (name, run) in enumerate(named):
            taken = [other for other, _ in named[:place]]
            numbered = (f"{name} ({number})" for number in itertools.count(2))
            named[place] = (next(n for n in itertools.chain([name], numbered) if n not in taken), run)
    read = [(name, run if isinstance(run, Records) else read_records(run)) for name, run in named]
    return Report(native_report([(name, run.native) for name, run in read], title))
