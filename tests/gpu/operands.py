"""Weights in tiles, and one op run by a kernel and by its reference, on the GPU."""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Callable

import numpy as np
import pytest

from tests.ops.inputs import by_kernel, file_rows
from tinyvllm.backends import registry
from tinyvllm.placement import Placement
from tinyvllm.quant.layouts import TileWeight, pack_tiles
from tinyvllm.runner.device import _cuda_devices
from tinyvllm.weights.memory import place_bytes

MAC = sys.platform == "darwin" and platform.machine() == "arm64"
DEVICE = os.environ.get("TESTS_GPU") or ("METAL" if MAC else "CUDA")
DRY = DEVICE == "CUDA" and bool(os.environ.get("TESTS_GPU_DRY"))  # nothing is launched, results are zeros (tests/emulator/dry.py)
EMULATED = DRY or not (MAC if DEVICE == "METAL" else _cuda_devices())
TOY_MODEL = EMULATED and not DRY  # a smaller model than the bundled one
FORMATS = ("BF16", "F16", "Q8_0", "Q4_0")


@functools.lru_cache(maxsize=3)  # numbers for a head of 128256 rows take seconds
def tiled(format: str, O: int, I: int, seed: int = 0) -> TileWeight:
    """A random matrix [O, I] whose products with normal numbers are about 1."""
    return TileWeight(place_bytes(pack_tiles(format, file_rows(format, O, I, seed)), "CUDA"), format, O, I)


def best_variant(stem: str) -> str:
    """The variant of an op that the engine uses here."""
    return registry.usable_variants(Placement(DEVICE), stem)[0]


def both(monkeypatch: pytest.MonkeyPatch, stem: str, op: Callable[[], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The results of the kernel and of the reference."""
    return by_kernel(monkeypatch, stem, best_variant(stem), op), by_kernel(monkeypatch, stem, "ref", op)


def same_bits(got: np.ndarray, want: np.ndarray, what: str) -> None:
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32), err_msg=what)
