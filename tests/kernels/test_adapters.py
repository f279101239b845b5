"""The GPUs' kernels of low-rank adapters, in the emulator, against float64: lora_shrink and lora_bias."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.emulate import emulate
from tests.kernels.calling import aligned
from tests.kernels.cuda.tiles import close, laid, numbers, one, same_bits, untouched
from tinyvllm.backends.low_rank import plan
from tinyvllm.backends.shapes import AdapterProduct

VARIANTS = {"cuda": "sm_80", "metal": "apple7"}
EPS, E = 1e-5, 1056
ADAPTERS = (1, 0, 2, 2, 2, 2, 3, 1, 2, 0, 0, 1, 3)  # of each row: neighbours with one, alone, across units of four rows


class Adapters:
    """Three adapters of ranks 5, R and 0, and rows that have one of them or none."""

    def __init__(self, T: int, O: int, R: int, starts: tuple[int, ...], normed: bool, biased: bool) -> None:
        self.ranks, self.starts, self.O, self.R = np.array([5, R, 0], np.int32), starts, O, R
        self.x, self.norm = numbers(T, E), numbers(E, seed=1) if normed else None
        self.a, self.b = numbers(3, len(starts), R, E, seed=2), numbers(3, R, O, seed=3)
        self.bias, self.adapters = numbers(O, seed=4) if biased else None, np.array(ADAPTERS[:T], np.int32)

    def run(self, backend: str, rows: list[int], count: int | None = None, seed: int = 0) -> np.ndarray:
        """float32 [len(rows), O] of a batch of these rows."""
        T, starts = len(rows), self.starts
        p = AdapterProduct(T, self.O, E, self.R, starts, None if self.norm is None else f"{EPS}f", self.bias is not None)
        shrink, expand = plan(backend, VARIANTS[backend], p)
        hidden, out = aligned((T, p.hidden), np.float32), aligned((T, self.O), np.float32)
        last = laid(self.ranks), laid(self.adapters[rows]), one(T if count is None else count)
        emulate(shrink, hidden, laid(self.x[rows]), *([] if self.norm is None else [self.norm]), self.a, *last, seed=seed)
        emulate(expand, out, hidden, self.b, last[0], *([] if self.bias is None else [self.bias]), *last[1:], seed=seed)
        return out

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """float64 [T, O], and the magnitude of its sums."""
        x, ends = self.x.astype(np.float64), [*self.starts[1:], self.O]
        if self.norm is not None:
            x = x * self.norm / np.sqrt((x**2).mean(1, keepdims=True) + EPS)
        out = np.zeros((len(x), self.O)) + (0 if self.bias is None else self.bias)
        size = np.abs(out)
        for t, n in enumerate(self.adapters - 1):
            rank = 0 if n < 0 else self.ranks[n]
            for p, (start, end) in enumerate(zip(self.starts, ends, strict=True)):
                a, b = self.a[n, p, :rank].astype(np.float64), self.b[n, :rank, start:end].astype(np.float64)
                out[t, start:end] += a @ x[t] @ b
                size[t, start:end] += np.abs(a) @ np.abs(x[t]) @ np.abs(b)
        return out, size


SHAPES = [  # T, O, R, starts, normed, biased
    (1, 528, 64, (0,), False, True),
    (8, 112, 8, (0, 48, 64, 96), True, False),
    (13, 64, 24, (0, 32), True, True),
    (13, 544, 8, (0,), False, False),
]


@pytest.mark.parametrize("backend", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_row_gets_what_its_adapter_adds(backend: str, shape: tuple[int, int, int, tuple[int, ...], bool, bool]) -> None:
    """What no rank has is poison between the two launches. Rows after the last are not written."""
    data, T = Adapters(*shape), shape[0]
    count = T - (T > 2)
    got, (want, size) = data.run(backend, [*range(T)], count, seed=T), data.expected()
    close(got[:count], want[:count], size[:count] + 1e-3)
    assert untouched(got[count:])
    alone = np.isin(data.adapters[:count], (0, 3))
    neutral = np.full(data.O, -0.0, np.float32) if data.bias is None else data.bias
    same_bits(got[:count][alone], np.broadcast_to(neutral, (alone.sum(), data.O)).copy())


@pytest.mark.parametrize("backend", VARIANTS)
def test_a_row_has_the_same_bits_in_any_batch(backend: str) -> None:
    """Alone, with other neighbours, in units of one row and of four."""
    data = Adapters(*SHAPES[2])
    together = data.run(backend, [*range(13)])
    for rows in ([0], [2], [3, 11, 8], np.random.default_rng(0).permutation(13).tolist(), [2, 3, 4, 5, 8, 2, 2, 2, 2, 7]):
        same_bits(data.run(backend, rows, seed=1), together[rows])


@pytest.mark.parametrize("backend", VARIANTS)
def test_what_is_not_finite_stays_in_its_row(backend: str) -> None:
    data = Adapters(*SHAPES[1])
    want = data.run(backend, [*range(8)])
    data.x[3, 70], data.x[1, 3] = np.nan, np.inf
    got = data.run(backend, [*range(8)])
    assert np.isnan(got[3]).all()
    same_bits(np.delete(got, 3, axis=0), np.delete(want, 3, axis=0))  # row 1 has no adapter
