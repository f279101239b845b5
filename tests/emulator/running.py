"""Runs a small kernel given as text, `void k(outs..., ins...)`, with gpu.cuh before it."""

from __future__ import annotations

import numpy as np

from tests.emulator.emulate import HERE, Arrays, emulate_source


def run(
    text: str, *arrays: np.ndarray, outs: int = 1, grid: int = 1, block: int | tuple[int, int, int] = 32, shared: int = 0, **options: int
) -> int:
    """Run kernel `k` of `text` on the arrays, of which it may write the first `outs`. Returns the number of accesses."""
    header = (HERE / "include" / "gpu.cuh").read_text().replace("#pragma once\n", "")
    copies = Arrays(arrays, outs)
    block = block if isinstance(block, tuple) else (block, 1, 1)
    full = f'{header}extern "C" __global__ void k({text}'
    count = emulate_source(full, "k", (grid, 1, 1), block, shared, copies.addresses, copies.memory, **options)
    copies.copy_back()
    return count
