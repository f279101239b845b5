"""Sizes of the scratch that CPU kernels work in."""

from __future__ import annotations

from tinyvllm.integers import ceil_div, round_up
from tinyvllm.quant.formats import Activations, Layout, activations_of
from tinyvllm.quant.layouts import BLOCK

MAX_THREADS = 64  # areas in the scratch of attention_prefill, sample and products of experts


def prepared_bytes(format: str, T: int, I: int) -> int:
    """Scratch for T rows in any variant, as kernels/cpu/include/product.h has them: an odd number of cache lines each."""
    integers = activations_of(format, Layout.PANELS) is Activations.INT8
    return round_up(T, 16) * 64 * (ceil_div(I // BLOCK * 76 if integers else 4 * I, 64) | 1)
