"""Chooses and opens the device, and sets what must be in the environment before tinygrad is imported. Imports no tinygrad at import."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tinyvllm.backends.cpu.compile import prepare_header
from tinyvllm.backends.cpu.toolchain import compiler_command, processor
from tinyvllm.backends.cpu.variants import best_variant
from tinyvllm.errors import ArgumentError, OutOfMemoryError
from tinyvllm.host_memory import headroom, is_out_of_memory, require_start
from tinyvllm.placement import CoreShare, Placement


def choose_device(choice: str) -> str:
    """`auto` is tinygrad's DEV variable if set, else Metal on Apple Silicon, CUDA where a driver finds a GPU, and the CPU."""
    if choice != "auto":
        return choice
    if named := os.environ.get("DEV"):
        if not named.isalnum():  # to tinygrad, what follows a colon is a renderer
            raise ArgumentError(f"DEV={named}: expected the name of a device, such as CUDA; use --device {named} to choose one of several")
        return named.upper()
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return "METAL"
    return "CUDA" if _cuda_devices() else "CPU"


def _cuda_devices() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


@contextmanager
def _default_of_tinygrad(kind: str) -> Iterator[None]:
    """DEV while tinygrad is imported: without it tinygrad probes every backend, which costs half a second, for a default never used here.

    It is not kept: the next engine with `auto` and the processes that the caller starts choose for themselves. Where the caller has
    imported tinygrad already, it comes too late, and `prefer_device` counts.
    """
    if "DEV" in os.environ:
        yield
        return
    os.environ["DEV"] = kind
    try:
        yield
    finally:
        os.environ.pop("DEV", None)


def prepare_compiler(choice: str) -> None:
    """Begin what a first start on the CPU waits for, before tinygrad is imported."""
    if Placement(choose_device(choice)).is_cpu:
        prepare_header(best_variant())


def share_cores(share: CoreShare) -> None:
    """Take this process's part of the cores, and bind the calling thread to its memory nodes where there are several."""
    from tinyvllm.backends.cpu import threads

    threads.share_cores(share)


def unbound_cores() -> AbstractContextManager[None]:
    """Within it, processes that this thread starts may run on all cores, and take their own parts."""
    from tinyvllm.backends.cpu.binding import unbound

    return unbound()


def start_device(choice: str, cache: Path) -> str:
    """Choose the device, prepare tinygrad for it and open it; returns its name.

    ArgumentError if it cannot be opened, KernelError if there is a GPU but no compiler for it, OutOfMemoryError where memory is too scarce
    to begin with.
    """
    require_start()
    device = choose_device(choice)
    placement = Placement(device)
    if placement.is_cuda and _cuda_devices():
        from tinyvllm.backends.cuda.nvrtc import provide_nvrtc

        provide_nvrtc(cache)
    with _default_of_tinygrad(placement.kind):
        from tinyvllm.backends.registry import open_device
        from tinyvllm.bridge import enable_program_cache, prefer_device, use_c_compiler

    enable_program_cache(processor())
    use_c_compiler(compiler_command)
    prefer_device(placement.kind)
    try:
        open_device(placement)
    except Exception as error:  # each of tinygrad's backends raises its own: a missing library, a driver's error, a group of both
        if is_out_of_memory(error):
            raise OutOfMemoryError(f"memory: device {device} cannot be opened; {headroom()}; free memory or raise the limit") from error
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        raise ArgumentError(f"device {device} cannot be opened here: {cause}; try --device CPU") from error
    return device
