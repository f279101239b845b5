"""Compiled kernels: cached by what they are compiled from, compiled again when that changes; errors quote the compiler."""

from __future__ import annotations

import platform
import shutil
import subprocess
import threading
from dataclasses import replace

import pytest

from tinyvllm import bridge
from tinyvllm.backends import ahead
from tinyvllm.backends.collecting import collecting_kernels
from tinyvllm.backends.cpu import compile as module
from tinyvllm.backends.cpu import launch
from tinyvllm.backends.cpu.compile import function_code, kernel_code
from tinyvllm.backends.cpu.cores import Cores
from tinyvllm.backends.cpu.toolchain import compiler_command
from tinyvllm.backends.kernel import Kernel
from tinyvllm.bridge import load_object
from tinyvllm.errors import KernelError
from tinyvllm.storage import building


def copy(block_bytes: int | str = 64, target: str = "plain") -> Kernel:
    return Kernel("kv_copy", "cpu", target, (("BLOCK_BYTES", block_bytes),), 1, 2)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder with nothing in it; `made` lists what compilers made there."""
    compiler_command()  # before the count begins
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def runs(monkeypatch):
    """The compiler's runs, counted."""
    run, seen = subprocess.run, []

    def counted(command, **options):
        seen.append(command)
        return run(command, **options)

    monkeypatch.setattr(module.subprocess, "run", counted)
    return seen


def test_the_same_text_is_found_on_disk(cache, runs):
    first = kernel_code(copy())
    (path,) = cache.iterdir()
    assert path.name.startswith("kv_copy_plain-") and path.suffix == ".code" and path.read_bytes().endswith(first)
    assert kernel_code(copy()) == first and len(runs) == 1


@pytest.mark.parametrize("other", [copy(128), Kernel("kv_copy", "cpu", "plain", (("BLOCK_BYTES", 64), ("MORE", 1)), 1, 2)])
def test_another_constant_is_another_object(cache, runs, other):
    kernel_code(copy())
    kernel_code(other)
    assert len(runs) == len(list(cache.iterdir())) == 2


def test_other_flags_make_another_object(cache, runs, monkeypatch):
    kernel_code(copy())
    monkeypatch.setattr(module, "target_flags", lambda target: ("-O1",))
    kernel_code(copy())
    monkeypatch.setattr(module.platform, "machine", lambda: "riscv64")
    kernel_code(copy())
    assert len(runs) == len(list(cache.iterdir())) == 3


def test_a_copied_folder_is_used_as_it_is_without_a_compiler(cache, runs, monkeypatch, tmp_path):
    code = kernel_code(copy())
    shutil.copytree(cache.parent, tmp_path / "image" / "cache")  # as into a container: another path, other times
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path / "image" / "cache"))
    monkeypatch.setenv("CC", "/no/such/compiler")
    assert kernel_code(copy()) == code and len(runs) == 1


def test_what_does_not_compile_is_said_in_the_compilers_words(cache):
    with pytest.raises(KernelError, match="kv_copy_plain does not compile with .*:(.|\n)*error: .*nonsense"):
        kernel_code(copy("nonsense"))
    assert list(cache.iterdir()) == [], "a failed compilation leaves no file that could pass for a result"


def test_a_compiler_that_fails_without_a_word(cache, monkeypatch):
    monkeypatch.setenv("CC", "/bin/false")
    with pytest.raises(KernelError, match="kv_copy_plain does not compile with /bin/false"):
        kernel_code(copy())


def test_a_compiler_that_cannot_be_started(cache, monkeypatch):
    monkeypatch.setenv("CC", "/no/such/compiler")
    with pytest.raises(KernelError, match="kv_copy_plain cannot be compiled: /no/such/compiler: No such file.*CC names another"):
        kernel_code(copy())


def test_an_object_needs_nothing_and_begins_with_its_entry(cache, monkeypatch):
    """What tinygrad's loader makes of it is code to jump to: it says so if a symbol is undefined."""
    from tinygrad.runtime.support.elf import elf_loader, jit_loader

    monkeypatch.setattr(bridge, "load_object", lambda code: code)
    code = kernel_code(copy())
    assert len(jit_loader(code)) > 0
    _, sections, _ = elf_loader(code)
    assert any(section.name == ".text" and section.header.sh_size for section in sections)


def test_code_that_python_calls_is_loaded_from_memory(cache, runs):
    code = function_code("thread_pool")
    (path,) = cache.iterdir()
    assert path.suffix == ".code" and function_code("thread_pool") == code and len(runs) == 1


def test_kernels_compile_ahead_at_the_same_time(cache, monkeypatch):
    """Two compilers run at once, and the step that needs a kernel waits for it."""
    both, compile_one = threading.Barrier(2, timeout=60), module._compile

    def together(text, flags, name):
        both.wait()
        return compile_one(text, flags, name)

    monkeypatch.setattr(module, "_compile", together)
    monkeypatch.setattr(ahead, "cores", lambda: Cores(2, 2, 2))
    kernels = [copy(72), copy(80)]
    launch.compile_ahead([*kernels, kernels[0]])
    assert len({launch.machine_code(kernel) for kernel in kernels}) == 2  # both were compiled ahead: a third call would wait in vain
    assert not any(kernel in launch._ahead._pending for kernel in kernels)


def test_kernels_with_one_code_are_compiled_once(cache, runs):
    """Records that differ in what a launch of them does: a second compiler would wait for the first."""
    few, many = (replace(copy(88), flops=work, bytes=work) for work in (1, 1000))
    launch.compile_ahead([few, many])
    assert launch._ahead._pending.keys() & {few, many, few.compiled} == {few.compiled}
    assert launch.machine_code(few.compiled) == launch.machine_code(many.compiled) and len(runs) == 1


def test_a_failure_ahead_is_raised_where_the_kernel_is_needed(cache):
    bad = copy("nonsense")
    launch.compile_ahead([bad])
    with pytest.raises(KernelError, match="does not compile"):
        launch.machine_code(bad)


def test_ops_can_be_asked_which_kernels_they_need():
    with collecting_kernels() as kernels:
        assert launch.launch(copy(), ["out"], ["pairs", "count"]) == ["out"]
    assert kernels == [copy()]


def test_processes_that_need_the_same_object_compile_it_once(cache, runs, monkeypatch):
    """A second one waits while the first compiles, and finds the object in the cache."""
    compiling, go, compile_one = threading.Event(), threading.Event(), module._compile

    def slow(text, flags, name):
        compiling.set()
        assert go.wait(60)
        return compile_one(text, flags, name)

    monkeypatch.setattr(module, "_compile", slow)
    monkeypatch.setattr(building.time, "sleep", lambda seconds: go.set())  # the second one waits now
    codes: list[bytes] = []
    first = threading.Thread(target=lambda: codes.append(kernel_code(copy())))
    first.start()
    assert compiling.wait(60)
    codes.append(kernel_code(copy()))
    first.join(60)
    assert codes[0] == codes[1] and len(runs) == 1
    assert [path.suffix for path in cache.iterdir()] == [".code"], "no lock file is left"


X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="of the intrinsics of x86-64")
SUM = (
    "#include <immintrin.h>\nlong entry(long a) {{ __m128i x = _mm_set1_epi64x(a + {0}); return _mm_cvtsi128_si64(_mm_add_epi64(x, x)); }}"
)


@pytest.fixture
def header(monkeypatch):
    """The precompiled header of a process that has compiled nothing."""
    header = module._PrecompiledHeader()
    monkeypatch.setattr(module, "_intrinsics", header)
    return header


@X86
def test_the_header_of_intrinsics_is_precompiled_once_for_many_kernels(cache, runs, header):
    objects = [module._compiled(SUM.format(i), "sum", "avx2") for i in range(5)]
    assert len(runs) == 6 and [("-include-pch" in run) for run in runs] == [False, False, False, True, True, True]
    assert any("c-header" in run for run in runs[2:3])
    plain = [load_object(module._run([*compiler_command(), *_flags("avx2")], SUM.format(i)).stdout) for i in range(5)]
    assert objects == plain, "the same bits as without"


@X86
@pytest.mark.parametrize("failing", ["header", "kernel"])
def test_a_compiler_without_precompiled_headers(cache, header, monkeypatch, failing):
    run, seen = subprocess.run, []

    def fails(command, **options):
        seen.append(command)
        if failing == ("header" if "c-header" in command else "kernel" if "-include-pch" in command else ""):
            return subprocess.CompletedProcess(command, 1, b"", b"error: unknown argument")
        return run(command, **options)

    monkeypatch.setattr(module.subprocess, "run", fails)
    assert all(module._compiled(SUM.format(i), "sum", "avx2") for i in range(6))
    assert len(seen) == (7 if failing == "header" else 8), "asked for once"


def _flags(target: str) -> tuple[str, ...]:
    return (*module._COMMON, *module._ALONE, *module._ELF, *module.target_flags(target))
