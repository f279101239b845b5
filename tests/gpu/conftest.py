"""These tests run on a GPU at the shapes of real models, NVIDIA's or a Mac's, and without a GPU on an emulated one at toy shapes:
NVIDIA's unless TESTS_GPU=METAL is set. With TESTS_GPU_DRY=1 nothing is launched: they pass if everything compiles and is captured, and
what they assert of results does not count.

Within a test tinygrad's default device is the GPU, so the inputs of tests/ops can be used here. On a Mac only the tokens are tested:
its kernels promise less bit equality than the other files require; tests/kernels/metal tests what they promise, also on the GPU
(tests/metal).
"""

from __future__ import annotations

import faulthandler
import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpu.attempts import pytest_collection_modifyitems, pytest_runtest_logreport, pytest_runtest_setup  # noqa: F401  hooks
from tests.gpu.operands import DEVICE, DRY, EMULATED, tiled
from tinyvllm.config.switches import cache_folder
from tinyvllm.runner.device import start_device

TIMEOUT = 600 if EMULATED else 60  # seconds until a test counts as hanging
collect_ignore = ["test_products.py", "test_attention.py"] if DEVICE == "METAL" else []


@dataclass(frozen=True)
class Sizes:
    """E inputs, F hidden, H query heads, K key/value heads, D head_dim, V vocabulary; `max_rows` rows; context lengths of decodes."""

    E: int
    F: int
    H: int
    K: int
    D: int
    V: int
    max_rows: int
    contexts: tuple[int, ...]


LLAMA_1B = Sizes(2048, 8192, 32, 8, 64, 128256, 300, (1, 17, 64, 255, 256, 1025, 4000))
TOY = Sizes(96, 256, 4, 2, 32, 200, 20, (1, 17, 70))


@pytest.fixture(scope="module")
def device() -> Iterator[str]:
    """The GPU's name, opened."""
    from tinygrad import Context

    if DRY:
        from tests.emulator.dry import dry_gpu

        with dry_gpu():
            start_device(DEVICE, cache_folder())
            with Context(DEV=DEVICE):
                yield DEVICE
                tiled.cache_clear()
    elif EMULATED:
        from tests.emulator.driver import cuda_device
        from tests.emulator.metal_runtime import metal_device

        start_device("CPU", cache_folder())
        emulated: Any = metal_device if DEVICE == "METAL" else cuda_device
        with emulated(races=False), Context(DEV=DEVICE, TC=0):  # the emulator does not support tinygrad's tensor cores
            yield DEVICE
            tiled.cache_clear()
    else:
        start_device(DEVICE, cache_folder())
        with Context(DEV=DEVICE):
            yield DEVICE
        tiled.cache_clear()


@pytest.fixture(scope="session")
def sizes() -> Sizes:
    return TOY if EMULATED or os.environ.get("TESTS_GPU_TOY") else LLAMA_1B


@pytest.fixture(autouse=True)
def alone(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test chooses its kernels itself. One that breaks the device, or hangs, ends this process."""
    monkeypatch.delenv("TINYVLLM_KERNELS", raising=False)
    if EMULATED:
        monkeypatch.setattr("tinyvllm.runner.memory.free_memory", lambda device: 1 << 30)
    if DRY:
        for name in ("assert_array_equal", "assert_allclose"):
            monkeypatch.setattr(np.testing, name, lambda *arguments, **named: None)
    faulthandler.dump_traceback_later(TIMEOUT, exit=True)
    yield
    broken = _broken()
    faulthandler.cancel_dump_traceback_later()
    if broken:
        pytest.exit("a kernel broke the device: no other test can run in this process", returncode=pytest.ExitCode.INTERRUPTED)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """In a dry run a test's own assertions, about results, do not end it as a failure; what is raised anywhere else does."""
    try:
        return (yield)
    except AssertionError as error:
        innermost = traceback.extract_tb(error.__traceback__)[-1]
        if not DRY or Path(innermost.filename) != pyfuncitem.path:
            raise
        return True


def _broken() -> bool:
    from tinygrad import Device

    if DEVICE == "METAL":
        try:
            Device[DEVICE].synchronize()
        except RuntimeError:
            return True
        return False
    from tinygrad.runtime.autogen import cuda

    return bool(cuda.cuCtxSetCurrent(Device["CUDA"].context) or cuda.cuCtxSynchronize())
