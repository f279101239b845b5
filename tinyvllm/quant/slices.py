"""The slices of a product's columns, whose sums the CPU's kernels add in a tree: kernels/cpu/include/slices.h, for Python."""

from __future__ import annotations

from typing import Any

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.quant.formats import FORMATS, Activations, Layout, activations_of

ALL_SLICES = 8
BLOCK = 32  # columns that integers round x in together, and that the kernels read at once


def slice_unit(format: str, I: int) -> int:
    """Columns by which slices of a product with a matrix [O, I] of this format are cut: blocks, or 32 where the blocks are too few."""
    block = max(BLOCK, FORMATS[format].elements)
    cut = FORMATS[format].is_float or activations_of(format, Layout.PANELS) is Activations.INT8
    return block if I // block >= ALL_SLICES or not cut else BLOCK


def slice_columns(format: str, I: int, first: int, count: int) -> slice:
    """The columns of slices `first` to `first + count`; of few columns some slices are empty."""
    unit = slice_unit(format, I)
    units = I // unit
    return slice(first * units // ALL_SLICES * unit, (first + count) * units // ALL_SLICES * unit)


@dataclass(frozen=True, eq=False)
class ColumnShare:
    """Which columns of the whole matrix a rank's panels stand for: `count` slices from `first` on of `all_columns`.

    The panels are whole blocks; `before` of their columns belong to an earlier slice, and `columns` are the rank's own. `group` is the
    `RankGroup` that adds the sums.
    """

    group: Any
    all_columns: int
    first: int
    count: int
    before: int
    columns: int


@dataclass(frozen=True, eq=False)
class HeadShare:
    """Which heads of q and k a rank attends with, where their norms are over all heads, so that its panels have the rows of all."""

    heads: slice
    kv_heads: slice


@dataclass(frozen=True, eq=False)
class RowShare:
    """Which rows of the head a rank has: those from `first` on, of `all_rows`. `group` is the `RankGroup` that gathers the logits."""

    group: Any
    all_rows: int
    first: int
