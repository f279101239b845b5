"""attention_decode of the Metal backend where sequences share blocks: bytes read from the cache, and planted faults.

A module without `emulate`, as a GPU neither counts bytes nor detects faults (tests/metal/on_gpu.py).
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator import emulate as emulator
from tests.kernels.metal.test_attention import TOLERANCE
from tests.kernels.metal.test_attention_shared import GROUPS, decode_shared
from tests.kernels.test_attention import Case, Shape, grouped, make, oracle

WIDE = Shape(H=2, K=1, D=128, dtype="F16")  # eight sequences a unit, eight keys a tile: a unit shares 64 keys of a partition or more


def tokens_read(case: Case, shared_prefix_lens: list[int], spread: int = 1) -> int:
    """The number of tokens whose keys and values are read."""
    read: list[int] = []
    decode_shared(case, shared_prefix_lens, spread=spread, read=read)
    tokens, rest = divmod(read[3], 2 * case.shape.K * case.shape.D * 2)
    assert rest == 0
    return tokens


# Sequences, shared tokens, own tokens of each, and tokens read.
READ = [
    (2, 256, 16, 256 + 2 * 16),
    (3, 256, 16, 256 + 3 * 16),
    (8, 128, 16, 128 + 8 * 16),
    (9, 128, 16, 128 + 128 + 9 * 16),  # the ninth has a threadgroup of its own
    (16, 128, 5, 2 * 128 + 16 * 8),
    (8, 192, 16, 192 + 8 * 16),  # half of the second partition
    (8, 208, 47, 208 + 8 * 48),
    (4, 192, 100, 192 + 4 * 104),  # half of it as well, and own tokens in two partitions
    (4, 176, 80, 128 + 4 * (48 + 80)),  # less than half: each alone
    (4, 48, 16, 4 * 64),  # not a tile for each SIMD group
]


@pytest.mark.parametrize("sequences, common, own, tokens", READ, ids=[f"{n} after {c}, {o} own" for n, c, o, _ in READ])
def test_tokens_read_from_the_cache(sequences: int, common: int, own: int, tokens: int) -> None:
    case = make(WIDE, [1] * sequences, [common + own] * sequences, shared=[0] + [common] * (sequences - 1))
    assert tokens_read(case, [0] * sequences) == sequences * -(-(common + own) // 8) * 8
    assert tokens_read(case, case.shared) == tokens


def test_a_longer_sequence_continues_alone() -> None:
    """It shares a part with the others and reads the rest alone."""
    case = make(WIDE, [1] * 4, [144, 144, 700, 144], shared=[0, 128, 128, 128])
    assert tokens_read(case, [0] * 4) - tokens_read(case, case.shared) == 3 * 128


def test_smaller_shared_lengths_read_more() -> None:
    case = grouped(WIDE, groups=GROUPS)
    lengths = case.shared, [n // 32 * 16 for n in case.shared], [0] * len(case.new)
    once, some, apart = (tokens_read(case, shared_prefix_lens) for shared_prefix_lens in lengths)
    assert once < some < apart == sum(-(-n // 8) * 8 for n in case.context)


def test_enough_threadgroups_remain() -> None:
    """Units are smaller where few threadgroups would remain: here 16 have work if nothing is shared."""
    case = make(WIDE, [1] * 8, [130] * 8, shared=[0] + [128] * 7)
    apart = tokens_read(case, [0] * 8)
    assert [(apart - tokens_read(case, case.shared, spread)) // 128 for spread in (2, 3, 5, 9)] == [7, 6, 4, 0]


# Code that keeps the bits the same or separates threads: removing it is detected.
FAULTS = [
    ("tiles.values = tiles.keys + CONCURRENT * TILE", "tiles.values = tiles.keys", "race"),
    ("threadgroup_barrier(mem_flags::mem_threadgroup);\n    if (takes_part) {\n#pragma unroll\n", "if (takes_part) {\n#pragma unroll\n",
     "race|never written"),
    ("merge(merged, exchange, sums, unit, to.heads, stripes, thread_index, simd, lane);\n      "
     "threadgroup_barrier(mem_flags::mem_threadgroup);",
     "merge(merged, exchange, sums, unit, to.heads, stripes, thread_index, simd, lane);", "race"),
    ("merged.o[m] * factors.x", "merged.o[m]", "same"),
    ("min(simd_min(min(shared, context)), end)", "end", "same"),  # beyond what all share
]  # fmt: skip


@pytest.mark.parametrize("old, new, fault", FAULTS, ids=["one buffer", "keys' barrier", "merge's barrier", "rescaling", "common"])
def test_planted_faults_are_detected(monkeypatch: pytest.MonkeyPatch, old: str, new: str, fault: str) -> None:
    case = make(WIDE, [1] * 3, [225, 210, 220], shared=[0, 192, 208])
    shipped = emulator.kernel_text

    def changed(*arguments: object, **options: object) -> str:
        text = shipped(*arguments, **options)  # type: ignore[arg-type]
        assert text.count(old) == 1, old
        return text.replace(old, new)

    monkeypatch.setattr(emulator, "kernel_text", changed)
    if fault == "same":
        assert not np.allclose(decode_shared(case, case.shared), oracle(case), **TOLERANCE)
    else:
        with pytest.raises(emulator.EmulatorError, match=fault):
            for seed in range(4):
                decode_shared(case, case.shared, seed=seed)
