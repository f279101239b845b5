"""A GPU that launches nothing, without a C compiler: everything up to the launch is real."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator

import pytest

from tests.emulator.driver import INVALID_IMAGE, NO_BINARY_FOR_GPU, NOT_FOUND
from tests.emulator.dry import dry_gpu
from tinyvllm import cli
from tinyvllm.backends.cpu.toolchain import compiler_command, has_compiler
from tinyvllm.backends.cuda import nvrtc
from tinyvllm.backends.cuda import plan as records
from tinyvllm.errors import TinyvllmError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVRTC's wheel is for Linux")


@pytest.fixture(scope="module", autouse=True)
def gpu() -> Iterator[None]:
    from tinygrad.runtime.support import compiler_cuda  # noqa: F401  as another test may have imported it: with the environment of then

    with pytest.MonkeyPatch.context() as patch:
        for name in ("NVRTC_PATH", "CUDA_PATH"):  # provided for tinygrad, and taken back afterwards
            patch.setenv(name, "")
            patch.delenv(name)
        with dry_gpu():
            yield


def test_main_generates_without_a_c_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    assert not has_compiler()
    with pytest.raises(TinyvllmError, match="no C compiler for the CPU device"):
        compiler_command()
    words = ["--device", "CUDA", "--prompt", "Once upon a time", "--max-tokens", "3", "--max-model-len", "64", "--num-blocks", "16"]
    assert cli.main(words) == 0
    assert capsys.readouterr().out


def test_machine_code_is_checked_when_it_is_loaded() -> None:
    from tinygrad.runtime.autogen import cuda

    kernel = records.copy("sm_80", 64, 1)
    module, function = cuda.CUmodule(), cuda.CUfunction()
    assert cuda.cuModuleLoadData(ctypes.byref(module), b"text") == INVALID_IMAGE
    assert cuda.cuModuleLoadData(ctypes.byref(module), nvrtc.cubin(kernel, "sm_80")) == NO_BINARY_FOR_GPU
    assert cuda.cuModuleLoadData(ctypes.byref(module), nvrtc.cubin(kernel, "sm_90")) == 0
    assert cuda.cuModuleGetFunction(ctypes.byref(function), module, b"copy") == 0
    assert cuda.cuModuleGetFunction(ctypes.byref(function), module, b"cop") == NOT_FOUND
