"""Runs a small Metal kernel that a test holds as text: parameters and body of kernel `k`, with gpu.h in front."""

from __future__ import annotations

import numpy as np

from tests.emulator.emulate import Arrays, emulate_source
from tinyvllm.backends.source import inline_headers, kernels_folder

PLACES = """uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
  uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]"""


def full(text: str) -> str:
    """`text`: buffers and body, `device float *out) { ... }`; helpers may stand in front of a line `---`."""
    words = inline_headers(kernels_folder() / "metal" / "include" / "gpu.h", "metal")
    helpers, _, own = text.rpartition("---")
    buffers, _, body = own.partition(") {")
    return f"{words}{helpers}kernel void k({buffers}, {PLACES}) {{{body}"


def run(text: str, *arrays: np.ndarray, outs: int = 1, grid: int = 1, block: int | tuple[int, int, int] = 32, **options: int) -> int:
    """Run it on the arrays, the first `outs` of which it may write. Returns the number of accesses."""
    held = Arrays(arrays, outs)
    block = block if isinstance(block, tuple) else (block, 1, 1)
    count = emulate_source(full(text), "k", (grid, 1, 1), block, 0, held.addresses, held.memory, language="metal", **options)
    held.copy_back()
    return count
