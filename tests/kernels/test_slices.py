"""Products of the CPU as a tree over 8 slices of their columns: the sum that ranks of tensor parallelism share."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.kernels.calling import aligned, call
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


def _cases() -> list[tuple[str, str, int]]:
    """Every format with every variant, and with 2, 4 and 8 ranks: `plain` has two, the others four and eight in turn."""
    wide = [target for target in TARGETS if target != "plain"]
    turns = [(format, target, (4, 8)[(i + j) % 2]) for i, format in enumerate(FORMATS) for j, target in enumerate(wide)]
    return turns + [(format, "plain", 2) for format in FORMATS if "plain" in TARGETS]


@pytest.mark.long  # each rank has a kernel of its own
@pytest.mark.parametrize("format, target, world", _cases())
def test_the_sums_of_ranks_with_every_format_and_variant(format: str, target: str, world: int) -> None:
    check_ranks(packable_width(format, 352), format, target, (world,))


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


def adapter_sums(I: int, world: int, target: str) -> list[np.ndarray]:
    """float32 [T, O] in each of `world` ranks, which have the columns that they have of a product in BF16; of one process with 1."""
    T, R, ranks = 9, 8, np.array([5, 8], np.int32)
    x, a, b, bias = numbers(T, I), numbers(2, 1, R, I, seed=1), numbers(2, R, 48, seed=2), numbers(T, 48, seed=3)[0].copy()
    adapters, outs, place = np.array([t % 3 for t in range(T)], np.int32), [aligned((T, 48), np.float32) for _ in range(world)], 16 * T * R
    shared, count = aligned((4096 + 8 * world * place,), np.uint8, 0), ALL_SLICES // world
    sizes = (("O", 48), ("R", R), ("PARTS", 1), ("BIAS", 1), ("NORM", "NO_NORM"), ("UNIT", slice_unit("BF16", I)), ("SLICES", count))

    def run(rank: int) -> None:
        columns = slice_columns("BF16", I, rank * count, count)
        own = (("E", columns.stop - columns.start), ("FIRST_SLICE", rank * count), ("ALL_I", I))
        meeting = (("WORLD", world), ("RANK", rank), ("PLACE", place)) if world > 1 else ()
        ins = [
            np.ascontiguousarray(x[:, columns]),
            np.ascontiguousarray(a[..., columns]),
            b,
            ranks,
            bias,
            adapters,
            np.array([T], np.int32),
        ]
        memory = [shared] if world > 1 else []
        scratch = aligned((T, own[0][1] + R), np.float32)
        call(Kernel("lora_bias", "cpu", target, own + sizes + meeting, 2 + len(memory), 7), outs[rank], scratch, *memory, *ins)

    workers = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return outs


@pytest.mark.parametrize("target", [TARGETS[0], *(pytest.param(target, marks=pytest.mark.long) for target in TARGETS[1:])])
def test_the_sums_of_adapters_in_ranks_are_those_of_one_process(target: str) -> None:
    """Of 11 units of columns, whose slices are uneven; rows have one of two adapters, or none."""
    (want,) = adapter_sums(352, 1, target)
    assert np.ptp(want[1]) > 1
    for got in adapter_sums(352, 2, target):
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
