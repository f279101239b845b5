"""CUDA kernels compile ahead: few texts for all batch sizes, several compilers at once, and what is on disk is not compiled again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from tests.emulator.driver import cuda_device
from tinyvllm.backends.cpu.cores import Cores
from tinyvllm.backends.cuda import attention_plan, compilers, launch, nvrtc, plan
from tinyvllm.backends.cuda.call import CudaBackend
from tinyvllm.backends.cuda.compilers import CompilerProcess
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.shapes import Attention
from tinyvllm.config.engine import DEFAULT_MODEL, EngineConfig
from tinyvllm.errors import KernelError
from tinyvllm.runner.prepare import decode_bucket
from tinyvllm.storage import building

BUCKETS = sorted({decode_bucket(n) for n in range(1, 257)})
H200 = plan.GPU(132, 227 << 10, 228 << 10)
TEXT = 'extern "C" __global__ void scale(float *x) { x[threadIdx.x] *= FACTOR; }'
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="NVRTC's wheel is for Linux")


def texts(kernels: list[Kernel]) -> Counter[str]:
    """How many texts each stem has."""
    return Counter(kernel.stem for kernel in {kernel.compiled for kernel in kernels})


# --- texts


def test_a_text_serves_all_numbers_of_rows(monkeypatch):
    """Rows up to eight are registers of the products, and the cut of a large product depends on them; no other text does."""
    found: list[Kernel] = []
    monkeypatch.setattr(CudaBackend, "compile_ahead", lambda self, kernels, placement: found.extend(kernels))
    from tinyvllm.runner.runner import Runner

    with cuda_device(seed=0, multiprocessors=132, races=False) as driver:
        options = EngineConfig(
            str(DEFAULT_MODEL), device="CUDA", max_model_len=128, max_num_seqs=256, max_num_batched_tokens=256, warm_up=True
        )
        Runner(options, "CUDA")
        assert found and not {kernel.stem for kernel in found} & {*driver.launched}, "they are found without a launch"
    counts, cuts = texts(found), len(plan.CUTS)
    assert counts.pop("matmul") <= 40 < 4 * cuts and counts.pop("matmul_hopper") <= 16
    assert counts == {
        "embed": 2, "norm_qkv_rope_store": 4, "attention_decode": 1, "attention_decode_team": 1, "attention_prefill": 1, "matvec": 8,
        "norm_gate_up_silu": 4, "norm_head": 4, "quantize_input": 4, "quantize_cores": 4, "rope_store": 1, "advance": 1,
        "kv_copy": 1, "sample": 1, "argmax": 1,
    }  # fmt: skip


def test_a_long_context_changes_no_text_of_attention_with_the_batch():
    """The places that sequences read for others have are fewer in large batches: an argument."""
    shape = Attention(32, 8, 128, 16, 8192, "BF16", "0.1f", 0)
    kernels = [attention_plan.attention_decode("sm_80", B, shape, H200, cascade=True)[0] for B in BUCKETS if B > 1]
    assert len({kernel.integers[1] for kernel in kernels}) > 3 and texts(kernels) == {"attention_decode": 1}


def test_the_draw_and_the_advance_have_one_text():
    sampled = dict.fromkeys(("TOP_K", "TOP_P", "MIN_P", "PENALIZED", "BIASED"), False) | {"SAMPLED": True}
    draws = [kernel for B in BUCKETS for kernel in plan.sample("sm_80", B, 151936, 256, sampled, H200)[0]]
    assert texts([*draws, *(plan.advance("sm_80", B, 256, 16, 8) for B in BUCKETS)]) == {"sample": 1, "advance": 1}


# --- compilers


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(launch, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(nvrtc, "kernel_text", lambda kernel: "".join(f"#define {n} {v}\n" for n, v in kernel.defines) + TEXT)
    yield tmp_path / "cache"
    launch._ahead.clear()
    launch.machine_code.cache_clear()


def scale(factor: float | str, T: int = 8) -> Kernel:
    return Kernel.cuda("scale", "sm_80", 1, 0, (T, 1, 1), 32, FACTOR=factor).passing(T)


def code_of(kernel: Kernel) -> bytes:
    return launch.machine_code(kernel.compiled, "sm_90")


@pytest.fixture
def started(monkeypatch):
    """The compiler processes that were started."""
    processes, start = [], compilers._started
    monkeypatch.setattr(compilers, "_started", lambda: processes.append(start()) or processes[-1])
    return processes


@LINUX
def test_kernels_compile_in_several_processes_at_once(cache, started, monkeypatch):
    """Each of two threads waits until the other has its process, too; both processes end with the work."""
    both, compile_one = threading.Barrier(2, timeout=60), CompilerProcess.compile

    def together(self, *what):
        both.wait()
        return compile_one(self, *what)

    monkeypatch.setattr(CompilerProcess, "compile", together)
    monkeypatch.setattr("tinyvllm.backends.ahead.cores", lambda: Cores(2, 2, 2))
    launch.compile_ahead([scale(2), scale(3), scale(2, T=16)], "CUDA")  # the third has the first one's text
    codes = [code_of(scale(2, T=24)), code_of(scale(3))]
    assert codes[0] != codes[1] and all(code[:4] == b"\x7fELF" for code in codes)
    assert len(started) == 2 and [process.wait(60) for process in started] == [0, 0]
    assert len([*(cache / "kernels").iterdir()]) == 2


@LINUX
def test_a_full_cache_compiles_nothing(cache, started, monkeypatch, tmp_path):
    """Also where it was copied to: no process is started, and none that was started here compiles."""
    kernels = [scale(2), scale(3)]
    launch.compile_ahead(kernels[:1], "CUDA")
    codes = [code_of(kernel) for kernel in kernels]  # the second is compiled in this process
    assert len(started) == 1
    launch.machine_code.cache_clear()
    shutil.copytree(cache, tmp_path / "copy")
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path / "copy"))
    monkeypatch.setattr(nvrtc._Nvrtc, "compile", None)
    launch.compile_ahead(kernels[:1], "CUDA")
    assert [code_of(kernel) for kernel in kernels] == codes and len(started) == 1


@LINUX
def test_a_failure_ahead_is_raised_where_the_kernel_is_needed(cache):
    launch.compile_ahead([scale("FACTORY")], "CUDA")
    with pytest.raises(KernelError, match="scale_sm_80 does not compile with nvrtc .*FACTORY"):
        code_of(scale("FACTORY"))


@LINUX
def test_a_compiler_process_that_is_killed_is_replaced_by_this_one(started):
    options = ("--gpu-architecture=sm_90",)
    with CompilerProcess() as compiler:
        code = compiler.compile("#define FACTOR 2\n" + TEXT, "scale", options)
        started[0].kill()
        started[0].wait()
        assert compiler.compile("#define FACTOR 2\n" + TEXT, "scale", options) == code and len(started) == 1


def test_without_a_python_to_start_this_process_compiles(monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setattr(nvrtc, "compile_here", lambda text, name, options: b"here")
    with CompilerProcess() as compiler:
        assert compiler.compile("text", "scale", ()) == b"here"


def test_processes_that_need_the_same_cubin_compile_it_once(cache, monkeypatch):
    """A second one waits while the first compiles, and finds the machine code in the cache."""
    compiling, go, compiled, codes = threading.Event(), threading.Event(), [], []

    def slow(text, name, options):
        compiled.append(name)
        compiling.set()
        assert go.wait(60)
        return b"code"

    monkeypatch.setattr(building.time, "sleep", lambda seconds: go.set())  # the second one waits now
    first = threading.Thread(target=lambda: codes.append(nvrtc.cubin(scale(2), "sm_90", slow)))
    first.start()
    assert compiling.wait(60)
    codes.append(nvrtc.cubin(scale(2), "sm_90", slow))
    first.join(60)
    assert codes == [b"code"] * 2 and compiled == ["scale_sm_80"]


@LINUX
def test_generated_kernels_are_on_disk_too(tmp_path):
    """In processes of their own. The second compiles nothing; the third has a copy of the folder."""
    pytest.importorskip("nvidia.cuda_cccl", reason="the headers are not installed")
    code = (
        "import pathlib\nfrom tinyvllm.config.switches import cache_folder\nfrom tinyvllm.backends.cuda.nvrtc import provide_nvrtc\n"
        "provide_nvrtc(cache_folder())\nfrom tinyvllm.bridge.compiling import compile_clock, timed\n"
        "from tinyvllm.bridge.programs import enable_program_cache\nenable_program_cache('machine')\n"
        "from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler\n"
        "compiler = NVRTCCompiler('sm_90', ptx=False, cache_key='cuda_cubin'); compiler.compile = timed(compiler.compile)\n"
        "code = compiler.compile_cached('extern \"C\" __global__ void f(float *x) { x[0] = 1; }')\n"
        "print(code[1:4].decode(), compile_clock.seconds > 0)"
    )

    def run(cache: Path) -> str:
        environment = os.environ | {"TINYVLLM_CACHE": str(cache)}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout

    assert [run(tmp_path / "cache"), run(tmp_path / "cache")] == ["ELF True\n", "ELF False\n"]
    shutil.copytree(tmp_path / "cache", tmp_path / "copy", symlinks=True)
    assert run(tmp_path / "copy") == "ELF False\n"
