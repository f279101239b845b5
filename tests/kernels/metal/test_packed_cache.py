"""The Metal kernels of packed KV caches: bytes read from the cache, and planted faults.

A module without `emulate`, as a GPU neither counts bytes nor detects faults (tests/metal/on_gpu.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.emulator import emulate as emulator
from tests.kernels.metal.test_attention import TOLERANCE, decode, prefill
from tests.kernels.metal.test_attention_shared import decode_shared
from tests.kernels.metal.test_movers import test_kv_append_packs_as_the_definition as check_append
from tests.kernels.test_attention import Shape, make, oracle
from tinyvllm.quant.kv import KV_FORMATS


def test_traffic_of_packed_caches() -> None:
    """Bytes of 256 sequences of 48 to 112 tokens, as shares of bfloat16's."""
    cache = {}
    for dtype in ("BF16", *KV_FORMATS):
        case = make(Shape(H=4, K=1, D=64, dtype=dtype), [1] * 256, [48 + b % 5 * 16 for b in range(256)])
        read: list[int] = []
        np.testing.assert_allclose(decode(case, read=read), oracle(case), **TOLERANCE)
        cache[dtype] = read[3]
    assert cache["BF16"] == sum(case.context) * 2 * 64 * 2
    assert {name: round(number / cache["BF16"], 3) for name, number in cache.items()} == {
        "BF16": 1,
        "KV_FP8": 0.516,
        "KV_INT8": 0.516,
        "KV_INT4": 0.266,
    }


def test_shared_blocks_are_read_once_with_their_scales() -> None:
    """Eight sequences after 128 tokens in common: those once, and 16 of each."""
    case = make(Shape(H=2, K=1, D=128, dtype="KV_INT8"), [1] * 8, [144] * 8, shared=[0] + [128] * 7, M=16)
    read: list[int] = []
    decode_shared(case, case.shared, read=read)
    assert read[3] == (128 + 8 * 16) * 2 * (128 + 2)


def check_bytes(dtype: str) -> None:
    check_append(dtype, 48)


def check_decode(dtype: str) -> None:
    case = make(Shape(H=4, K=1, D=64, dtype=dtype), [1, 1], [41, 67])
    np.testing.assert_allclose(decode(case), oracle(case), **TOLERANCE)


def check_prefill(dtype: str) -> None:
    """A later token of the chunk is broken."""
    case = make(Shape(H=4, K=1, D=64, dtype=dtype), [40], [60])
    want = oracle(case)
    case.cache[case.tables[0, 3], -32:].view(np.uint16)[8] = 0x7FC0  # the scale of value 56
    np.testing.assert_allclose(prefill(case)[:36], want[:36], **TOLERANCE)


def check_shared(dtype: str) -> None:
    case = make(Shape(H=2, K=1, D=128, dtype=dtype), [1] * 3, [225, 210, 220], shared=[0, 192, 208], M=16)
    for seed in range(4):
        np.testing.assert_allclose(decode_shared(case, case.shared, seed=seed), oracle(case), **TOLERANCE)


FAULTS = {
    "a value's scale": (check_decode, "KV_INT8", "weight * value_scales[j];", "weight;", "Not equal to tolerance"),
    "a key's scale": (check_decode, "KV_FP8", "scores[j] * factors.x", "scores[j]", "Not equal to tolerance"),
    "keys of a step": (
        check_decode, "KV_INT8", "(step / GROUP * SIDES + side) * GROUP + step % GROUP", "step * SIDES + side", "Not equal to tolerance",
    ),
    "an odd byte's high nibble": (check_decode, "KV_INT4", "high ? word >> 8 : word >> 4", "word >> 4", "Not equal to tolerance"),
    "a hidden value's scale": (
        check_prefill, "KV_INT4", "hidden[n][i] ? 0.0f : weight * value_scale(", "weight * value_scale(", "nan location mismatch",
    ),
    "scales of the next tile": (
        check_shared, "KV_INT8", "update_softmax(scores, sums, scales, lane, at",
        "update_softmax(scores, sums, scales_in_tile(tiles, own - stripe, lane), lane, at", "race",
    ),
    "a barrier of the rotation": (
        check_bytes, "KV_INT4", "y[at] = a + b, y[at + distance] = a - b;\n    }\n    simdgroup_barrier(mem_flags::mem_threadgroup);",
        "y[at] = a + b, y[at + distance] = a - b;\n    }", "race",
    ),
    "a NaN": (check_bytes, "KV_FP8", "(finite ? y[i] : 0.0f)", "y[i]", "Arrays are not equal"),
    "a slot of a word": (check_bytes, "KV_INT8", "* 4 + s % 4] =", "* 4] =", "race|not equal"),
}  # fmt: skip


@pytest.mark.parametrize("check, dtype, old, new, fault", FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_detected(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[str], None], dtype: str, old: str, new: str, fault: str
) -> None:
    shipped = emulator.kernel_text

    def changed(*arguments: object, **options: object) -> str:
        text = shipped(*arguments, **options)  # type: ignore[arg-type]
        assert text.count(old) == 1, old
        return text.replace(old, new)

    check(dtype)
    monkeypatch.setattr(emulator, "kernel_text", changed)
    with pytest.raises(AssertionError, match=fault):
        check(dtype)
