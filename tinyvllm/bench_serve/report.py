"""Reports of a serving benchmark: Markdown tables, JSON, CSV, and the lines of a picture. All figures have vLLM's names."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinyvllm.bench_serve.figures import METRICS, Figures

_SHOWN_ERRORS = 8
_COUNTS = {
    "request_rate": "rate", "max_concurrency": "concurrency", "completed": "completed", "failed": "failed", "duration": "seconds",
    "request_throughput": "req/s", "request_goodput": "goodput", "output_throughput": "tok/s", "total_token_throughput": "all tok/s",
    "max_concurrent_requests": "peak", "client_cpu": "client CPU",
}  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What was measured, the loads in their order, and which metrics and percentiles are shown."""

    about: Mapping[str, Any]
    loads: Sequence[Figures]
    metrics: Sequence[str]
    percentiles: Sequence[float]

    @property
    def statistics(self) -> list[str]:
        return ["mean", "median", "std", *(f"p{percentile:g}" for percentile in self.percentiles)]


def as_markdown(report: Report) -> str:
    """A table of counts and rates, one of times, a row a load each, and the errors by name."""
    about = ", ".join(f"{name} {value}" for name, value in report.about.items() if value not in (None, "", {}))
    names = {name: title for name, title in _COUNTS.items() if any(load.get(name) is not None for load in report.loads)}
    counts = [[*names.values()], *([_cell(load.get(name)) for name in names] for load in report.loads)]
    times = [["load", "ms", *report.statistics]]
    for load in report.loads:
        for metric in report.metrics:
            times.append([label_of(load), metric.upper(), *(_cell(load[f"{name}_{metric}_ms"]) for name in report.statistics)])
    return "\n".join([about, "", *_table(counts), "", *_table(times), *_errors(report.loads), ""])


def label_of(load: Figures) -> str:
    """The load in words."""
    limit = load["max_concurrency"]
    rate = "all at once" if load["request_rate"] == "inf" else f"{load['request_rate']:g}/s"
    return rate if limit is None else f"at most {limit}" if load["request_rate"] == "inf" else f"{rate}, at most {limit}"


def _errors(loads: Sequence[Figures]) -> list[str]:
    lines = []
    for load in loads:
        errors = [*load["errors"].items()]
        lines += [f"- {label_of(load)}: {count} failed: {text}" for text, count in errors[:_SHOWN_ERRORS]]
        if len(errors) > _SHOWN_ERRORS:
            lines.append(f"- {label_of(load)}: {sum(count for _, count in errors[_SHOWN_ERRORS:])} failed for other reasons")
    return ["", *lines] if lines else []


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *lines[1:]]


def as_json(report: Report) -> str:
    return json.dumps({**report.about, "loads": [*report.loads]}, indent=1) + "\n"


def as_csv(report: Report) -> str:
    """A row a load; `errors` are JSON."""
    text = io.StringIO()
    about = {name: value if isinstance(value, (str, int, float)) else json.dumps(value) for name, value in report.about.items()}
    rows = [about | {name: value for name, value in load.items() if name != "requests"} for load in report.loads]
    writer = csv.DictWriter(text, [*rows[0]], lineterminator="\n")
    writer.writeheader()
    writer.writerows(row | {"errors": json.dumps(row["errors"])} for row in rows)
    return text.getvalue()


FORMATS: dict[str, Callable[[Report], str]] = {"md": as_markdown, "markdown": as_markdown, "json": as_json, "csv": as_csv}


@dataclass(frozen=True)
class Panel:
    """One picture: lines of (x, y) by their names."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


def panels(report: Report) -> list[Panel]:
    """Each metric and the rates against the load; of a single load, or of all requests at once, against the load's place in the list."""
    label, places = _places(report.loads)

    def line(name: str) -> list[tuple[float, float]]:
        return [(x, float(load[name])) for x, load in zip(places, report.loads, strict=True) if load.get(name) is not None]

    times = [
        Panel(METRICS[metric], label, "ms", {name: line(f"{name}_{metric}_ms") for name in report.statistics if name != "std"})
        for metric in report.metrics
    ]
    rates = Panel(
        "requests a second", label, "requests/s", {"answered": line("request_throughput"), "within the limits": line("request_goodput")}
    )
    return [*times, rates, Panel("output tokens a second", label, "tokens/s", {"all requests": line("output_throughput")})]


def _places(loads: Sequence[Figures]) -> tuple[str, list[float]]:
    """What tells loads apart, and where each is on that axis."""
    for name, label in (("request_rate", "requests a second that arrive"), ("max_concurrency", "requests at the same time")):
        values = [load[name] for load in loads]
        if len(set(values)) == len(values) and all(isinstance(value, (int, float)) for value in values):
            return label, [float(value) for value in values]
    return "load, in the order of the table", [float(number) for number in range(1, len(loads) + 1)]
