"""What a step costs without drafts, and what drafts add, learned from the engine's own steps. Times are arguments: no clock."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import field
from itertools import accumulate

from tinyvllm.lazy_dataclass import dataclass

MIN_SAMPLES = 3  # a bucket counts from then on: one slow step must not close it for good
MAX_SAMPLES = 15
MAX_AGE = 1000  # steps after which a bucket that was not visited is unknown again: context and other load change what it costs
# Where nothing is measured the estimate is optimistic, so that it is tried: this share of the last known cost for twice its rows. From
# there on, and below the least known number of rows, it is in proportion to the rows: steps grow at most twofold at a time.
DOUBLING = 0.1
_REBUILD = 8  # steps between two looks at the samples
MAX_FEW = 8  # sequences; larger batches are weighed with more care, since there drafts save least
REACH = 1.25  # steps without drafts are known up to this factor of rows from a measured number
MIN_EXTRA = 1e-3  # of a step without drafts: what drafts add to it at least, where noise says less


@dataclass(slots=True)
class _Bucket:
    """Seconds of steps with one number of rows."""

    samples: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    last_step: int = 0


class CostCurve:
    """step_seconds(rows): a running lower quartile by the number of rows, exact up to 16 rows, within 1/8 beyond. Other load only ever adds
    time, and of three samples the lower quartile is the least.

    Between two measured numbers the estimate is a parabola from the lower one on. For a curve that is flat, then linear, it is optimistic,
    so that the numbers between are tried, too.
    """

    def __init__(self, points: Mapping[int, float] | None = None, grows: bool = False, share: float = 0.25):
        """`points`: seconds by number of rows, as measured before; they count until steps are observed.

        `grows`: fewer rows never take longer than more of them do; what was measured otherwise is noise. `share` of the samples are less
        than the estimate.
        """
        self._grows, self._share = grows, share
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

    def age(self) -> None:
        """A step was observed elsewhere: what this curve knows has become older."""
        self._step += 1
        self._is_stale = self._is_stale or self._step % _REBUILD == 0

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

    @property
    def range(self) -> tuple[int, int]:
        """The least and the largest number of rows that is measured; 0 and 0 if none is."""
        if self._is_stale:
            self._rebuild()
        return (self._rows[0], self._rows[-1]) if self._rows else (0, 0)

    def knows(self, rows: int) -> bool:
        """Whether a number of rows near this one is measured, or a smaller and a larger one are."""
        if self._is_stale:
            self._rebuild()
        known = self._rows
        return bool(known) and known[0] <= REACH * rows and rows <= REACH * known[-1]

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
        self._rows, self._shape = full, [sorted(s)[int(len(s) * self._share)] for s in (self._buckets[n].samples for n in full)]
        if self._grows:
            self._shape = list(accumulate(reversed(self._shape), min))[::-1]
        self._memo.clear()
        self._is_stale = False


class StepCosts:
    """seconds(n, k): a step of n sequences and k drafts, as what it takes without drafts and what drafts add to that.

    Drafts add more than their rows: the host lays out and judges a step that is not the last one again, the device may wait for it, and
    rows are padded to the next captured number. So a step of 64 sequences and one draft is no step of 65 sequences. What drafts add is
    learned for classes of n, powers of two. Where it is not measured yet, the estimate is what k more sequences take: optimistic.
    """

    def __init__(self, points: Mapping[tuple[int, int], float] | None = None):
        """`points`: seconds as measured before, as `points` returns them."""
        by_class: dict[int, dict[int, float]] = {}
        for (sequences, drafts), seconds in (points or {}).items():
            by_class.setdefault(_class_of(sequences) if drafts else 0, {})[drafts or sequences] = seconds
        self.plain = CostCurve(by_class.pop(0, None))
        self._extras = {number: _extra_curve(number, extra) for number, extra in by_class.items()}

    def knows(self, sequences: int) -> bool:
        """Whether it is known what steps of about that number of sequences take without drafts. Until then none are worth a try."""
        return self.plain.knows(sequences)

    def seconds(self, sequences: int, drafts: int) -> float:
        """The estimate; relative to a step of one row if nothing is known at all."""
        if not drafts:
            return self.plain.seconds(sequences)
        extra = self._extras.get(_class_of(sequences))
        if extra is None or not extra.range[1]:
            return self.plain.seconds(sequences + drafts)
        base, more, (least, most) = self.plain.seconds(sequences), extra.seconds(drafts), extra.range
        if not least <= drafts <= most and self.knows(sequences + drafts):  # more sequences tell more than a few drafts do
            rows = self.plain.seconds(sequences + drafts)
            if drafts < least:
                more = min(more, max(MIN_EXTRA * base, rows - base))
            else:
                more = max(more, extra.seconds(most) + rows - self.plain.seconds(sequences + most))
        return base + more

    def observe(self, sequences: int, drafts: int, seconds: float) -> None:
        """A step took so long. With drafts it counts only where steps without are known: first what they take, then what drafts add."""
        if drafts and self.knows(sequences):
            plain, number = self.plain.seconds(sequences), _class_of(sequences)
            if number not in self._extras:
                self._extras[number] = _extra_curve(number)
            self._extras[number].observe(drafts, max(MIN_EXTRA * plain, _positive(seconds) - plain))
        elif not drafts:
            self.plain.observe(sequences, seconds)
            for extra in self._extras.values():
                extra.age()

    def points(self) -> dict[tuple[int, int], float]:
        """What is measured: seconds of (n, 0), and what drafts add of (the largest n of a class, k)."""
        extra = {(number, drafts): s for number, curve in self._extras.items() for drafts, s in curve.points().items()}
        return {(sequences, 0): s for sequences, s in self.plain.points().items()} | extra


def _extra_curve(number: int, points: Mapping[int, float] | None = None) -> CostCurve:
    """For a class of more than MAX_FEW sequences by medians: what drafts add is small next to the noise of such a step, and the number that
    seems cheap by luck would be chosen.
    """
    return CostCurve(points, grows=True, share=0.25 if number <= MAX_FEW else 0.5)


def _class_of(sequences: int) -> int:
    """The next power of two."""
    return 1 << (sequences - 1).bit_length()


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
