"""The headers in kernels/include compile as C, CUDA C++ and Metal, and give the same bits in each."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.emulator.emulate import HERE, Memory, emulate_source
from tests.emulator.metal_lint import lint
from tests.kernels.calling import FOLDER
from tinyvllm.backends.cpu.toolchain import cpu_features, provide_compiler, target_flags
from tinyvllm.backends.cuda import nvrtc
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.source import inline_headers, kernels_folder

RESULTS = 24
BODY = Path(__file__).parent / "shared_headers.h"
METAL_LIBRARY = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\n"
C = "#define IN const u32 *\n#define OUT u32 *\n{}void entry(u32 *out, const u32 *in) {{ call_every_function(out, in); }}\n"
CUDA = """#define IN const u32 *
#define OUT u32 *
{}extern "C" __global__ void __launch_bounds__(32) entry(u32 *out, const u32 *in) {{
  if (threadIdx.x == 0) call_every_function(out, in);
}}
"""
METAL = """#define IN device const u32 *
#define OUT device u32 *
{}[[max_total_threads_per_threadgroup(32)]] kernel void entry(
    device u32 *out, device const u32 *in, uint thread_index [[thread_index_in_threadgroup]]) {{
  if (thread_index == 0) call_every_function(out, in);
}}
"""


def cuda_text(instead: Path | None = None) -> str:
    return CUDA.format(inline_headers(BODY, "cuda", instead))


def metal_text() -> str:
    return METAL_LIBRARY + METAL.format(inline_headers(BODY, "metal", kernels_folder() / "include"))


@functools.cache
def c_library() -> ctypes.CDLL:
    target = "avx2" if {"avx2", "fma", "f16c"} <= cpu_features() else "plain"
    warnings = ("-Wall", "-Wextra", "-Werror", "-Wno-unused-function")
    flags = ("-x", "c", "-std=c11", "-O2", "-ffp-contract=off", *warnings, *target_flags(target), "-shared", "-fPIC")
    text = C.format(inline_headers(BODY, "cpu"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shared_headers.so"
        subprocess.run([provide_compiler(FOLDER), *flags, "-", "-o", str(path)], input=text.encode(), check=True)
        return ctypes.CDLL(str(path))


def run_c(words: np.ndarray) -> np.ndarray:
    out = np.zeros(RESULTS, np.uint32)
    c_library().entry(ctypes.c_void_p(out.ctypes.data), ctypes.c_void_p(words.ctypes.data))
    return out


def run_emulated(text: str, language: str, words: np.ndarray) -> np.ndarray:
    out = np.zeros(RESULTS, np.uint32)
    addresses = [out.ctypes.data, words.ctypes.data]
    memory = [Memory(addresses[0], out.nbytes, "out"), Memory(addresses[1], words.nbytes, "in", writable=False)]
    emulate_source(text, "entry", (1, 1, 1), (32, 1, 1), 0, addresses, memory, language=language)
    return out


def run_cuda(words: np.ndarray) -> np.ndarray:
    return run_emulated(cuda_text(HERE / "include"), "cuda", words)


def run_metal(words: np.ndarray) -> np.ndarray:
    return run_emulated(metal_text(), "metal", words)


def samples() -> list[np.ndarray]:
    """x, peak, inverse temperature as bits, token, seed, position, count of the token."""
    random = np.random.default_rng(0)
    xs = np.array([0.0, -0.0, 1.5, -2.25, 1e-20, -30.0, np.inf, -np.inf, np.nan, 3e38, *random.normal(0, 5, 10)], np.float32)
    rows = []
    for i, x in enumerate(xs):
        floats = np.array([x, np.float32(7.5) if i % 3 else x, 1 / 0.7], np.float32).view(np.uint32)
        rows.append(np.concatenate([floats, random.integers(0, 2**32, 4, np.uint32), [np.uint32(i % 4)]]).astype(np.uint32))
    return rows


@pytest.mark.parametrize("run", [run_cuda, run_metal], ids=["CUDA", "Metal"])
def test_every_function_gives_the_same_bits_as_in_c(run: Callable[[np.ndarray], np.ndarray]) -> None:
    if "fma" not in cpu_features() and "asimd" not in cpu_features():
        pytest.skip("without fused multiply-add C rounds twice")
    for words in samples():
        is_nan = np.isnan(words[:1].view(np.float32)[0])
        got, expected = run(words), run_c(words)
        if is_nan:  # only the order of a NaN is defined: NAN_ORDER
            got, expected = got[1:2], expected[1:2]
            assert got[0] == 0xFFFFFFFF
        np.testing.assert_array_equal(got, expected)


def test_sample_params_are_twelve_words() -> None:
    assert run_c(samples()[0])[22] == 48


@pytest.mark.skipif(sys.platform != "linux", reason="NVRTC's wheel is for Linux")
def test_nvrtc_compiles_the_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    text = cuda_text()
    monkeypatch.setattr(nvrtc, "kernel_text", lambda kernel: text)
    report = nvrtc.report(Kernel.cuda("entry", "sm_80", 1, 1, (1, 1, 1), 32), "sm_80")
    assert report.spilled == 0 and report.stack == 0


def test_the_headers_are_metal() -> None:
    assert lint(metal_text(), 32) == []


def test_arm_compiles_the_headers(tmp_path: Path) -> None:
    flags = ("-x", "c", "-std=c11", "-O2", "-ffreestanding", "-nostdlib", "--target=aarch64-none-unknown-elf")
    text = C.format(inline_headers(BODY, "cpu"))
    subprocess.run([provide_compiler(FOLDER), *flags, "-c", "-", "-o", str(tmp_path / "out.o")], input=text.encode(), check=True)
