"""The tests of tests/kernels/metal on a Mac's GPU instead of the emulator: a plugin of pytest, -p tests.metal.on_gpu.

It replaces `emulate` by a function with the same arguments. Arrays are in one Metal buffer, each at an offset of its own with a gap after
it; a kernel that changes a gap or a read-only array fails its test. Reads out of bounds and races are not detected.
A process whose device only returns errors exits; tests/gpu/attempts.py continues in another one.
"""

from __future__ import annotations

import faulthandler
from typing import Any

import numpy as np
import pytest
from tinygrad import Device
from tinygrad.device import BufferSpec

from tests.emulator.emulate import Arrays
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.source import kernel_text
from tinyvllm.config.switches import cache_folder
from tinyvllm.runner.device import start_device

ALIGNMENT = 256  # bytes, of arrays, as on the host
TIMEOUT = 60  # seconds until a test counts as hanging
broken: list[str] = []  # errors of the device after it failed


def run_on_gpu(
    kernel: Kernel, *arrays: np.ndarray, seed: int = 0, races: bool = True, resident: int = 3, read: list[int] | None = None
) -> int:
    """`emulate` on the METAL device. `seed`, `races` and `resident` have no effect; returns 0 accesses and does not change `read`.

    Raises AssertionError for a wrong write.
    """
    assert len(arrays) == kernel.outs + kernel.ins, f"{kernel.stem} takes {kernel.outs} + {kernel.ins} arrays, got {len(arrays)}"
    held = Arrays(arrays, kernel.outs)
    aligned = held.raw[-held.raw.ctypes.data % ALIGNMENT :]
    before = aligned.copy()
    _launch(kernel, aligned, [address - aligned.ctypes.data for address in held.addresses])
    changed = before != aligned
    for memory in held.memory:
        if memory.writable:
            start = memory.address - aligned.ctypes.data
            changed[start : start + memory.size] = False
    assert not changed.any(), f"{kernel.stem}: {int(changed.sum())} bytes outside of the writable arguments are changed"
    held.copy_back()
    return 0


def _launch(kernel: Kernel, memory: np.ndarray, offsets: list[int]) -> None:
    """Runs it on a copy of the memory, and copies the result back."""
    device: Any = Device["METAL"]
    program = device.runtime(kernel.stem, device.renderer.compiler.compile_cached(kernel_text(kernel)))
    spec = BufferSpec()
    buffer = device.allocator.alloc(memory.nbytes, spec)
    device.allocator._copyin(buffer, memoryview(memory))
    arguments = [device.allocator._offset(buffer, memory.nbytes - offset, offset) for offset in offsets]
    block = kernel.block if isinstance(kernel.block, tuple) else (kernel.block, 1, 1)
    try:
        program(*arguments, global_size=tuple(kernel.grid), local_size=block, wait=True)
    except RuntimeError:
        _check(device)
        raise
    device.allocator._copyout(memoryview(memory), buffer)
    device.allocator.free(buffer, memory.nbytes, spec)


def _check(device: Any) -> None:
    try:
        device.synchronize()
    except RuntimeError as error:
        broken.append(str(error))


def pytest_runtest_setup() -> None:
    faulthandler.dump_traceback_later(TIMEOUT, exit=True)


def pytest_runtest_logfinish(nodeid: str) -> None:
    faulthandler.cancel_dump_traceback_later()
    if broken:
        pytest.exit(f"{nodeid} broke the device: {broken[0]}", returncode=pytest.ExitCode.INTERRUPTED)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deselects the tests of modules without `emulate`: they only check text."""
    items[:] = [item for item in items if hasattr(item.module, "emulate")]  # type: ignore[attr-defined]
    for module in {item.module for item in items}:  # type: ignore[attr-defined]
        module.emulate = run_on_gpu


def pytest_sessionstart() -> None:
    start_device("METAL", cache_folder())
