"""Where these tests run: on a GPU at the shapes of real models; with EMULATED_CUDA=1, for trying the tests, on the emulator at toy shapes.

Without either all are skipped. tinygrad's default device is the GPU within a test, so the inputs of tests/ops serve here as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tinyvllm.config import cache_folder
from tinyvllm.runner.device import _cuda_devices, start_device

EMULATED = os.environ.get("EMULATED_CUDA") == "1"


@dataclass(frozen=True)
class Sizes:
    """E inputs, F hidden, H query heads, K key/value heads, D head_dim, V vocabulary; `most` rows; contexts of decodes."""

    E: int
    F: int
    H: int
    K: int
    D: int
    V: int
    most: int
    contexts: tuple[int, ...]


LLAMA_1B = Sizes(2048, 8192, 32, 8, 64, 128256, 300, (1, 17, 64, 255, 256, 1025, 4000))
TOY = Sizes(96, 64, 4, 2, 32, 200, 20, (1, 17, 70))


@pytest.fixture(scope="module")
def device() -> Iterator[str]:
    """CUDA, opened; a test of it is skipped where there is none."""
    from tinygrad import Context

    if EMULATED:
        from tests.emulator.driver import cuda_device

        start_device("CPU", cache_folder())
        with cuda_device(races=False), Context(DEV="CUDA"):
            yield "CUDA"
    elif not _cuda_devices():
        pytest.skip("there is no CUDA device here")
    else:
        start_device("CUDA", cache_folder())
        with Context(DEV="CUDA"):
            yield "CUDA"


@pytest.fixture(scope="session")
def sizes() -> Sizes:
    return TOY if EMULATED else LLAMA_1B


@pytest.fixture(autouse=True)
def alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test chooses its kernels itself."""
    monkeypatch.delenv("TINYVLLM_KERNELS", raising=False)
    if EMULATED:
        monkeypatch.setattr("tinyvllm.runner.memory.free_memory", lambda device: 1 << 30)
