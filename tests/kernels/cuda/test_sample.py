"""Sampling on the GPU: the tokens of the CPU kernel in every draw, however a row is divided and whichever way its threshold is found."""

from __future__ import annotations

import platform

import numpy as np
import pytest

from tests.emulator.emulate import emulate
from tests.kernels.calling import aligned, call
from tinyvllm.backends.cpu.toolchain import cpu_features
from tinyvllm.backends.kernel import Kernel

FEATURES = ("SAMPLED", "TOP_K", "TOP_P", "MIN_P", "PENALIZED", "BIASED")
FILTERS = frozenset(("TOP_K", "TOP_P", "MIN_P"))
CPU = "avx512" if "avx512f" in cpu_features() else "avx2" if {"avx2", "fma", "f16c"} <= cpu_features() else "plain"
INF, NAN = np.inf, np.nan

pytestmark = pytest.mark.skipif(CPU == "plain" and platform.machine() not in ("arm64", "aarch64"), reason="without fused multiply-add")


class Rows:
    """Requests as the kernels see them: logits, parameters, and a row of each table; the neutral one where a table is not needed."""

    def __init__(self, count: int, V: int, seed: int, needs: tuple[str, ...] = FEATURES):
        random = np.random.default_rng([seed, V])
        self.V, self.neutral = V, count
        self.logits = np.stack([_logits(random, V) for _ in range(count)])
        self.seen = random.integers(0, 3, (count + 1, V)).astype(np.int32)
        self.prompted = random.integers(0, 2, (count + 1, V)).astype(np.uint8)
        self.bias = random.standard_normal((count + 1, V)).astype(np.float32)
        self.params = np.zeros((count, 12), np.int32)
        has = {name: (random.random(count) < 0.6) & (name in needs) for name in FEATURES}
        floats = self.params.view(np.float32)
        self.params[:, 0] = np.where(has["PENALIZED"], np.arange(count), count)
        self.params[:, 1] = np.where(has["BIASED"], np.arange(count), count)
        self.params[:, 2:5] = random.integers(-(2**31), 2**31, (count, 3))
        floats[:, 5] = np.where(has["SAMPLED"] | (random.random(count) < 0.3), random.choice([0.6, 1.0, 3.3], count), 0)
        floats[:, 5] *= "SAMPLED" in needs
        self.params[:, 6] = np.where(has["TOP_K"], random.choice([1, 2, 5, 40, V // 20 + 1, V // 2, V - 1], count), V)
        self.params[:, 7] = np.where(has["TOP_P"], (random.choice([0.05, 0.5, 0.9, 0.999], count) * 2**30).astype(np.int32), 2**30)
        floats[:, 8] = np.where(has["MIN_P"], random.choice([-0.1, -2.5, -7.0], count), -INF)
        floats[:, 9:] = np.where(has["PENALIZED"][:, None], (1.2, 0.5, 0.25), (1, 0, 0))

    def on_cpu(self, which: list[int], features: tuple[str, ...] = FEATURES) -> tuple[np.ndarray, ...]:
        """Tokens, parameters and counts after a draw of these rows."""
        on, B = {name: int(name in features) for name in FEATURES}, len(which)
        tables, filtered = on["PENALIZED"] | on["BIASED"], int(bool(FILTERS & {*features}))
        scratch = aligned((2 * 64 * 192 + 4 * B * (tables * self.V + filtered * (self.V + -(-self.V // 128))),), np.uint8)
        outs, ins = self._arrays(which, on, scratch)
        defines = (("V", self.V), ("NEUTRAL_ROW", self.neutral), *on.items())
        call(Kernel("sample", "cpu", CPU, defines, len(outs), len(ins)), *outs, *ins, extra=("-ffp-contract=off",))
        return outs[0], outs[1], outs[3] if on["PENALIZED"] else self.seen

    def on_gpu(
        self, which: list[int], features: tuple[str, ...] = FEATURES, parts: int = 1, threads: int = 64, capacity: int = 4095,
        seed: int = 0, padding: int = 0,
    ) -> tuple[np.ndarray, ...]:  # fmt: skip
        """The same on the GPU. Padded rows, parts and sizes of the search must change nothing."""
        on, B, filtered = {name: int(name in features) for name in FEATURES}, len(which), bool(FILTERS & {*features})
        rows = B + padding
        scratch = aligned((rows * (32 + filtered * (4 * threads + 8 * (capacity + 1))) * (parts > 1),), np.uint8, 0)
        outs, ins = self._arrays(which, on, scratch)
        defines = {"V": self.V, "NEUTRAL_ROW": self.neutral, "THREADS": threads, "CAPACITY": capacity, **on}
        for stage in ("LOOK", "DRAW") if filtered and parts > 1 else ("WHOLE",):
            kernel = Kernel.cuda("sample", "sm_80", len(outs), len(ins), (parts, rows, 1), threads, STAGE=stage, **defines)
            emulate(kernel, *outs, *ins, seed=seed)
        assert not scratch.any(), "the scratch must be all zeros again"
        return outs[0], outs[1], outs[3] if on["PENALIZED"] else self.seen

    def _arrays(self, which: list[int], on: dict[str, int], scratch: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        outs = [aligned((len(which),), np.int32), self.params[which].copy(), scratch]
        outs += [aligned(self.seen.shape, np.int32, self.seen)] if on["PENALIZED"] else []
        ins = [aligned((len(which), self.V), np.float32, self.logits[which])]
        ins += [aligned(self.prompted.shape, np.uint8, self.prompted)] if on["PENALIZED"] else []
        ins += [aligned(self.bias.shape, np.float32, self.bias)] if on["BIASED"] else []
        return outs, [*ins, np.array([len(which)], np.int32)]

    def agree(self, features: tuple[str, ...] = FEATURES, **options: int) -> None:
        every_row = list(range(len(self.params)))
        for got, expected, what in zip(
            self.on_gpu(every_row, features, **options), self.on_cpu(every_row, features), ("tokens", "params", "seen")
        ):
            np.testing.assert_array_equal(got, expected, what)


def _logits(random: np.random.Generator, V: int) -> np.ndarray:
    """A row: mostly of a normal distribution, sometimes one that makes searches hard or draws impossible."""
    row = random.standard_normal(V) * random.choice([0.5, 2.0, 6.0])
    kind = random.integers(0, 16)
    if kind == 0:
        row = np.round(row)
    elif kind == 1:
        row[:] = 1.5
    elif kind == 2:
        row[random.random(V) < 0.7] = -INF
    elif kind == 3:
        row = random.choice([-1.0, 1.0], V) * 10.0 ** random.uniform(-37, 37, V)
    elif kind == 4:
        row[random.integers(V)] = NAN
    elif kind == 5:
        row[:] = -INF
    elif kind == 6:
        row[random.integers(0, V, 3)] = INF
    return row.astype(np.float32)


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("V", [1000, 1003])
def test_tokens_positions_and_counts_are_the_cpus(V: int, parts: int) -> None:
    """All features at once, also for rows whose length is not a multiple of four. All fits in the list, then hardly anything does."""
    Rows(16, V, 1).agree(parts=parts, seed=parts)
    Rows(16, V, 2).agree(parts=parts, seed=parts, capacity=127, threads=128)


NEEDS = [(), *(("SAMPLED", *needs) for needs in ((), ("TOP_K",), ("TOP_P",), ("MIN_P",), ("TOP_K", "TOP_P"), ("PENALIZED",), ("BIASED",)))]


@pytest.mark.parametrize("needs", [*NEEDS, ("PENALIZED", "BIASED")], ids="+".join)
def test_features_of_other_rows_change_no_token(needs: tuple[str, ...]) -> None:
    """Rows that need these features: in a kernel compiled for them, in one part and in several, and in the one with all features."""
    rows = Rows(8, 700, 3, needs)
    rows.agree(needs, capacity=127)
    rows.agree(needs, capacity=127, parts=4)
    rows.agree(FEATURES, capacity=127)


def test_at_full_size() -> None:
    """1024 threads, a list of 4095, and a vocabulary that is longer."""
    Rows(3, 6000, 4).agree(threads=1024)
    Rows(2, 6000, 5, ("SAMPLED", "TOP_P")).agree(("SAMPLED", "TOP_P"), threads=1024, parts=2)


def test_a_row_does_not_depend_on_other_rows() -> None:
    rows, every_row = Rows(6, 600, 6), list(range(6))
    together = rows.on_gpu(every_row)[0].tolist()
    assert [rows.on_gpu([b])[0][0] for b in every_row] == together
    assert rows.on_gpu(every_row[::-1], padding=2, parts=2)[0].tolist() == together[::-1]


def test_rows_without_a_token_and_ties() -> None:
    """A NaN of either sign affects its row and no other; infinity wins; of equals the first, and the two zeros are equal."""
    negative_nan = np.array([0xFFC00000], np.uint32).view(np.float32)[0]
    for needs in ((), ("SAMPLED",), ("SAMPLED", "TOP_K", "TOP_P", "MIN_P")):
        rows = Rows(6, 500, 7, needs)
        rows.logits[:] = np.random.default_rng(8).standard_normal(rows.logits.shape)
        rows.logits[0, 499], rows.logits[1, 3], rows.logits[2], rows.logits[3:5] = NAN, negative_nan, NAN, -INF
        rows.logits[4, 130], rows.logits[5, [200, 400]] = -5, INF
        for parts in (1, 4):
            assert rows.on_gpu(list(range(6)), needs, parts=parts)[0].tolist() == [-1, -1, -1, -1, 130, 200]
    rows = Rows(2, 500, 9, ())
    rows.logits[0, [77, 300, 499]] = 50
    rows.logits[1] = np.where(np.arange(500) % 2, 0.0, -0.0)
    assert all(rows.on_gpu([0, 1], (), parts=parts)[0].tolist() == [77, 0] for parts in (1, 4))


@pytest.mark.parametrize("capacity", [63, 4095])
def test_borders_of_thresholds(capacity: int) -> None:
    """All logits equal to the k-th survive, top_p that is met exactly ends there, and one logit more changes which survive."""
    V, count = 300, 24
    rows = Rows(count, V, 10, ("SAMPLED", "TOP_K", "TOP_P", "MIN_P"))
    weights = np.random.default_rng(11).choice([1.0, 2.0, 4.0, 8.0], (count, V))
    rows.logits[:] = np.log(weights)
    rows.params.view(np.float32)[:, 5], rows.params.view(np.float32)[:, 8] = 1.0, -INF
    rows.params[:, 6], rows.params[:, 7] = V, 2**30
    for b in range(count):
        if b % 2:
            rows.params[b, 6] = (weights[b] == 8).sum() + b % 3 - 1
        else:
            rows.params[b, 7] = int(8 * (weights[b] == 8).sum() / weights[b].sum() * 2**30) + b % 3 - 1
    rows.agree(("SAMPLED", "TOP_K", "TOP_P"), capacity=capacity)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_list_that_is_too_short(parts: int) -> None:
    """Flat rows: the list holds about 180 logits, but hundreds more survive, and their weights count."""
    rows = Rows(12, 1000, 12, ("SAMPLED",))
    rows.logits[:] = np.random.default_rng(13).standard_normal(rows.logits.shape) / 4
    rows.params.view(np.float32)[:, 5] = 1.0
    rows.params[:8, 6], rows.params[4:, 7] = 500, int(0.9 * 2**30)
    rows.agree(("SAMPLED", "TOP_K", "TOP_P"), parts=parts, capacity=400)


@pytest.mark.parametrize("capacity", [63, 4095])
def test_neighbours_in_a_wide_range(capacity: int) -> None:
    """A threshold is exact to the last bit even where the search starts from the full range of float32."""
    rows = Rows(12, 300, 14, ("SAMPLED",))
    rows.logits[:] = np.float32(-1) - np.random.default_rng(15).permuted(np.tile(np.arange(300), (12, 1)), axis=1) * np.float32(2**-23)
    rows.logits[:, ::50] = -3e38
    rows.params.view(np.float32)[:, 5], rows.params[:, 6] = 1.0, np.arange(1, 13) * 20
    rows.agree(("SAMPLED", "TOP_K"), capacity=capacity)
