"""What a step costs by its number of rows, learned from the engine's own steps. Times are arguments; no clock is read here."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

MIN_SAMPLES = 3  # a bucket counts from then on: one slow step must not close it for good
MAX_SAMPLES = 15
MAX_AGE = 1000  # steps after which a bucket that was not visited is unknown again: context and other load change what it costs
# Where nothing is measured the estimate is optimistic, so that it is tried: this share of the last known cost for twice its rows. From
# there on, and below the least known number of rows, it is in proportion to the rows: steps grow at most twofold at a time.
DOUBLING = 0.1
_REBUILD = 8  # steps between two looks at the samples


@dataclass(slots=True)
class _Bucket:
    """Seconds of steps with one number of rows."""

    samples: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    last_step: int = 0


class CostCurve:
    """step_seconds(rows): a running lower quartile by the number of rows, exact up to 16 rows, within 1/8 beyond.

    Between two measured numbers the estimate is a parabola from the lower one on. For a curve that is flat, then linear, it is optimistic,
    so that the numbers between are tried, too.
    """

    def __init__(self, points: Mapping[int, float] | None = None):
        """`points`: seconds by number of rows, as measured before; they count until steps are observed."""
        self._buckets: dict[int, _Bucket] = {}
        self._step = 0
        self._is_stale = False  # there are samples that the estimates do not have
        self._rows: list[int] = []
        self._shape: list[float] = []
        self._memo: dict[int, float] = {}
        for rows, seconds in (points or {}).items():
            self._buckets[_bucket_of(rows)] = bucket = _Bucket()
            bucket.samples.extend([_positive(seconds)] * MIN_SAMPLES)
        self._rebuild()

    def observe(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took so long."""
        number = _bucket_of(rows)
        bucket = self._buckets.setdefault(number, _Bucket())
        self._step += 1
        bucket.samples.append(_positive(seconds))
        bucket.last_step = self._step
        self._is_stale = self._is_stale or len(bucket.samples) == MIN_SAMPLES or self._step % _REBUILD == 0

    def seconds(self, rows: int) -> float:
        """The estimate for a step of `rows` rows; relative to a step of one row if nothing is known at all."""
        if self._is_stale:
            self._rebuild()
        shape = self._memo.get(rows)
        if shape is None:
            shape = self._memo[rows] = self._interpolate(rows)
        return shape

    def points(self) -> dict[int, float]:
        """Seconds by number of rows, where they are measured."""
        if self._is_stale:
            self._rebuild()
        return dict(zip(self._rows, self._shape, strict=True))

    def _interpolate(self, rows: int) -> float:
        known, shape = self._rows, self._shape
        if not known:
            return _beyond(rows, 1)
        at = bisect_left(known, rows)
        if at < len(known) and known[at] == rows:
            return shape[at]
        if 0 < at < len(known):
            share = (rows - known[at - 1]) / (known[at] - known[at - 1])
            return shape[at - 1] + share * share * (shape[at] - shape[at - 1])
        if at == 0:
            return shape[0] * rows / known[0]
        return _beyond(rows, known[-1]) * shape[-1]

    def _rebuild(self) -> None:
        self._buckets = {n: bucket for n, bucket in self._buckets.items() if self._step - bucket.last_step <= MAX_AGE}
        full = sorted(n for n, bucket in self._buckets.items() if len(bucket.samples) >= MIN_SAMPLES)
        self._rows, self._shape = full, [_quartile(self._buckets[n].samples) for n in full]
        self._memo.clear()
        self._is_stale = False


def _quartile(samples: Collection[float]) -> float:
    """The lower quartile: other load only ever adds time, and of three samples it is the least."""
    return sorted(samples)[len(samples) // 4]


def _beyond(rows: int, known: int) -> float:
    """The cost of `rows` rows if that of `known` rows, fewer, is 1."""
    ratio = rows / known
    return 1 + DOUBLING * (ratio - 1) if ratio <= 2 else (1 + DOUBLING) * ratio / 2


def _bucket_of(rows: int) -> int:
    """The number of rows with its three highest bits after the first; exact up to 16."""
    if rows < 1:
        raise ValueError(f"cost curve: a step has 1 row or more, got {rows}")
    shift = max(0, rows.bit_length() - 4)
    return rows >> shift << shift


def _positive(seconds: float) -> float:
    if not seconds > 0:
        raise ValueError(f"cost curve: a step takes more than 0 s, got {seconds}")
    return seconds
