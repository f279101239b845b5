"""What the records of a sweep show: speed-ups, measured and predicted, break-even batch sizes, and the table in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinyvllm.errors import one_line
from tinyvllm.lab.costs import Crossing, Gain, StepCosts, break_even, measured_break_even
from tinyvllm.lab.statistics import ratio

Record = Mapping[str, Any]
HEADINGS = ("prompts", "T", "batch", "drafter", "k", "policy", "tok/s", "± sd", "first token ms", "accepted", "tokens/step", "speed-up",
            "predicted", "break-even", "different", "perplexity", "KL")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One cell with what follows from its neighbours. Speed-ups are ratios of tokens a second.

    None: not known, as without a baseline or a cost curve.
    """

    record: Record
    speedup: float | None
    predicted: float | None
    predicted_break_even: Crossing | None
    measured_break_even: Crossing | None  # also None where one batch size was measured

    @property
    def is_baseline(self) -> bool:
        return bool(self.record["method"] == "none")


def rows_of(records: Sequence[Record], costs: StepCosts | None) -> list[Row]:
    """A row for each record, in their order."""
    baselines = {_place(record): record["tok_s"]["median"] for record in records if record["method"] == "none"}
    speedups = [_speedup(record, baselines.get(_place(record), 0.0)) for record in records]
    lines: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for record, speedup in zip(records, speedups):
        if speedup is not None:
            lines.setdefault(line_of(record), []).append((record["batch_size"], speedup))
    return [_row(record, speedup, lines, costs) for record, speedup in zip(records, speedups)]


def _speedup(record: Record, baseline: float) -> float | None:
    """The median of the ratios within repeats, or where they were not paired, the ratio of medians."""
    if record["paired_speedup"] is not None:
        return float(record["paired_speedup"]["median"])
    return ratio(record["tok_s"]["median"], baseline)


def _row(record: Record, speedup: float | None, lines: Mapping[tuple[Any, ...], list[tuple[int, float]]], costs: StepCosts | None) -> Row:
    if record["method"] == "none":
        return Row(record, None, None, None, None)
    gain = gain_of(record)
    if costs is None or gain is None:
        predicted = crossing = None
    else:
        predicted, crossing = gain.speedup(costs, record["batch_size"]), break_even(gain, costs)
    line = lines.get(line_of(record), [])
    return Row(record, speedup, predicted, crossing, measured_break_even(line) if len(line) > 1 else None)


def gain_of(record: Record) -> Gain | None:
    """What the drafter did a step; None where the target did not count it."""
    tokens, drafts = record["tokens_per_step"], record["drafts_per_step"]
    return None if tokens is None or drafts is None else Gain(drafts, tokens, record["draft_ms"] or 0.0)


def _place(record: Record) -> tuple[Any, ...]:
    """What a cell has in common with its baseline."""
    return record["batch_size"], record["temperature"], record["prompts"]


def line_of(record: Record) -> tuple[Any, ...]:
    """What the cells of one curve over batch sizes have in common."""
    return record["drafter"], record["k"], record["policy"], record["temperature"], record["prompts"]


def table(rows: Sequence[Row]) -> str:
    """A table in Markdown: text columns to the left, numbers to the right."""
    cells = [HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADINGS))]
    left = {0, 3, 5}

    def joined(line: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))) + " |"

    rule = "|" + "|".join(":" + "-" * (w + 1) if i in left else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([joined(cells[0]), rule, *(joined(line) for line in cells[1:])])


def _cells(row: Row) -> tuple[str, ...]:
    record, far = row.record, row.record["divergence"]
    head = (_escaped(record["prompts"]), f"{record['temperature']:g}", str(record["batch_size"]), _escaped(record["drafter"]))
    speed = record["tok_s"]
    sd = "" if speed["sd"] is None else f"{speed['sd']:.3g}"
    figures = (f"{speed['median']:.4g}", sd, f"{record['first_token_ms']['median']:.3g}")
    if row.is_baseline:
        return (*head, "", "", *figures, "", "", "", "", "", "", _number(far["perplexity"], ".4g"), "")
    drafting = (_percent(record["acceptance"]), _number(record["tokens_per_step"], ".2f"))
    gains = (_number(row.speedup, ".2f"), _number(row.predicted, ".2f"), _crossing(row))
    return (*head, str(record["k"]), _escaped(record["policy"]), *figures, *drafting, *gains, *_divergence(record))


def _divergence(record: Record) -> tuple[str, str, str]:
    far = record["divergence"]
    if record["exact"]:
        return "0", _number(far["perplexity"], ".4g"), "0"
    broken = "" if record["lossy"] or record["exact"] is None else " NOT EXACT"
    return _percent(far["difference"]) + broken, _number(far["perplexity"], ".4g"), _number(far["kl"], ".3g")


def _crossing(row: Row) -> str:
    """The predicted break-even batch size, and the measured one after a stroke where several batch sizes were measured."""
    return " / ".join(str(one) for one in (row.predicted_break_even, row.measured_break_even) if one is not None)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def _escaped(name: str) -> str:
    return one_line(name).replace("|", "\\|")
