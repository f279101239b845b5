"""The pictures of a sweep as data: acceptance by position, speed over K, predicted against measured speed-up, break-even batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinyvllm.lab.costs import StepCosts
from tinyvllm.lab.report import Row, gain_of
from tinyvllm.lab.target import DraftCounts

MAX_SERIES = 12  # of one picture; more cannot be told apart
_CURVE_POINTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Series:
    """One line of a picture: points (x, y) in order. `joined` False draws points alone, `dashed` a prediction."""

    name: str
    points: tuple[tuple[float, float], ...]
    joined: bool = True
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """A picture. `guide` is a line for comparison: "one" at y = 1, "diagonal" at y = x. `omitted` counts series that were too many."""

    name: str
    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    guide: str = ""
    log_x: bool = False
    omitted: int = 0


def charts_of(rows: Sequence[Row], costs: StepCosts | None) -> list[Chart]:
    """The pictures that have anything to show."""
    speculating = [row for row in rows if not row.is_baseline]
    made = [_acceptance(speculating), _speed(speculating), _predicted(speculating), _break_even(speculating, costs)]
    return [chart for chart in made if chart.series]


def _chart(name: str, title: str, x: str, y: str, series: Sequence[Series], guide: str = "", log_x: bool = False) -> Chart:
    whole = [one for one in series if one.points]
    return Chart(name, title, x, y, tuple(whole[:MAX_SERIES]), guide, log_x, max(0, len(whole) - MAX_SERIES))


def _acceptance(rows: Sequence[Row]) -> Chart:
    """Accepted drafts over verified ones, by position in their chain (as vLLM has it), of each drafter, policy and prompt set."""
    counts: dict[tuple[str, str, str], DraftCounts] = {}
    for row in rows:
        r = row.record
        held = counts.setdefault((r["drafter"], r["policy"], r["prompts"]), DraftCounts())
        held.add(DraftCounts(0, [p["drafted"] for p in r["positions"]], [p["accepted"] for p in r["positions"]]))
    series = [Series(name, _shares(each)) for name, each in zip(_short_names(list(counts)), counts.values())]
    return _chart("acceptance", "Acceptance by position", "position in the chain", "accepted, share of drafts there", series)


def _shares(counts: DraftCounts) -> tuple[tuple[float, float], ...]:
    pairs = enumerate(zip(counts.drafted, counts.accepted), 1)
    return tuple((float(position), accepted / drafted) for position, (drafted, accepted) in pairs if drafted)


def _speed(rows: Sequence[Row]) -> Chart:
    lines: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for row in rows:
        r = row.record
        if r["k"] != "auto" and row.speedup is not None:
            lines.setdefault((r["drafter"], r["policy"], r["prompts"], r["batch_size"], r["temperature"]), []).append((r["k"], row.speedup))
    names = _short_names(list(lines))
    series = [Series(name, tuple(sorted(points))) for name, points in zip(names, lines.values())]
    return _chart("speed", "Speed over K", "drafts a step (K)", "speed by speed without drafts", series, "one")


def _predicted(rows: Sequence[Row]) -> Chart:
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.predicted is not None and row.speedup is not None:
            points.setdefault(row.record["drafter"], []).append((row.predicted, row.speedup))
    series = [Series(name, tuple(sorted(each)), joined=False) for name, each in points.items()]
    title = "Predicted and measured speed-up, a point a cell"
    return _chart("predicted", title, "predicted from the cost curve", "measured", series, "diagonal")


def _break_even(rows: Sequence[Row], costs: StepCosts | None) -> Chart:
    """Speed-up over batch size: measured points, and the prediction from the smallest batch's acceptance as a dashed line."""
    lines: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        r = row.record
        lines.setdefault((r["drafter"], r["policy"], r["prompts"], r["k"], r["temperature"]), []).append(row)
    series = []
    for name, each in zip(_short_names(list(lines)), lines.values()):
        measured = sorted((float(row.record["batch_size"]), row.speedup) for row in each if row.speedup is not None)
        series.append(Series(name, tuple(measured)))
        gain = gain_of(min(each, key=lambda row: row.record["batch_size"]).record)
        if costs is not None and gain is not None:
            series.append(Series(f"{name}, predicted", tuple((float(b), gain.speedup(costs, b)) for b in _CURVE_POINTS), dashed=True))
    return _chart("break_even", "Speed-up over batch size: it pays above 1", "sequences in the batch", "speed-up", series, "one", True)


def _short_names(keys: Sequence[tuple[Any, ...]]) -> list[str]:
    """What tells the keys apart: the parts in which they differ, and at least the first."""
    parts = [i for i in range(len(keys[0])) if i == 0 or len({key[i] for key in keys}) > 1] if keys else []
    labels = ("{}", "{}", "{}", "{}", "T {}")
    return [", ".join(labels[i].format(key[i]) for i in parts) for key in keys]
