"""CUDA kernels through NVRTC: machine code, its place on disk, the assembler's figures, and where the compiler is found."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tinyvllm.backends.cuda import nvrtc
from tinyvllm.backends.kernel import Kernel
from tinyvllm.errors import KernelError
from tinyvllm.runner import device

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVRTC's wheel is for Linux")

SCALE = """
extern "C" __global__ void __launch_bounds__(64) scale(float *out, const float *x, const float *y) {
  static __shared__ float kept[64];
  kept[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = kept[63 - threadIdx.x] * FACTOR + y[threadIdx.x];
}
"""
SPILLS = """
extern "C" __global__ void __launch_bounds__(1024) scale(float *out, const float *x, const float *y) {
  float kept[128];
  _Pragma("unroll") for (int i = 0; i < 128; i++) kept[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  _Pragma("unroll") for (int i = 0; i < 128; i++) out[i * 1024 + threadIdx.x] = kept[i] * kept[(i * 5 + 1) % 128];
}
"""


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """The kernel `scale` of a text that a test may replace by setting `kernel.text`."""
    text = [SCALE]
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "kernel_text", lambda kernel: "".join(f"#define {n} {v}\n" for n, v in kernel.defines) + text[0])

    def make(row: str = "sm_80", instead: str | None = None, **defines: int) -> Kernel:
        text[0] = instead or SCALE
        return Kernel.cuda("scale", row, 1, 2, (1, 1, 1), 64, **(defines or {"FACTOR": 3}))

    return make


def architecture(code: bytes) -> int:
    """What NVIDIA's ELF files name in their header."""
    assert code[:4] == b"\x7fELF"
    flags = int.from_bytes(code[48:52], "little")
    return flags & 0xFF


def test_a_row_is_compiled_for_the_gpu_at_hand(kernel):
    assert architecture(nvrtc.cubin(kernel())) == 80
    assert architecture(nvrtc.cubin(kernel(), "sm_90")) == 90
    assert architecture(nvrtc.cubin(kernel(), "sm_86")) == 86


def test_a_row_of_one_architecture_is_compiled_for_that(kernel):
    only_there = SCALE.replace("__syncthreads();", '__syncthreads(); asm volatile("wgmma.fence.sync.aligned;" ::: "memory");')
    assert architecture(nvrtc.cubin(kernel("sm_90a", only_there), "sm_90")) == 90
    with pytest.raises(KernelError, match=r"wgmma\.fence.* not supported on .target 'sm_90'"):
        nvrtc.cubin(kernel("sm_90", only_there))


def test_a_gpu_newer_than_the_compiler_gets_ptx(kernel):
    code = nvrtc.cubin(kernel(), "sm_999")
    assert b".target sm_" in code and b".entry scale(" in code and code.endswith(b"\0"), "the driver reads to the zero"
    assert b"fma" not in code and b"mul.rn.f32" in code and b"add.rn.f32" in code, "products and sums are rounded one by one"


def test_kernels_wait_as_they_are_compiled(monkeypatch):
    """For a GPU of Hopper's kind that an old NVRTC does not know, code is of an older one, and waits for nothing."""
    assert [nvrtc.waits(arch) for arch in ("sm_80", "sm_89", "sm_90", "sm_120", "sm_200")] == [False, False, True, True, True]
    monkeypatch.setattr(nvrtc._nvrtc(), "architectures", (80, 86, 89))
    assert not nvrtc.waits("sm_90")


def test_the_same_kernel_is_compiled_once(kernel, monkeypatch):
    first, other = nvrtc.cubin(kernel(FACTOR=3)), nvrtc.cubin(kernel(FACTOR=5))
    assert first != other
    monkeypatch.setattr(nvrtc._Nvrtc, "compile", None)
    assert nvrtc.cubin(kernel(FACTOR=3)) == first
    with pytest.raises(TypeError):
        nvrtc.cubin(kernel(FACTOR=7))


def test_the_compilers_words_are_in_the_error(kernel):
    with pytest.raises(KernelError, match=r"scale_sm_80 does not compile with nvrtc [\d.]+ --gpu-architecture=sm_90: .*FACTORY.*undefined"):
        nvrtc.cubin(kernel(instead=SCALE.replace("FACTOR", "FACTORY")), "sm_90")


def test_a_report_counts_spills(kernel):
    fine = nvrtc.report(kernel())
    assert fine.spilled == fine.stack == 0 and 0 < fine.registers < 64 and fine.shared == 256
    assert nvrtc.report(kernel(instead=SPILLS)).spilled > 100


def test_tinygrads_compiler_finds_library_and_headers(tmp_path):
    """In a process of its own: tinygrad looks once. The library it loads must be ours, and half numbers need two folders of headers."""
    pytest.importorskip("nvidia.cuda_cccl", reason="the headers are not installed")
    code = (
        "import os, pathlib, sys\nfrom tinyvllm.backends.cuda.nvrtc import provide_nvrtc\n"
        "provide_nvrtc(pathlib.Path(sys.argv[1])); provide_nvrtc(pathlib.Path(sys.argv[1]))\n"
        "from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler\nfrom tinygrad.runtime.autogen import nvrtc\n"
        "assert nvrtc.dll._name == os.environ['NVRTC_PATH'], nvrtc.dll._name\n"
        'text = \'#include <cuda_bf16.h>\\n#include <cuda_fp16.h>\\nextern "C" __global__ void f(half *x, nv_bfloat16 *y) '
        "{ *x += (half)1; *y = (float)*y; }'\n"
        "print(NVRTCCompiler('sm_90').compile(text).count(b'.entry f('), NVRTCCompiler('sm_90', ptx=False).compile(text)[1:4].decode())"
    )
    environ = {name: value for name, value in os.environ.items() if name not in ("NVRTC_PATH", "CUDA_PATH", "CUDA_HOME")}
    for _ in range(2):  # the second finds the folder of links
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "cache")], env=environ, capture_output=True, text=True)
        assert done.stdout == "1 ELF\n", done.stderr
    (folder,) = (tmp_path / "cache").iterdir()
    assert (folder / "include/cuda_fp16.h").is_file() and (folder / "include/nv/target").is_file()


def test_the_users_cuda_path_does_not_hide_the_driver(monkeypatch, tmp_path):
    """tinygrad looks for the driver in CUDA_PATH itself: it becomes a folder with a link to it, and with all that the user's has."""
    toolkit, driver = tmp_path / "toolkit", tmp_path / "driver" / "libcuda.so.1"
    for place in ("bin/nvcc", "include/cuda_fp16.h", "include/nv/target"):
        (toolkit / place).parent.mkdir(parents=True, exist_ok=True)
        (toolkit / place).touch()
    monkeypatch.setattr(nvrtc, "_loaded_from", lambda name: driver)
    monkeypatch.setattr(nvrtc, "_headers", lambda library: [toolkit / "include"])
    monkeypatch.setenv("NVRTC_PATH", "/some/libnvrtc.so")
    monkeypatch.setenv("CUDA_PATH", str(toolkit))
    for _ in range(2):  # the second time, CUDA_PATH is the folder of links, as in a child process
        nvrtc.provide_nvrtc(tmp_path / "cache")
        links = Path(os.environ["CUDA_PATH"])
        assert links.parent == tmp_path / "cache" and (links / "libcuda.so.1").readlink() == driver
        assert (links / "bin/nvcc").is_file() and (links / "include/cuda_fp16.h").is_file()
        assert nvrtc._named_toolkits()[0] == toolkit, "the user's choice is remembered"
    assert os.environ["NVRTC_PATH"] == "/some/libnvrtc.so" and len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("user", [None, "/no/such/folder"])
def test_the_driver_is_linked_with_any_cuda_path(monkeypatch, tmp_path, user):
    monkeypatch.setattr(nvrtc, "_loaded_from", lambda name: tmp_path / "libcuda.so.1")
    monkeypatch.setattr(nvrtc, "_headers", lambda library: [])
    monkeypatch.setenv("NVRTC_PATH", "/some/libnvrtc.so")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    if user is not None:
        monkeypatch.setenv("CUDA_PATH", user)
    for _ in range(2):
        nvrtc.provide_nvrtc(tmp_path / "cache")
        assert (Path(os.environ["CUDA_PATH"]) / "libcuda.so.1").is_symlink()
        assert nvrtc._users_toolkit() == (None if user is None else Path(user))
    assert len(list((tmp_path / "cache").iterdir())) == 1


def nvrtc_wheels() -> list[Path]:
    """NVRTC of each wheel that is installed here."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    return [path for root in roots for path in sorted(root.glob("*/lib/libnvrtc.so*"))]


def test_the_wheels_of_cuda_12_and_13_are_both_tested():
    assert {path.name for path in nvrtc_wheels()} == {"libnvrtc.so.12", "libnvrtc.so.13"}, "try `make test`, which installs both"


COMPILE = """
import sys
from tinyvllm.backends.cuda import nvrtc
from tinyvllm.backends.kernel import Kernel
nvrtc.kernel_text = lambda kernel: 'extern "C" __global__ void scale(float *out) { *out = 2; }'
code = nvrtc.cubin(Kernel.cuda("scale", "sm_80", 1, 0, (1, 1, 1), 32), "sm_90")
print(nvrtc._nvrtc().path, code[1:4].decode())
"""


@pytest.mark.parametrize("library", nvrtc_wheels(), ids=lambda path: path.name)
def test_a_wheel_compiles_without_help_of_the_dynamic_loader(tmp_path, library):
    """CUDA 13's NVRTC opens libnvrtc-builtins by its bare name and has no RUNPATH: the loader does not search the wheel's folder."""
    environ = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "LD_PRELOAD")}
    environ |= {"NVRTC_PATH": str(library), "TINYVLLM_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environ, capture_output=True, text=True)
    assert done.stdout.split() == [str(library), "ELF"], done.stderr


def test_wheels_of_cuda_13_and_toolkits_are_found(monkeypatch, tmp_path):
    lib = "libnvrtc.so.13"
    for place in ("nvidia/cu13/lib", "toolkit/targets/x86_64-linux/lib", "nvidia/cu13/include/cccl/nv", "toolkit/include/nv"):
        (tmp_path / place).mkdir(parents=True)
    for place in ("nvidia/cu13/lib", "toolkit/targets/x86_64-linux/lib"):
        (tmp_path / place / lib).touch()
    for place in ("nvidia/cu13/include", "toolkit/include"):
        (tmp_path / place / "cuda_fp16.h").touch()
    for place in ("nvidia/cu13/include/cccl", "toolkit/include"):
        (tmp_path / place / "nv/target").touch()
    monkeypatch.setattr(nvrtc, "_wheels", lambda: [tmp_path / "nvidia/cu13"])
    monkeypatch.setattr(nvrtc, "_usual_toolkits", lambda: [])
    monkeypatch.delenv("NVRTC_PATH", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    named, wheel = [path for path in nvrtc._candidates() if path.is_absolute()]
    assert named == tmp_path / "toolkit/targets/x86_64-linux/lib" / lib and wheel == tmp_path / "nvidia/cu13/lib" / lib
    assert nvrtc._headers(named) == [tmp_path / "toolkit/include"]
    assert nvrtc._headers(wheel) == [tmp_path / "nvidia/cu13/include", tmp_path / "nvidia/cu13/include/cccl"]


def test_a_gpu_without_a_compiler_is_one_clear_line(monkeypatch, tmp_path):
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter([Path("libnvrtc.so.none")]))
    monkeypatch.setattr(device, "_cuda_devices", lambda: 1)
    nvrtc._nvrtc.cache_clear()
    try:
        with pytest.raises(KernelError, match=r"^CUDA found a GPU but no NVRTC, .*; try `pip install tinyvllm\[cuda\]`$"):
            device.start_device("CUDA", tmp_path)
    finally:
        nvrtc._nvrtc.cache_clear()
