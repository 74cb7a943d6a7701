"""Results: text, frames of pandas or polars, plots of matplotlib. None of these is imported before it is asked for."""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING, Any

from ._core import Records as NativeRecords
from ._core import Report as NativeReport
from ._core import Simulated

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from os import PathLike

    import pandas as pd  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]
    import polars as pl  # pyright: ignore[reportMissingImports]
    from matplotlib.axes import Axes  # pyright: ignore[reportMissingImports]

LOADS = ("rate", "concurrency", "load")


class Framed:
    """A result with columns."""

    def columns(self) -> dict[str, list[Any]]:
        """A list for each column, by its name."""
        raise NotImplementedError

    def to_pandas(self) -> pd.DataFrame:
        """The columns as a `pandas.DataFrame`."""
        import pandas  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]

        return pandas.DataFrame(self.columns())

    def to_polars(self) -> pl.DataFrame:
        """The columns as a `polars.DataFrame`."""
        import polars  # pyright: ignore[reportMissingImports]

        return polars.DataFrame(self.columns(), infer_schema_length=None)


class Records(Framed):
    """What each request of a run experienced; times are seconds from the run's start."""

    def __init__(self, native: NativeRecords) -> None:
        self.native = native

    def __len__(self) -> int:
        return len(self.native)

    def __repr__(self) -> str:
        return f"Records({len(self)} requests)"

    def columns(self) -> dict[str, list[Any]]:
        """A list for each field, by its name."""
        return self.native.columns()

    def save(self, path: str | PathLike[str]) -> None:
        """Writes them as a file that `read_records` and `kvlane report` read."""
        self.native.write(path)


class Report:
    """A report: in a notebook it shows itself."""

    def __init__(self, native: NativeReport) -> None:
        self.native = native
        self.verdict: str | None = native.verdict
        """What was found, in a sentence with its 95 % interval; None if there is nothing to compare."""

    def to_html(self) -> str:
        """The report as one HTML file that needs nothing else."""
        return self.native.to_html()

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the HTML file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_html())

    def plots(self) -> dict[str, str]:
        """Its charts as SVG, by the names of files."""
        return dict(self.native.plots())

    def _repr_html_(self) -> str:
        # A frame of its own: the page's styles and scripts are for a whole document.
        page = html.escape(self.to_html(), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 720px; border: 0"></iframe>'


class Simulation(Framed):
    """What a simulation found: a row for each policy and load. `print` shows its tables."""

    def __init__(self, native: Simulated) -> None:
        self.native = native
        self.json = native.json
        """The figures, schema `kvlane.simulate/1`: the bytes that `kvlane simulate --json` writes."""
        self.rows: list[dict[str, Any]] = json.loads(self.json)["rows"]
        """The rows of `json`."""
        self.records = {name: Records(records) for name, records in native.records}
        """Records of the requests under the first seed, by policy and load, if they were asked for."""

    def __str__(self) -> str:
        return self.native.text

    def __repr__(self) -> str:
        arms = dict.fromkeys(row["arm"] for row in self.rows)
        return f"Simulation({', '.join(arms)}; {len(self.rows)} rows)"

    def columns(self) -> dict[str, list[Any]]:
        """Policy, load, and every figure with the ends of its 95 % interval (`_low`, `_high`)."""
        return aligned(flat(row) for row in self.rows)

    def report(self) -> Report:
        """The report that `kvlane simulate --html` writes."""
        return Report(self.native.report())

    def plot(self, figure: str = "ttft_p90_s", ax: Axes | None = None) -> Axes:
        """Draws a figure over the load, or as bars if there is one load; returns matplotlib's axes."""
        if not any(figure in row["simulated"] for row in self.rows):
            known = sorted({name for row in self.rows for name in row["simulated"]})
            raise ValueError(f"no figure {figure}: there are {', '.join(known)}")
        if ax is None:
            from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

            ax = pyplot.subplots()[1]
        axes: Any = ax
        by_arm: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows:
            if figure in row["simulated"]:
                by_arm.setdefault(row["arm"], []).append(row)
        loads = [name for name in LOADS if any(name in row for row in self.rows)]
        if len(loads) == 1 and max(map(len, by_arm.values())) > 1:
            draw_lines(axes, by_arm, figure, loads[0])
        else:
            draw_bars(axes, [rows[0] for rows in by_arm.values()], figure)
        axes.set_ylabel(figure)
        axes.set_ylim(bottom=0)
        return ax

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()  # pyright: ignore[reportPrivateUsage]


class Sweep(Framed):
    """Simulations under varied settings."""

    def __init__(self, cells: Sequence[tuple[Mapping[str, Any], Simulation]]) -> None:
        self.cells = list(cells)
        """The varied settings of each simulation, and the simulation."""

    def __len__(self) -> int:
        return len(self.cells)

    def __iter__(self) -> Iterator[tuple[Mapping[str, Any], Simulation]]:
        return iter(self.cells)

    def __repr__(self) -> str:
        return f"Sweep({', '.join(self.cells[0][0])}; {len(self)} simulations)"

    def columns(self) -> dict[str, list[Any]]:
        """The varied settings, then the columns of the simulations."""
        return aligned({**varied, **flat(row)} for varied, simulation in self for row in simulation.rows)


def draw_lines(axes: Any, by_arm: Mapping[str, Sequence[Mapping[str, Any]]], figure: str, load: str) -> None:
    """A line for each policy over the load, in a band of the intervals."""
    for arm, rows in by_arm.items():
        points = sorted((row for row in rows if load in row), key=lambda row: row[load])
        over = [row[load] for row in points]
        (line,) = axes.plot(over, [row["simulated"][figure] for row in points], marker="o", label=arm)
        low, high = zip(*(interval_of(row, figure) for row in points), strict=True)
        axes.fill_between(over, low, high, alpha=0.2, color=line.get_color())
    axes.set_xlabel(load)
    axes.legend()


def draw_bars(axes: Any, rows: Sequence[Mapping[str, Any]], figure: str) -> None:
    """A bar for each policy, with its interval."""
    values = [row["simulated"][figure] for row in rows]
    ends = [interval_of(row, figure) for row in rows]
    below = [max(value - low, 0.0) for value, (low, _) in zip(values, ends, strict=True)]
    above = [max(high - value, 0.0) for value, (_, high) in zip(values, ends, strict=True)]
    axes.bar([row["arm"] for row in rows], values, yerr=[below, above])


def interval_of(row: Mapping[str, Any], figure: str) -> tuple[float, float]:
    """The 95 % interval of a row's figure: the figure itself if it has none."""
    value = row["simulated"][figure]
    interval = row["intervals"].get(figure) or {"low": value, "high": value}
    return interval["low"], interval["high"]


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `kvlane.simulate/1` as a row of a frame."""
    out: dict[str, Any] = {"policy": row["arm"]}
    out |= {name: row[name] for name in LOADS if name in row}
    out["overload"] = row["overload"]
    for figure, value in row["simulated"].items():
        out[figure] = value
        if figure in row["intervals"]:
            out[f"{figure}_low"], out[f"{figure}_high"] = interval_of(row, figure)
    out |= {f"{figure}_published": value for figure, value in row["published"].items()}
    return out


def aligned(rows: Iterator[dict[str, Any]]) -> dict[str, list[Any]]:
    """Rows as columns of equal length: `None` where a row has no value."""
    kept = list(rows)
    names = dict.fromkeys(name for row in kept for name in row)
    return {name: [row.get(name) for row in kept] for name in names}
