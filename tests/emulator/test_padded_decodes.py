"""Steps with more than sixteen padded decodes before a chunk, on both emulated GPUs: such rows store nothing, so no two write one slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulator.emulate import emulate
from tests.kernels.calling import aligned
from tests.runner.test_prepare import entry
from tinyvllm.backends.cuda import plan as cuda
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.metal import plan as metal
from tinyvllm.backends.shapes import Heads
from tinyvllm.quant.kv import pack_blocks
from tinyvllm.runner.prepare import StepInputs, shape_of

H, K, D, S, P = 1, 1, 16, 8, 400
NUMBER = {"F32": np.float32, "BF16": np.uint16}


def step() -> tuple[StepInputs, list[int]]:
    """33 decodes, padded to 64, and a chunk of three; the slots of the rows that count."""
    singles, chunks = [entry(i, 5, 4, 1) for i in range(1, 34)], [entry(34, 3, 0, 3)]
    inputs = StepInputs(shape_of(singles, chunks), 8, "CPU")
    inputs.fill(singles, chunks, S)
    assert inputs.shape.decodes == 64 and inputs.rows.tolist() == [67]
    return inputs, [*inputs.slots[:33].tolist(), *inputs.slots[64:67].tolist()]


def rope_store(plan: Any, variant: str, T: int, cache: str) -> Kernel:
    kernel: Kernel = plan.rope_store(variant, T, Heads(H, K, D, S, 0, cache, False, False, "1e-5f"))
    return kernel


def kv_append(plan: Any, variant: str, T: int, cache: str) -> Kernel:
    kernel: Kernel = plan.kv_append(variant, T, K, S, D, cache)
    return kernel


@pytest.mark.parametrize("cache", ["BF16", "KV_INT8"])
@pytest.mark.parametrize("plan, variant", [(cuda, "sm_80"), (metal, "apple7")], ids=["CUDA", "METAL"])
def test_padded_decodes_store_nothing(plan: Any, variant: str, cache: str) -> None:
    inputs, stored = step()
    T, rows = len(inputs.slots), inputs.rows
    numbers = np.random.default_rng(1).standard_normal((T, H + 2 * K, D)).astype(np.float32)
    k, v = (np.ascontiguousarray(numbers[:, i : i + K]) for i in (H, H + K))
    held = np.zeros((P, 2, K, S, D), np.float32)
    before = pack_blocks(cache, held) if cache == "KV_INT8" else held.astype(NUMBER[cache])
    for kernel, outs, ins in (
        (rope_store(plan, variant, T, cache), [aligned((T, H, D), np.float32)], [numbers]),
        (kv_append(plan, variant, T, cache), [], [k, v]),
    ):
        pool = before.copy()
        emulate(kernel, *outs, pool, pool if outs else aligned((4,), np.float32), *ins, inputs.slots, rows)
        changed = (pool != before).reshape(P, -1).any(1)
        assert sorted(np.flatnonzero(changed)) == sorted({slot // S for slot in stored}), kernel.stem
