"""Compiles C kernels and keeps the result in the cache folder, by what it was made of: source, flags, target and processor architecture.

What is kept is the machine code as it is loaded, not the object file: what reads object files takes 14 ms of a start to import.

The compiler is not part of the key. The flags leave it no freedom that changes results (no contraction, no fast math), so the code of
another compiler computes the same, and a copied cache folder works where there is no compiler at all. To have all compiled by
another compiler, delete the folder `kernels`.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import subprocess
import sys
import threading
from collections.abc import Callable

from tinyvllm.backends.cpu.toolchain import compiler_command, target_flags
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.source import kernel_source, kernel_text
from tinyvllm.errors import KernelError, ToolchainError
from tinyvllm.storage.building import kept_or_built
from tinyvllm.storage.cache import open_cache
from tinyvllm.storage.folders import reason_of, temporary_folder

VERSION = 2  # of the code in the cache folder: a change compiles all again
_QUIET = ("-Wno-deprecated-non-prototype", "-Wno-pass-failed")
_COMMON = ("-x", "c", "-O2", "-fPIC", "-fno-math-errno", "-fno-ident", "-fno-stack-protector", *_QUIET)
# A kernel is freestanding: it is not linked with anything, so the compiler must not insert calls to memset or memcpy.
_ALONE = ("-c", "-ffreestanding", "-nostdlib", "-fno-builtin", "-fno-jump-tables", "-ffp-contract=off")
# tinygrad loads ELF everywhere; macOS's own format is another
_ELF = (f"--target={platform.machine()}-none-unknown-elf",) if sys.platform == "darwin" else ()
_FLAGS = (*_COMMON, *_ALONE, *_ELF)
_ROOM = "kernels"  # of the cache folder
_INTRINSICS = "#include <immintrin.h>"
_WITH_INTRINSICS = ("amx", "avx512", "avxvnni", "avx2")  # targets that include it
# Headers that it includes and the lanes need, by the flag that a kernel is compiled with.
_PARTS = {
    "-march=x86-64-v3": ("mm", "xmm", "emm", "pmm", "tmm", "smm", "avx", "avx2", "f16c", "fma"),
    "-march=x86-64-v4": ("mm", "xmm", "emm", "pmm", "tmm", "smm", "avx", "avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512dq"),
    "-mavx512bf16": ("avx512bf16",),
    "-mavx512vnni": ("avx512vnni",),
    "-mavx512vbmi": ("avx512vbmi",),
    "-mavxvnni": ("avxvnni",),
    "-mamx-tile": ("amx",),
}
_NOT_PRECOMPILED = 2  # kernels of a process that are compiled without the header: most processes compile none, or one
# Before the headers, which define functions.
_ENTRY = """long {stem}();
typedef long (*called)(long, long, long, long, long, long);
long entry(long f, long a, long b, long c, long d, long e) {{ return ((called){stem})(f, a, b, c, d, e); }}
"""


def kernel_code(kernel: Kernel) -> bytes:
    """The machine code of a CPU kernel, which begins with its entry. KernelError with the compiler's words where it does not compile."""
    return _compiled(kernel_text(kernel), kernel.name, kernel.target)


def function_code(stem: str) -> bytes:
    """The machine code of `kernels/cpu/STEM.c` with the function STEM, of six integers, at its start: code that Python calls itself."""
    return _compiled(_ENTRY.format(stem=stem) + kernel_source("cpu", stem), stem, "plain")


def prepare_header(target: str) -> None:
    """On the first start of a machine: the header that its kernels wait for, in the background while tinygrad is imported."""
    with contextlib.suppress(RuntimeError):  # no thread for want of memory: opening the device says so
        _prepare(target, lambda: _intrinsics.precompile(compiler_command(), (*_FLAGS, *target_flags(target))))


def prepare_compiler(target: str) -> None:
    """On the first start of a machine: what all its kernels wait for, in the background while the model is opened."""

    def prepare() -> None:
        _intrinsics.precompile(compiler_command(), (*_FLAGS, *target_flags(target)))
        function_code("thread_pool")

    _prepare(target, prepare)


def _prepare(target: str, prepare: Callable[[], object]) -> None:
    def prepare_quietly() -> None:
        with contextlib.suppress(KernelError, ToolchainError, OSError):  # the first kernel will say so
            prepare()

    room = open_cache().room(_ROOM)
    if target in _WITH_INTRINSICS and room is not None and not any(room.glob("*.code")):
        threading.Thread(target=prepare_quietly, name="tinyvllm-compile-header", daemon=True).start()


def _compiled(text: str, name: str, target: str) -> bytes:
    from tinyvllm.bridge import compile_clock  # not above: the header is prepared while tinygrad is imported

    flags = (*_FLAGS, *target_flags(target))
    key = "\0".join((text, *flags, sys.platform, platform.machine(), str(VERSION)))
    place = f"{_ROOM}/{name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.code"
    return kept_or_built(place, lambda: _compile(text, flags, name), compile_clock.compiling)


def _compile(text: str, flags: tuple[str, ...], name: str) -> bytes:
    """The code that the compiler makes of a text, through a pipe: a full disk or a limit on files' sizes does not stop it."""
    from tinyvllm.bridge import load_object

    compiler = compiler_command()
    try:
        precompiled = _intrinsics.flags(compiler, flags) if _INTRINSICS in text else ()
        done = _run([*compiler, *flags, *precompiled], text)
        if done.returncode and precompiled:
            _intrinsics.give_up(compiler, flags)
            done = _run([*compiler, *flags], text)
    except OSError as error:
        raise ToolchainError(f"kernels: {name} cannot be compiled: {compiler[0]}: {reason_of(error)}; CC names another compiler") from error
    if done.returncode or not done.stdout:
        raise KernelError(f"kernels: {name} does not compile with {compiler[0]}: {_first_errors(done.stderr.decode(errors='replace'))}")
    return load_object(done.stdout)


def _run(command: list[str], text: str, output: str = "-") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*command, "-", "-o", output], input=text.encode(), capture_output=True)


class _PrecompiledHeader:
    """The header of the intrinsics, parsed once for the kernels that one process compiles: reading it takes half the time of a kernel.

    0.12 s of 0.25 s, and 0.1 s to precompile those of its parts that kernels need (0.22 s for all of it), so the first ones do without it,
    but for the first start of a machine, which compiles many. It is not kept: its next use would depend on the compiler and on the times of
    its files. Objects are the same with it, bit by bit.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: dict[tuple[str, ...], int] = {}  # kernels by compiler and flags
        self._flags: dict[tuple[str, ...], tuple[str, ...]] = {}

    def flags(self, compiler: list[str], flags: tuple[str, ...]) -> tuple[str, ...]:
        """Further flags for a kernel with this header; none for the first ones, and where it cannot be precompiled."""
        key = (*compiler, *flags)
        with self._lock:
            self._compiled[key] = self._compiled.get(key, 0) + 1
            if self._compiled[key] > _NOT_PRECOMPILED and key not in self._flags:
                self._flags[key] = self._precompile(compiler, flags)
            return self._flags.get(key, ())

    def precompile(self, compiler: list[str], flags: tuple[str, ...]) -> None:
        """Precompile it now; kernels wait for it."""
        with self._lock:
            if (key := (*compiler, *flags)) not in self._flags:
                self._flags[key] = self._precompile(compiler, flags)

    def give_up(self, compiler: list[str], flags: tuple[str, ...]) -> None:
        """Do without it from now on: a kernel did not compile with it."""
        with self._lock:
            self._flags[*compiler, *flags] = ()

    def _precompile(self, compiler: list[str], flags: tuple[str, ...]) -> tuple[str, ...]:
        folder = temporary_folder()
        if folder is None:
            return ()
        as_header = ["c-header" if flag == "c" else flag for flag in flags if flag != "-c"]
        path = str(folder / "intrinsics.pch")
        parts = "".join(f"#include <{part}intrin.h>\n" for flag in flags for part in _PARTS.get(flag, ()))
        done = _run([*compiler, *as_header], f"#define __IMMINTRIN_H\n{parts}", path)  # its guard: the parts ask for it
        return () if done.returncode else ("-include-pch", path)


_intrinsics = _PrecompiledHeader()


def _first_errors(said: str) -> str:
    errors = [line for line in said.splitlines() if "error" in line] or said.splitlines()
    return "; ".join(errors[:3]) + (f" (and {len(errors) - 3} more)" if len(errors) > 3 else "")
