"""What a step costs by its rows, the speed-up that follows, and the batch size up to which speculation pays.

A step of B sequences without drafts has B rows. With d drafts a sequence it has B (1 + d) rows, and each sequence gets t tokens of it, so

    speed-up = t * cost(B) / (cost(B (1 + d)) + draft cost)

which is the usual (1 - a^(K+1)) / (1 - a) / (r(K+1) + K c) (Leviathan et al. 2022, arXiv:2211.17192) with a measured t in place of one
acceptance rate a for all positions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from tinyvllm.errors import ArgumentError
from tinyvllm.lab.settings import Settings, number_in

MAX_ROWS = 1 << 16
MAX_STEP_MS = 1e7


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds of a step at some numbers of rows, ascending. Between them it is linear; after the last two it continues their line."""

    rows: tuple[int, ...]
    milliseconds: tuple[float, ...]

    def __call__(self, rows: float) -> float:
        """Milliseconds of a step with this number of rows. Below the first point it is flat: a step reads all weights once."""
        if rows <= self.rows[0] or len(self.rows) == 1:
            return self.milliseconds[0] * (1.0 if rows <= self.rows[0] else rows / self.rows[0])
        right = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        (a, b), (x, y) = self.rows[right - 1 : right + 1], self.milliseconds[right - 1 : right + 1]
        return max(x + (y - x) * (rows - a) / (b - a), min(self.milliseconds))

    @staticmethod
    def of(points: Sequence[tuple[int, float]]) -> StepCosts:
        """From (rows, milliseconds) in any order; the last of equal rows counts."""
        ordered = sorted(dict(points).items())
        if not ordered:
            raise ArgumentError("a cost curve needs at least one point of rows and milliseconds")
        return StepCosts(tuple(rows for rows, _ in ordered), tuple(ms for _, ms in ordered))

    def pairs(self) -> list[list[float]]:
        """As JSON has it."""
        return [[rows, ms] for rows, ms in zip(self.rows, self.milliseconds)]


def parse_costs(settings: Settings, key: str) -> StepCosts | None:
    """A curve written as a mapping of rows to milliseconds; None if the key is missing."""
    if key not in settings:
        return None
    values = settings.get(key)
    points: list[tuple[int, float]] = []
    for rows, ms in values.items() if isinstance(values, dict) else ():
        count = int(rows) if isinstance(rows, str) and rows.isdecimal() and len(rows) < 9 else rows  # keys of JSON are texts
        time = number_in(ms, 1e-6, MAX_STEP_MS)
        if type(count) is not int or not 1 <= count <= MAX_ROWS or time is None:
            raise settings.refuse(key, "rows to milliseconds, such as {1: 9.5, 8: 12}", {rows: ms})
        points.append((count, time))
    if not points:
        raise settings.refuse(key, "rows to milliseconds, such as {1: 9.5, 8: 12}", values)
    return StepCosts.of(points)


@dataclass(frozen=True)
class Gain:
    """What a drafter does to a sequence in a step: mean drafts verified, mean tokens that it gets, and milliseconds of drafting a step."""

    drafts: float
    tokens: float
    draft_ms: float = 0.0

    def speedup(self, costs: StepCosts, batch_size: float) -> float:
        """Predicted speed with these drafts over speed without, at this number of sequences."""
        return self.tokens * costs(batch_size) / (costs(batch_size * (1 + self.drafts)) + self.draft_ms)


@dataclass(frozen=True)
class Crossing:
    """The number of sequences up to which speculation pays, 0 if it never does; `beyond`: it still does at this largest known number."""

    batch: float
    beyond: bool = False

    def __str__(self) -> str:
        return f">{self.batch:g}" if self.beyond else f"{self.batch:.3g}" if self.batch else "never"


def break_even(gain: Gain, costs: StepCosts) -> Crossing:
    """The predicted crossing of speed-up 1, over the batch sizes whose rows the curve covers.

    The first crossing counts: with more sequences than that, speculation may pay again where the curve has a step.
    """
    top = max(1, int(costs.rows[-1] / (1 + gain.drafts)))
    return measured_break_even([(batch, gain.speedup(costs, batch)) for batch in range(1, top + 1)])


def measured_break_even(speedups: Sequence[tuple[int, float]]) -> Crossing:
    """The crossing of speed-up 1 from (batch size, speed-up), at least one, linear between neighbours."""
    ordered = sorted(speedups)
    if ordered[0][1] < 1:
        return Crossing(0.0)
    for (low, above), (high, here) in zip(ordered, ordered[1:]):
        if here < 1:
            return Crossing(low + (high - low) * (above - 1) / (above - here))
    return Crossing(float(ordered[-1][0]), beyond=True)
