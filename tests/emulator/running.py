"""Runs a small kernel that a test holds as text: `void k(outs..., ins...)`, with the words of gpu.cuh in front."""

from __future__ import annotations

import numpy as np

from tests.emulator.emulate import HERE, Arrays, emulate_source


def run(
    text: str, *arrays: np.ndarray, outs: int = 1, grid: int = 1, block: int | tuple[int, int, int] = 32, shared: int = 0, **options: int
) -> int:
    """Run kernel `k` of `text` on the arrays, the first `outs` of which it may write. Returns the number of accesses."""
    words = (HERE / "include" / "gpu.cuh").read_text().replace("#pragma once\n", "")
    held = Arrays(arrays, outs)
    block = block if isinstance(block, tuple) else (block, 1, 1)
    full = f'{words}extern "C" __global__ void k({text}'
    count = emulate_source(full, "k", (grid, 1, 1), block, shared, held.addresses, held.memory, **options)
    held.give_back()
    return count
