"""Chooses and opens the device, and sets what must be in the environment before tinygrad is imported. Imports no tinygrad at import."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path

from tinyvllm.backends.cpu.toolchain import compiler_command, processor
from tinyvllm.backends.cuda.nvrtc import provide_nvrtc
from tinyvllm.errors import ArgumentError, OutOfMemoryError
from tinyvllm.host_memory import headroom, is_out_of_memory, require_start
from tinyvllm.placement import Placement


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


def start_device(choice: str, cache: Path) -> str:
    """Choose the device, prepare tinygrad for it and open it; returns its name.

    ArgumentError if it cannot be opened, KernelError if there is a GPU but no compiler for it, OutOfMemoryError where memory is too scarce
    to begin with.
    """
    require_start()
    device = choose_device(choice)
    placement = Placement(device)
    # otherwise tinygrad probes every backend for a default device, which costs half a second and is never used here
    os.environ.setdefault("DEV", placement.kind)
    if placement.is_cuda and _cuda_devices():
        provide_nvrtc(cache)
    from tinyvllm.backends.registry import open_device
    from tinyvllm.bridge import enable_program_cache, prefer_device, use_c_compiler

    enable_program_cache(processor())
    use_c_compiler(compiler_command)
    prefer_device(placement.kind)  # the environment comes too late if the caller has already imported tinygrad
    try:
        open_device(placement)
    except Exception as error:  # each of tinygrad's backends raises its own: a missing library, a driver's error, a group of both
        if is_out_of_memory(error):
            raise OutOfMemoryError(f"memory: device {device} cannot be opened; {headroom()}; free memory or raise the limit") from error
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        raise ArgumentError(f"device {device} cannot be opened here: {cause}; try --device CPU") from error
    return device
