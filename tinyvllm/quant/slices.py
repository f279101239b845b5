"""The slices of a product's columns, whose sums the CPU's kernels add in a tree: kernels/cpu/include/slices.h, for Python."""

from __future__ import annotations

from tinyvllm.quant.formats import FORMATS, Activations, Layout, activations_of
from tinyvllm.quant.layouts.rows import BLOCK

ALL_SLICES = 8


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
