"""A GPU that launches nothing, on a machine without a C compiler: what a dry run of the GPU's tests and measurements runs on.

Everything up to the launch is real: NVRTC compiles our kernels and tinygrad's for the architecture, the emulated driver loads the machine
code, and steps are captured as graphs. Results are zeros.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tinyvllm.backends.cpu import toolchain
from tinyvllm.backends.cuda.nvrtc import provide_nvrtc
from tinyvllm.config.switches import cache_folder
from tinyvllm.runner import device

CAPABILITY, MULTIPROCESSORS = (9, 0), 132  # of an H100
MEMORY = 4 << 30  # bytes


@contextlib.contextmanager
def dry_gpu() -> Iterator[None]:
    """tinygrad's device CUDA is an H100 that launches nothing; no C compiler is found, also where there is one."""
    provide_nvrtc(cache_folder())  # before tinygrad looks for the compiler
    from tests.emulator.driver import cuda_device

    with contextlib.ExitStack() as undo:
        for owner, name, result in ((toolchain, "_recent_clang", None), (toolchain, "_zig_clang", None), (device, "_cuda_devices", 1)):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, lambda result=result: result)
        undo.callback(os.environ.update, {"CC": os.environ["CC"]} if "CC" in os.environ else {})
        os.environ.pop("CC", None)
        before = os.environ.get("TINYVLLM_SELFTEST")
        undo.callback(lambda: os.environ.pop("TINYVLLM_SELFTEST") if before is None else os.environ.update(TINYVLLM_SELFTEST=before))
        os.environ["TINYVLLM_SELFTEST"] = "off"  # zeros are wrong answers
        undo.enter_context(_compiler_as_provided())
        undo.enter_context(cuda_device(capability=CAPABILITY, multiprocessors=MULTIPROCESSORS, capacity=MEMORY, executes=False))
        yield


@contextlib.contextmanager
def _compiler_as_provided() -> Iterator[None]:
    """tinygrad's compiler with the library and the headers that the environment names now: it looks once, when it is imported."""
    from tinygrad.runtime.autogen import nvrtc
    from tinygrad.runtime.support import compiler_cuda

    if nvrtc.dll.nm not in nvrtc.dll._loaded_:
        type(nvrtc.dll).__init__(nvrtc.dll, nvrtc.dll.nm, [os.environ["NVRTC_PATH"]])
    before, compiler_cuda.CUDA_PATH = compiler_cuda.CUDA_PATH, os.environ["CUDA_PATH"]
    try:
        yield
    finally:
        compiler_cuda.CUDA_PATH = before
