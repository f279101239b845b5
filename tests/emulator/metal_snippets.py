"""Runs small Metal kernels that tests write as text: parameters and body of kernel `k`, after gpu.h."""

from __future__ import annotations

import numpy as np

from tests.emulator.emulate import Arrays, emulate_source
from tinyvllm.backends.source import inline_headers, kernels_folder

PLACES = """uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
  uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]"""


def full(text: str) -> str:
    """`text`: buffers and body, `device float *out) { ... }`; helper functions may come first, followed by a line `---`."""
    header = inline_headers(kernels_folder() / "metal" / "include" / "gpu.h", "metal")
    helpers, _, own = text.rpartition("---")
    buffers, _, body = own.partition(") {")
    return f"{header}{helpers}kernel void k({buffers}, {PLACES}) {{{body}"


def run(text: str, *arrays: np.ndarray, outs: int = 1, grid: int = 1, block: int | tuple[int, int, int] = 32, **options: int) -> int:
    """Runs it on the arrays; it may write the first `outs` of them. Returns the number of accesses."""
    held = Arrays(arrays, outs)
    block = block if isinstance(block, tuple) else (block, 1, 1)
    count = emulate_source(full(text), "k", (grid, 1, 1), block, 0, held.addresses, held.memory, language="metal", **options)
    held.copy_back()
    return count
