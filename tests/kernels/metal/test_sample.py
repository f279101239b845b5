"""Sampling on Metal: the tokens of the CPU's kernel, however a row is divided and however its threshold is searched."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.emulate import emulate
from tests.kernels.calling import aligned
from tests.kernels.cuda.test_sample import FEATURES, FILTERS, INF, NAN, Rows, pytestmark  # noqa: F401 (the mark is pytest's)
from tinyvllm.backends.kernel import Kernel


class MetalRows(Rows):
    """Requests as the kernels see them; `on_gpu` draws with the Metal kernel."""

    def on_gpu(
        self, which: list[int], features: tuple[str, ...] = FEATURES, parts: int = 1, threads: int = 64, capacity: int = 2047,
        seed: int = 0, padding: int = 0,
    ) -> tuple[np.ndarray, ...]:  # fmt: skip
        """Tokens, parameters and counts after a draw of these rows, with a scratch of arbitrary bits."""
        on, B, filtered = {name: int(name in features) for name in FEATURES}, len(which), bool(FILTERS & {*features})
        rows = B + padding
        scratch = aligned((rows * (16 * parts + 16 + filtered * (4 * threads + 8 * (capacity + 1))),), np.uint8)
        outs, ins = self._arrays(which, on, scratch)
        defines = {"V": self.V, "NEUTRAL_ROW": self.neutral, "PARTS": parts, "THREADS": threads, "CAPACITY": capacity, **on}
        for stage in ("LOOK",) * filtered + ("GATHER", "DRAW") if parts > 1 else ("WHOLE",):
            grid = (1 if stage == "DRAW" else parts, rows, 1)
            named = tuple({**defines, "STAGE": stage}.items())
            emulate(Kernel("sample", "metal", "apple7", named, len(outs), len(ins), grid=grid, block=threads), *outs, *ins, seed=seed)
        return outs[0], outs[1], outs[3] if on["PENALIZED"] else self.seen


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("V", [1000, 1003])
def test_tokens_positions_and_counts_are_the_cpus(V: int, parts: int) -> None:
    """All features at once; also rows whose length is no multiple of four. All logits fit the list, then hardly any do."""
    MetalRows(12, V, 1).agree(parts=parts, seed=parts)
    MetalRows(12, V, 2).agree(parts=parts, seed=parts, capacity=127, threads=128)


NEEDS = [(), *(("SAMPLED", *needs) for needs in ((), ("TOP_K",), ("TOP_P",), ("MIN_P",), ("PENALIZED",), ("BIASED",)))]


@pytest.mark.parametrize("needs", NEEDS, ids="+".join)
def test_features_that_other_rows_need_change_no_token(needs: tuple[str, ...]) -> None:
    """Rows that need these features: in a kernel compiled for them, in one part and in several."""
    rows = MetalRows(6, 700, 3, needs)
    rows.agree(needs, capacity=127)
    rows.agree(needs, capacity=127, parts=4, seed=1)


def test_at_full_size() -> None:
    """512 threads, a list of 2047, and a vocabulary that is longer."""
    MetalRows(3, 3000, 4).agree(threads=512)
    MetalRows(2, 3000, 5, ("SAMPLED", "TOP_P")).agree(("SAMPLED", "TOP_P"), threads=512, parts=2)


def test_a_row_does_not_depend_on_the_batch() -> None:
    rows, indices = MetalRows(6, 600, 6), list(range(6))
    together = rows.on_gpu(indices)[0].tolist()
    assert [rows.on_gpu([b])[0][0] for b in indices] == together
    assert rows.on_gpu(indices[::-1], padding=2, parts=2)[0].tolist() == together[::-1]


def test_rows_without_a_token_and_ties() -> None:
    """A NaN of either sign invalidates its row and no other; infinity wins; of equal logits the first wins, and both zeros are equal."""
    negative_nan = np.array([0xFFC00000], np.uint32).view(np.float32)[0]
    for needs in ((), ("SAMPLED", "TOP_K", "TOP_P", "MIN_P")):
        rows = MetalRows(6, 500, 7, needs)
        rows.logits[:] = np.random.default_rng(8).standard_normal(rows.logits.shape)
        rows.logits[0, 499], rows.logits[1, 3], rows.logits[2], rows.logits[3:5] = NAN, negative_nan, NAN, -INF
        rows.logits[4, 130], rows.logits[5, [200, 400]] = -5, INF
        for parts in (1, 4):
            assert rows.on_gpu(list(range(6)), needs, parts=parts)[0].tolist() == [-1, -1, -1, -1, 130, 200]
    rows = MetalRows(3, 500, 9, ())
    rows.logits[0, [77, 300, 499]] = 50
    rows.logits[1] = np.where(np.arange(500) % 2, 0.0, -0.0)
    rows.logits[2] = np.where(np.arange(500) == 9, 3e-45, np.where(np.arange(500) == 8, 1e-45, 0.0))  # subnormal numbers are ordered
    assert all(rows.on_gpu([0, 1, 2], (), parts=parts)[0].tolist() == [77, 0, 9] for parts in (1, 4))


def test_the_last_launch_of_unfiltered_rows_may_be_one_simd_group() -> None:
    rows = MetalRows(2, 500, 16, ("SAMPLED",))
    outs, ins = rows._arrays([0, 1], {name: int(name == "SAMPLED") for name in FEATURES}, aligned((2 * (16 * 4 + 16),), np.uint8))
    defines = {"V": 500, "NEUTRAL_ROW": 2, "PARTS": 4, **{name: int(name == "SAMPLED") for name in FEATURES}}
    for stage, parts, threads in (("GATHER", 4, 64), ("DRAW", 1, 32)):
        named = tuple({**defines, "STAGE": stage, "THREADS": threads}.items())
        emulate(Kernel("sample", "metal", "apple7", named, len(outs), len(ins), grid=(parts, 2, 1), block=threads), *outs, *ins)
    np.testing.assert_array_equal(outs[0], rows.on_cpu([0, 1], ("SAMPLED",))[0])


@pytest.mark.parametrize("capacity", [63, 2047])
def test_edges_of_thresholds(capacity: int) -> None:
    """Equal logits at the k-th place are all kept, a share that is reached exactly ends there, and one more logit changes what is kept."""
    V, count = 300, 16
    rows = MetalRows(count, V, 10, ("SAMPLED", "TOP_K", "TOP_P", "MIN_P"))
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
    """Flat rows: none of the 180 or so listed logits may be lost, and hundreds more are kept, whose weights count as well."""
    rows = MetalRows(9, 1000, 12, ("SAMPLED",))
    rows.logits[:] = np.random.default_rng(13).standard_normal(rows.logits.shape) / 4
    rows.params.view(np.float32)[:, 5] = 1.0
    rows.params[:6, 6], rows.params[3:, 7] = 500, int(0.9 * 2**30)
    rows.agree(("SAMPLED", "TOP_K", "TOP_P"), parts=parts, capacity=400)


def test_adjacent_floats_in_a_wide_range() -> None:
    """A threshold is exact to the last bit even where the search starts from the whole range of float32."""
    rows = MetalRows(8, 300, 14, ("SAMPLED",))
    rows.logits[:] = np.float32(-1) - np.random.default_rng(15).permuted(np.tile(np.arange(300), (8, 1)), axis=1) * np.float32(2**-23)
    rows.logits[:, ::50] = -3e38
    rows.params.view(np.float32)[:, 5], rows.params[:, 6] = 1.0, np.arange(1, 9) * 30
    rows.agree(("SAMPLED", "TOP_K"), capacity=63)
    rows.agree(("SAMPLED", "TOP_K"))


@pytest.mark.parametrize("capacity", [63, 2047])
def test_the_last_token_that_is_kept(capacity: int) -> None:
    """Seeds for which the CPU draws the lowest logit that top_k keeps; the logits are adjacent floats."""
    V, k, needs = 300, 24, ("SAMPLED", "TOP_K")
    rows = MetalRows(400, V, 17, ("SAMPLED",))
    rows.logits[:] = np.float32(-1) - np.random.default_rng(18).permuted(np.tile(np.arange(V), (400, 1)), axis=1) * np.float32(2**-23)
    rows.params.view(np.float32)[:, 5], rows.params[:, 6] = 1.0, k
    rows.logits[:, -1] = -3e38
    drawn = rows.on_cpu(list(range(400)), needs)[0]
    above = (rows.logits > rows.logits[np.arange(400), drawn][:, None]).sum(1)
    last = np.flatnonzero(above == k - 1)[:12].tolist()
    assert len(last) == 12
    assert rows.on_gpu(last, needs, capacity=capacity)[0].tolist() == drawn[last].tolist()


def test_thousands_of_tokens_of_small_weight() -> None:
    """Together they outweigh what top_p drops, each is less than 2^-17 of the peak: seeds for which the CPU draws one of them."""
    V, needs = 4000, ("SAMPLED", "TOP_P")
    rows = MetalRows(300, V, 19, ("SAMPLED",))
    rows.logits[:], rows.logits[:, 7] = -12.5, 0
    rows.params.view(np.float32)[:, 5], rows.params[:, 7] = 1.0, int(0.995 * 2**30)
    drawn = rows.on_cpu(list(range(300)), needs)[0]
    light = np.flatnonzero(drawn != 7)[:2].tolist()
    assert len(light) == 2
    assert rows.on_gpu(light, needs)[0].tolist() == drawn[light].tolist()


@pytest.mark.parametrize("V", [1, 5])
def test_no_token_from_after_the_end_is_drawn(V: int) -> None:
    rows = MetalRows(16, V, 20, ("SAMPLED",))
    rows.logits[:], rows.params.view(np.float32)[:, 5] = 0, 1.0
    rows.agree(("SAMPLED",))
