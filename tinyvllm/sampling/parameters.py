"""What a sequence's sampling parameters mean for a draw: which features it needs, and its parameter row of twelve 32-bit numbers."""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.ops.sample import TOP_P_ONE
from tinyvllm.request import SamplingParams
from tinyvllm.sampling.penalties import has_penalties, needs_mask


class Column(IntEnum):
    """The columns of a parameter row: 32-bit integers, and float32 by their bits."""

    SEEN_ROW = 0  # of the tables in penalties.py; the scratch row for sequences that need none
    BIAS_ROW = 1
    SEED_LOW = 2
    SEED_HIGH = 3
    POSITION = 4  # number of output tokens before this one
    INVERSE_TEMPERATURE = 5  # float; 0 is greedy
    TOP_K = 6  # V is off
    TOP_P = 7  # in units of 1 / TOP_P_ONE, rounded down; TOP_P_ONE is off
    MIN_P = 8  # float: how far below the largest logit a token may be, temperature * log(min_p); -inf is off
    REPETITION = 9  # float
    PRESENCE = 10  # float
    FREQUENCY = 11  # float


@dataclass(frozen=True)
class SamplingFlags:
    """What at least one row of a batch needs, and therefore what its step computes. All off is the plain argmax."""

    sampled: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalized: bool = False
    biased: bool = False
    masked: bool = False

    def __or__(self, other: SamplingFlags) -> SamplingFlags:
        return SamplingFlags(*(a or b for a, b in zip(_values(self), _values(other), strict=True)))

    def __bool__(self) -> bool:
        return any(_values(self))

    @property
    def filtered(self) -> bool:
        return self.top_k or self.top_p or self.min_p


def _values(flags: SamplingFlags) -> tuple[bool, ...]:
    return (flags.sampled, flags.top_k, flags.top_p, flags.min_p, flags.penalized, flags.biased, flags.masked)


def flags_of(params: SamplingParams) -> SamplingFlags:
    """What one sequence needs; `biased` as far as logit_bias goes. Filters do nothing to a greedy row."""
    sampled = not params.greedy
    return SamplingFlags(
        sampled=sampled,
        top_k=sampled and params.top_k > 0,
        top_p=sampled and params.top_p < 1.0,
        min_p=sampled and params.min_p > 0.0,
        penalized=has_penalties(params),
        biased=bool(params.logit_bias),
        masked=needs_mask(params),
    )


def parameter_row(params: SamplingParams, flags: SamplingFlags, row: int, scratch_row: int, vocab_size: int) -> np.ndarray:
    """The parameter row int32 [12] of the sequence in `row`; its position is filled in for each draw."""
    numbers = np.zeros(len(Column), dtype=np.uint32)
    floats, seed, temperature = numbers.view(np.float32), params.seed or 0, params.temperature
    numbers[Column.SEEN_ROW] = row if flags.penalized else scratch_row
    numbers[Column.BIAS_ROW] = row if flags.biased else scratch_row
    numbers[Column.SEED_LOW], numbers[Column.SEED_HIGH] = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    floats[Column.INVERSE_TEMPERATURE] = 1.0 / temperature if flags.sampled else 0.0
    numbers[Column.TOP_K] = min(params.top_k, vocab_size) if flags.top_k else vocab_size
    numbers[Column.TOP_P] = int(params.top_p * TOP_P_ONE) if flags.top_p else TOP_P_ONE
    floats[Column.MIN_P] = temperature * math.log(params.min_p) if flags.min_p else -math.inf
    floats[Column.REPETITION], floats[Column.PRESENCE] = params.repetition_penalty, params.presence_penalty
    floats[Column.FREQUENCY] = params.frequency_penalty
    return numbers.view(np.int32)
