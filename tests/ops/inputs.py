"""Random inputs of the ops, weights in every format, and one op run by a kernel and by its reference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tests.formats import sampled_formats
from tinyvllm.backends import registry
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import Layout
from tinyvllm.quant.layouts import PackedWeight, RowWeight, pack_panels
from tinyvllm.quant.random_rows import random_rows
from tinyvllm.weights.mapping import allocate
from tinyvllm.weights.memory import adopt

VARIANTS = registry.usable_variants(Placement("CPU"))  # best first
# Every format on the best variant, one of floats or blocks on each other variant: tests/kernels has all pairs, and compiling takes seconds.
FORMATS_AND_VARIANTS = [(format, VARIANTS[0]) for format in sampled_formats(Layout.PANELS)] + [
    (("BF16", "Q4_0")[i % 2], variant) for i, variant in enumerate(VARIANTS[1:])
]


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """float32, normal."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def realized(array: np.ndarray) -> Tensor:
    return Tensor(array).contiguous().realize()


def int32(*values: int) -> Tensor:
    return realized(np.array(values, np.int32))


def file_rows(format: str, O: int, I: int, seed: int = 0) -> np.ndarray:
    """uint8 [O, bytes of a row] of a random matrix whose products with normal numbers are about 1."""
    return random_rows(format, O, I, I**-0.5, seed)


def packed(format: str, O: int, I: int, seed: int = 0) -> PackedWeight:
    return PackedWeight(device_bytes(pack_panels(format, file_rows(format, O, I, seed))), format, O, I)


def in_rows(format: str, O: int, I: int, seed: int = 0) -> RowWeight:
    return RowWeight(device_bytes(file_rows(format, O, I, seed)), format, O, I)


def device_bytes(data: np.ndarray) -> Tensor:
    memory = allocate(data.size)
    memory[:] = data.reshape(-1)
    return adopt(memory, "CPU", dtypes.uint8)


def by_kernel(monkeypatch: pytest.MonkeyPatch, stem: str, variant: str, op: Callable[[], np.ndarray]) -> np.ndarray:
    """The result of the op, run by `variant`; "ref" is the reference."""
    monkeypatch.setenv("TINYVLLM_KERNELS", f"{stem}={variant}")
    registry.forget_choices()
    out = op()
    assert (stem, variant) in [(choice.stem, choice.variant) for choice in registry.choices()]
    return out
