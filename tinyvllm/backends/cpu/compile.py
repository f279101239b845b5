"""Compiles C kernels and keeps the result on disk, by what it was made of: source, compiler, flags and target."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

from tinyvllm.backends.cpu.toolchain import provide_compiler, target_flags
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.source import kernel_source, kernel_text
from tinyvllm.config import cache_folder
from tinyvllm.errors import KernelError

_QUIET = ("-Wno-deprecated-non-prototype", "-Wno-pass-failed")
_COMMON = ("-x", "c", "-O2", "-fPIC", "-fno-math-errno", "-fno-ident", "-fno-stack-protector", *_QUIET)
# A kernel is freestanding: it is not linked with anything, so the compiler must not insert calls to memset or memcpy.
_ALONE = ("-c", "-ffreestanding", "-nostdlib", "-fno-builtin", "-fno-jump-tables", "-ffp-contract=off")
# tinygrad loads ELF everywhere; macOS's own format is another
_ELF = (f"--target={platform.machine()}-none-unknown-elf",) if sys.platform == "darwin" else ()


def object_code(kernel: Kernel) -> bytes:
    """The object file of a CPU kernel. KernelError with the compiler's words where it does not compile."""
    flags = (*_COMMON, *_ALONE, *_ELF, *target_flags(kernel.target))
    return _compiled(kernel_text(kernel), flags, kernel.name, ".o").read_bytes()


def library(stem: str) -> Path:
    """The shared library made of `kernels/cpu/STEM.c`, for code that Python calls itself."""
    ending = ".dylib" if sys.platform == "darwin" else ".so"
    return _compiled(kernel_source("cpu", stem), (*_COMMON, "-shared", "-nostdlib"), stem, ending)


def _compiled(text: str, flags: tuple[str, ...], name: str, ending: str) -> Path:
    compiler = provide_compiler(cache_folder())
    made_of = "\0".join((text, *flags, _identity(compiler)))
    path = cache_folder() / "kernels" / f"{name}-{hashlib.sha256(made_of.encode()).hexdigest()[:32]}{ending}"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        done = subprocess.run([compiler, *flags, "-", "-o", str(fresh)], input=text, capture_output=True, text=True)
        if done.returncode:
            fresh.unlink(missing_ok=True)
            raise KernelError(f"kernels: {name} does not compile with {compiler}: {_first_errors(done.stderr)}")
        fresh.replace(path)  # another process may be reading or writing the same
    return path


def _first_errors(said: str) -> str:
    errors = [line for line in said.splitlines() if "error" in line] or said.splitlines()
    return "; ".join(errors[:3]) + (f" (and {len(errors) - 3} more)" if len(errors) > 3 else "")


@functools.cache
def _identity(compiler: str) -> str:
    """The compiler by path, size and time of its file: asking it for its version would cost as much as compiling."""
    try:
        said = os.stat(compiler)
    except OSError:
        return compiler
    return f"{compiler} {said.st_size} {said.st_mtime_ns}"
