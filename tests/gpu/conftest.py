"""Where these tests run: on a GPU at the shapes of real models, and where there is none on the emulated one at toy shapes.

tinygrad's default device is the GPU within a test, so the inputs of tests/ops serve here as well.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.gpu.operands import tiled
from tinyvllm.config import cache_folder
from tinyvllm.runner.device import _cuda_devices, start_device

DONE = Path(os.environ["TESTS_DONE"]) if "TESTS_DONE" in os.environ else None
EMULATED = not _cuda_devices()
PATIENCE = 600 if EMULATED else 60  # seconds until a test is taken for one that never ends


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
TOY = Sizes(96, 256, 4, 2, 32, 200, 20, (1, 17, 70))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what an earlier process has tried, where TESTS_DONE names the file that says so."""
    done = set(DONE.read_text().splitlines()) if DONE is not None and DONE.exists() else set()
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if DONE is not None:
        with open(DONE, "a") as file:
            file.write(item.nodeid + "\n")


@pytest.fixture(scope="module")
def device() -> Iterator[str]:
    """CUDA, opened."""
    from tinygrad import Context

    if EMULATED:
        from tests.emulator.driver import cuda_device

        start_device("CPU", cache_folder())
        with cuda_device(races=False), Context(DEV="CUDA"):
            yield "CUDA"
            tiled.cache_clear()
    else:
        start_device("CUDA", cache_folder())
        with Context(DEV="CUDA"):
            yield "CUDA"
        tiled.cache_clear()


@pytest.fixture(scope="session")
def sizes() -> Sizes:
    return TOY if EMULATED else LLAMA_1B


@pytest.fixture(autouse=True)
def alone(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test chooses its kernels itself. One that leaves the device broken, or never ends, ends this process."""
    monkeypatch.delenv("TINYVLLM_KERNELS", raising=False)
    if EMULATED:
        monkeypatch.setattr("tinyvllm.runner.memory.free_memory", lambda device: 1 << 30)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    yield
    broken = _broken()
    faulthandler.cancel_dump_traceback_later()
    if broken:
        pytest.exit("a kernel broke the device: no other test can run in this process", returncode=pytest.ExitCode.INTERRUPTED)


def _broken() -> bool:
    from tinygrad import Device
    from tinygrad.runtime.autogen import cuda

    return bool(cuda.cuCtxSetCurrent(Device["CUDA"].context) or cuda.cuCtxSynchronize())
