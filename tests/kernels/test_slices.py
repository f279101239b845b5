"""Products of the CPU as a tree over 8 slices of their columns: the sum that ranks of tensor parallelism share."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.calling import aligned
from tests.kernels.test_products import FORMATS, TARGETS, matmul, matmul_kernel, numbers
from tinyvllm.backends.kernel import Kernel
from tinyvllm.quant.formats import FORMATS as TABLE
from tinyvllm.quant.layouts import BLOCK, pack_panels
from tinyvllm.quant.random_rows import packable_width, random_rows
from tinyvllm.quant.slices import ALL_SLICES, slice_columns, slice_unit

O = 35


def panels_of(format: str, rows: np.ndarray) -> np.ndarray:
    packed = pack_panels(format, rows)
    panels = aligned(packed.shape, np.uint8)
    panels[...] = packed
    return panels


def sliced_panels(I: int, format: str, rows: np.ndarray, first: int, count: int) -> tuple[tuple[tuple[str, int], ...], slice, np.ndarray]:
    """Constants, columns and panels of some slices of a matrix."""
    columns, step = slice_columns(format, I, first, count), max(BLOCK, TABLE[format].elements)
    start, end = columns.start // step * step, -(-columns.stop // step) * step  # blocks are not cut
    nbytes = rows.shape[1] * step // I
    panels = panels_of(format, rows[:, start // step * nbytes : end // step * nbytes])
    return (("SLICES", count), ("FIRST_SLICE", first), ("ALL_I", I), ("BEFORE", columns.start - start)), columns, panels


def kernel_of(I: int, format: str, target: str, rows: np.ndarray, first: int, count: int) -> tuple[Kernel, slice, np.ndarray]:
    sliced, columns, panels = sliced_panels(I, format, rows, first, count)
    defines = (("I", columns.stop - columns.start), ("O", O), ("WEIGHT", format), ("BIAS", 0), ("RESIDUAL", 0), ("ACTIVATION", 0))
    return Kernel("matmul", "cpu", target, defines + sliced, 2, 3), columns, panels


def product_of(I: int, format: str, target: str, rows: np.ndarray, x: np.ndarray, first: int, count: int) -> np.ndarray:
    """The sums of slices `first` to `first + count`, as one rank computes them from its columns alone."""
    if not range(*slice_columns(format, I, first, count).indices(I)):
        return np.zeros((len(x), O), np.float32)
    kernel, columns, panels = kernel_of(I, format, target, rows, first, count)
    return matmul(kernel, np.ascontiguousarray(x[:, columns]), panels)


def tree(parts: list[np.ndarray]) -> np.ndarray:
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def check_ranks(I: int, format: str, target: str, worlds: tuple[int, ...]) -> None:
    rows, x = random_rows(format, O, I), numbers(5, I)
    panels = panels_of(format, rows)
    want = matmul(matmul_kernel(I, O, format, target), x, panels)  # without a word on slices, as an engine of one process launches it
    assert np.isfinite(want).all() and np.ptp(want) > 0
    for world in worlds:
        count = ALL_SLICES // world
        got = tree([product_of(I, format, target, rows, x, rank * count, count) for rank in range(world)])
        assert (got.view(np.uint32) == want.view(np.uint32)).all(), f"{world} ranks"


@pytest.mark.parametrize("format", ["BF16", "Q8_0", "Q4_K", "NF4"])
def test_the_sums_of_ranks_are_those_of_one_process(format: str) -> None:
    """Uneven slices of 11 units of 32 columns, or of as few blocks as have a rank for each half."""
    check_ranks(packable_width(format, 352), format, TARGETS[0], (2,))


@pytest.mark.long  # some 300 kernels are compiled
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("format", FORMATS)
def test_the_sums_of_ranks_with_every_format_and_variant(format: str, target: str) -> None:
    check_ranks(packable_width(format, 352), format, target, (2, 4, 8) if target != "plain" else (2,))


@pytest.mark.long
@pytest.mark.parametrize("format", ["BF16", "Q8_0", "Q4_K", "NF4"])
def test_slices_of_whole_blocks(format: str) -> None:
    """2816 columns are 11 blocks of 256, which slices then do not cut."""
    check_ranks(packable_width(format, 2816), format, TARGETS[0], (2,))


def test_slices_are_a_partition() -> None:
    for format in ("BF16", "Q8_0", "Q4_K", "NVFP4_G128"):
        for units in (1, 3, 8, 11, 22, 64):
            I = units * max(BLOCK, TABLE[format].elements)
            ends = [slice_columns(format, I, s, 1) for s in range(ALL_SLICES)]
            assert ends[0].start == 0 and ends[-1].stop == I
            assert all(a.stop == b.start for a, b in zip(ends, ends[1:], strict=False))
            assert all(e.start % slice_unit(format, I) == 0 for e in ends)
            assert slice_columns(format, I, 2, 2) == slice(ends[2].start, ends[3].stop)
