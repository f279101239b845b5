"""Runs GPU kernels, unchanged, on the CPU, and reports their errors: races, bounds, reads of unwritten memory, divergence.

`emulate` takes a Kernel record and numpy arrays; `emulate_source` any text of CUDA C or Metal, and memory at given addresses. README.md
lists what is modelled.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import gc
import hashlib
import itertools
import mmap
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.emulator import elf, metal
from tests.emulator.places import FOLDER, HERE
from tinyvllm.backends.cpu.toolchain import cpu_features, provide_compiler
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.source import kernel_text
from tinyvllm.storage.folders import temporary_folder

STACK = 128 * 1024  # bytes a thread, as in core.cpp
GAP = 1024  # bytes between arrays, which no thread may access


@dataclass(frozen=True)
class Language:
    """The files of this folder that implement a language, and the limits of its machines.

    max_shared    bytes of shared memory of a block, declared and dynamic together
    max_declared  of these, declared
    max_blocks    of a grid, in y and z
    """

    name: str
    ending: str
    headers: str
    flags: tuple[str, ...]
    max_shared: int
    max_declared: int
    max_blocks: int

    def files(self) -> list[Path]:
        return [HERE / f"{self.name}.h", *sorted(p for p in (HERE / self.headers).iterdir() if p.is_file())]


LANGUAGES = {
    "cuda": Language("cuda", ".cu", "include", ("-mllvm", "-tsan-distinguish-volatile=1"), 227 * 1024, 48 * 1024, 65535),
    "metal": Language("metal", ".metal", "include/metal", ("-fsigned-char", "-fexcess-precision=16"), 32 * 1024, 32 * 1024, 1 << 21),
}


class EmulatorError(AssertionError):
    """A kernel did something invalid: the message names the thread, the access or call, and the source line."""


@dataclass(frozen=True)
class Memory:
    """Bytes that a kernel may access."""

    address: int
    size: int
    name: str
    writable: bool = True


class _MemoryRange(ctypes.Structure):
    _fields_ = [
        ("low", ctypes.c_uint64), ("size", ctypes.c_uint64), ("name", ctypes.c_char_p),
        ("writable", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("read", ctypes.c_uint64),
    ]  # fmt: skip


class _Launch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("entry", "arguments", "ranges", "stacks", "error")),
        *((name, ctypes.c_uint64) for name in ("stacks_size", "seed", "accesses", "site", "other_site", "image")),
        *((name, ctypes.c_uint32) for name in ("argument_count", "range_count", "error_size", "shared", "races", "resident", "awaits")),
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3),
    ]  # fmt: skip


def emulate(
    kernel: Kernel, *arrays: np.ndarray, seed: int = 0, races: bool = True, resident: int = 3, read: list[int] | None = None
) -> int:
    """Run a kernel's whole grid on `arrays` (outs, then ins, C-contiguous; outs are changed in place).

    Every array is copied to memory of its own, aligned to 256 bytes; arrays that overlap on the host also overlap there. `seed` determines
    the order of threads and blocks. Without `races` everything but races is checked, in half to a third of the time. `resident` thread
    blocks run at the same time. `read` receives the number of bytes that threads read of each array (bytes read twice count twice).
    Returns the number of memory accesses. Raises EmulatorError.
    """
    if len(arrays) != kernel.outs + kernel.ins:
        raise EmulatorError(f"{kernel.stem} takes {kernel.outs} + {kernel.ins} arrays, got {len(arrays)}")
    for index, array in enumerate(arrays):
        if not array.flags.c_contiguous:
            raise EmulatorError(f"{kernel.stem}: argument {index} must be C-contiguous")
    copies = Arrays(arrays, kernel.outs)
    arguments = [*copies.addresses, *kernel.integers]
    block = kernel.block if isinstance(kernel.block, tuple) else (kernel.block, 1, 1)
    text = kernel_text(kernel, instead=HERE / "include" if kernel.backend == "cuda" else None)
    if kernel.backend == "metal":
        metal.check_record(kernel, text)
    count = emulate_source(
        text, kernel.stem, kernel.grid, block, kernel.shared, arguments, copies.memory, seed, races, resident, kernel.backend, read
    )
    if read is not None:
        read[:] = [read[place] for place in copies.places]
    copies.copy_back()
    return count


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection within: a destructor that it runs (of a graph, a buffer) calls the emulated driver, which would run what was
    issued later in the middle of this launch, on this launch's stacks. A GPU runs destructors of the host next to its kernels.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def emulate_source(
    text: str, entry: str, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, arguments: Sequence[int],
    memory: Sequence[Memory], seed: int = 0, races: bool = True, resident: int = 3, language: str = "cuda", read: list[int] | None = None,
) -> int:  # fmt: skip
    """Run the function `entry` of a text. `memory`: all that it may access. `arguments`: addresses or integers, in its order; in Metal
    addresses, in the order of buffers.

    `shared`: bytes of dynamic shared memory. `read`: receives the number of bytes that threads read of each memory. Returns the number of
    memory accesses. Raises EmulatorError.
    """
    image = build(text, language)
    with uncollected(), image.lock:
        return _launch(image, entry, grid, block, shared, arguments, memory, seed, races, resident, read)


def _launch(
    image: Image, entry: str, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, arguments: Sequence[int],
    memory: Sequence[Memory], seed: int, races: bool, resident: int, read: list[int] | None,
) -> int:  # fmt: skip
    _check_launch(image, entry, grid, block, shared)
    threads = block[0] * block[1] * block[2]
    resident = max(1, min(resident, grid[0] * grid[1] * grid[2]))
    stacks = _stacks(threads * resident * STACK)
    values = (ctypes.c_uint64 * 32)(*(value & (1 << 64) - 1 for value in arguments))
    first = values
    if image.language.name == "metal":  # one argument: the address of the others
        first = (ctypes.c_uint64 * 24)(ctypes.addressof(values))
        arguments = [ctypes.addressof(values)]
    ranges = (_MemoryRange * len(memory))(*(_MemoryRange(m.address, m.size, m.name.encode(), m.writable, 0, 0) for m in memory))
    error = ctypes.create_string_buffer(2048)
    launch = _Launch(
        entry=ctypes.cast(image.entry(entry), ctypes.c_void_p).value, arguments=ctypes.addressof(first),
        ranges=ctypes.addressof(ranges), stacks=stacks, error=ctypes.addressof(error), stacks_size=threads * resident * STACK, seed=seed,
        argument_count=len(arguments), range_count=len(memory), error_size=len(error), shared=shared, races=races, resident=resident,
        awaits=image.awaits, grid=(ctypes.c_uint32 * 3)(*grid), block=(ctypes.c_uint32 * 3)(*block),
    )  # fmt: skip
    if image.library.core_launch(ctypes.byref(launch)):
        raise EmulatorError(f"{entry}: {error.value.decode(errors='replace')}{image.places(launch)}")
    if read is not None:
        read[:] = [one.read for one in ranges]
    return int(launch.accesses)


def _check_launch(image: Image, entry: str, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int) -> None:
    threads = block[0] * block[1] * block[2]
    bound = image.bounds.get(entry, 1024)
    if not 1 <= threads <= min(1024, bound) or block[2] > 64:
        raise EmulatorError(
            f"{entry}: {block} threads in a block; expected at most {min(1024, bound)}, by the source's launch bounds and the machine"
        )
    limits = image.language
    if not (1 <= grid[0] < 1 << 21 and 1 <= grid[1] <= limits.max_blocks and 1 <= grid[2] <= limits.max_blocks):
        raise EmulatorError(f"{entry}: a grid of {grid} blocks; expected 1 to {limits.max_blocks} in y and z and at least 1 in x")
    if shared + image.static_shared > limits.max_shared or image.static_shared > limits.max_declared:
        raise EmulatorError(
            f"{entry}: {image.static_shared} bytes of shared memory declared and {shared} dynamic; "
            f"expected at most {limits.max_declared} and together {limits.max_shared}"
        )
    if shared and limits.name == "metal":
        raise EmulatorError(f"{entry}: {shared} bytes of threadgroup memory given at launch, which tinygrad does not support; declare them")


class Arrays:
    """Copies of arrays, with gaps between those that do not overlap."""

    def __init__(self, arrays: Sequence[np.ndarray], outs: int) -> None:
        self.arrays, self.outs = arrays, outs
        spans = sorted((a.ctypes.data, a.ctypes.data + a.nbytes, i) for i, a in enumerate(arrays))
        groups: list[list[int]] = []  # start, end, arguments
        for start, end, index in spans:
            if groups and start < groups[-1][1]:
                groups[-1][1] = max(groups[-1][1], end)
                groups[-1][2:] += [index]
            else:
                groups.append([start, end, index])
        room = sum((end - start + 2 * GAP) // 256 * 256 + 256 for start, end, *_ in groups) + 256
        self.raw = np.empty(room, np.uint8)
        at = -self.raw.ctypes.data % 256 + GAP // 256 * 256
        self.addresses, self.places = [0] * len(arrays), [0] * len(arrays)  # `places`: indices in `memory`
        self.memory: list[Memory] = []
        self.moves: list[tuple[int, int]] = []
        for start, end, *indices in groups:
            base = self.raw.ctypes.data + at
            for index in indices:
                offset = arrays[index].ctypes.data - start
                self.addresses[index], self.places[index] = base + offset, len(self.memory)
                self._bytes_at(index)[...] = arrays[index].reshape(-1).view(np.uint8)
            names = " and ".join(f"argument {i}" for i in sorted(indices))
            self.memory.append(Memory(base, end - start, names, writable=min(indices) < outs))
            at += (end - start + GAP + 255) // 256 * 256
        assert at <= room

    def _bytes_at(self, index: int) -> np.ndarray:
        start = self.addresses[index] - self.raw.ctypes.data
        return self.raw[start : start + self.arrays[index].nbytes]

    def copy_back(self) -> None:
        for index in range(self.outs):
            array = self.arrays[index]
            array[...] = self._bytes_at(index).view(array.dtype).reshape(array.shape)


_KEPT: list[mmap.mmap] = []


def _stacks(size: int) -> int:
    """Memory for the threads' stacks: one per process, because it is expensive to get touched pages again."""
    if not _KEPT or len(_KEPT[-1]) < size:
        _KEPT.append(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    return ctypes.addressof(ctypes.c_char.from_buffer(_KEPT[-1]))


def awaits_previous(text: str) -> bool:
    """Whether a kernel calls the function of gpu.cuh that waits for the kernel before it."""
    return re.search(r"^ *await_previous\(\);", text, re.MULTILINE) is not None


class Image:
    """A kernel's text as machine code, linked with the core."""

    def __init__(self, path: Path, text: str, language: Language) -> None:
        self.path, self.text, self.language = path, text, language
        self.library = ctypes.CDLL(str(path))
        names = _bounds(text) if language.name == "cuda" else [signature.name for signature in metal.signatures(text)]
        self.bounds = {name: ctypes.c_int.in_dll(self.library, f"gpu_bounds_{name}").value for name in names}
        self.static_shared = self.library.core_static_shared()
        self.awaits = awaits_previous(text)
        self.lock = _LAUNCH_LOCK

    def entry(self, name: str) -> Any:
        return getattr(self.library, name if self.language.name == "cuda" else f"metal_entry_{name}")

    def places(self, launch: _Launch) -> str:
        """The source lines of an error, if a symbolizer is on the PATH."""
        locations = []
        for what, site in (("at", launch.site), ("against", launch.other_site)):
            if site > launch.image:
                locations += [f"\n  {what if i == 0 else 'in'} {line}" for i, line in enumerate(self._lines(site - launch.image - 1))]
        return "".join(locations)

    def _lines(self, offset: int) -> list[str]:
        tool = shutil.which("llvm-symbolizer") or shutil.which("addr2line")
        if tool is None:
            return [f"byte {offset:#x} of {self.path}"]
        inlines = ["--inlines", "--functions=none"] if "llvm" in tool else ["-i"]
        out = subprocess.run([tool, *inlines, "-e", str(self.path), hex(offset)], capture_output=True, text=True).stdout
        source = self.text.splitlines()
        lines = []
        for number in re.findall(rf"{re.escape(self.path.with_suffix(self.language.ending).name)}:(\d+)", out):
            if 0 < int(number) <= len(source):
                lines.append(f"line {number}: {source[int(number) - 1].strip()}")
        return lines


_LAUNCH_LOCK = threading.Lock()


def _bounds(text: str) -> dict[str, str]:
    """The __launch_bounds__ of each kernel."""
    code = re.sub(r"//[^\n]*", "", text)
    return {name: bound for bound, name in re.findall(r"__launch_bounds__\(([^(),]+)(?:,[^()]*)?\)\s*(\w+)\s*\(", code)}


@functools.cache
def _flags() -> tuple[str, ...]:
    features = cpu_features()
    if {"avx2", "fma", "f16c", "bmi2"} <= features:
        return ("-march=x86-64-v3",)
    return ()


@functools.cache
def build(text: str, name: str = "cuda") -> Image:
    """Compile a kernel's text, with the language's headers before it, and link the core; cached in a folder by digest."""
    language = LANGUAGES[name]
    compiler = provide_compiler(FOLDER)
    core = _core(compiler, name)
    full = _with_entries(text, language)
    front, *_ = files = language.files()
    flags = (
        *_LANGUAGE, "-fPIC", "-O1", "-gline-tables-only", "-ffp-contract=off",
        "-fvisibility=hidden", "-fno-builtin-memcpy", "-fno-builtin-memset", "-fno-vectorize", "-fno-slp-vectorize",
        "-fno-threadsafe-statics", "-fsanitize=thread,alignment,array-bounds", "-mllvm", "-tsan-compound-read-before-write=1",
        "-mllvm", "-tsan-instrument-func-entry-exit=0", "-w", *language.flags, *_flags(),
    )  # fmt: skip
    digest = _digest(full, *(p.read_text() for p in files), core.name, repr(flags), compiler)
    path = FOLDER / f"{digest}.so"
    if not path.is_file():
        source = path.with_suffix(language.ending)
        fresh = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.so")
        _replace(source, full)
        part = fresh.with_suffix(".o")
        header = _precompiled(compiler, flags, front, _includes(full))
        _run([compiler, *flags, "-I", str(HERE / language.headers), "-include-pch", str(header), "-c", str(source), "-o", str(part)])
        _run([compiler, *_LINK, str(part), str(core), "-o", str(fresh)])
        part.unlink()
        fresh.replace(path)
    return Image(path, text, language)


@functools.cache
def _precompiled(compiler: str, flags: tuple[str, ...], front: Path, library: str) -> Path:
    """The language's headers, parsed once a process: those that come before every text, and those with which a text begins."""
    folder = temporary_folder()
    assert folder is not None, "no space for a temporary folder"
    path, as_header = folder / f"{front.stem}.pch", ["c++-header" if flag == "c++" else flag for flag in flags]
    _run([compiler, *as_header, "-I", str(HERE / LANGUAGES[front.stem].headers), "-", "-o", str(path)], f'#include "{front}"\n{library}')
    return path


def _includes(text: str) -> str:
    """The lines of headers in pointed brackets with which a text begins."""
    return "".join(itertools.takewhile(lambda line: line.startswith("#include <"), text.splitlines(keepends=True)))


@functools.cache
def declared(text: str) -> tuple[dict[str, int], int]:
    """The bound of threads of each kernel of a Metal text, and the bytes of threadgroup memory that they declare. EmulatorError for what is
    no C++ for the emulator.

    From an object that is neither instrumented, optimized, linked nor run: a tenth of `build`.
    """
    language = LANGUAGES["metal"]
    compiler, full = provide_compiler(FOLDER), _with_entries(text, language)
    flags = (*_LANGUAGE, "--target=x86_64-unknown-linux", "-nostdinc", "-O0", "-w", *language.flags)
    header = _precompiled(compiler, flags, language.files()[0], _includes(full))
    command = [compiler, *flags, "-I", str(HERE / language.headers), "-include-pch", str(header), "-c", "-", "-o", "-"]
    sections, symbols = elf.read(_run(command, full))
    bounds = {name.removeprefix("gpu_bounds_"): value for name, value in symbols.items() if name.startswith("gpu_bounds_")}
    return bounds, sections.get("gpu_shared", 0)


_LANGUAGE = ("-x", "c++", "-std=c++17", "-nostdinc++", "-fno-exceptions", "-fno-rtti")


def _with_entries(text: str, language: Language) -> str:
    if language.name == "cuda":
        return text + "".join(
            f'\nextern "C" __attribute__((visibility("default"))) const int gpu_bounds_{n} = ({b});' for n, b in _bounds(text).items()
        )
    return metal.mark_shared(text, "EMULATED_SHARED") + "".join(metal.entry(signature) for signature in metal.signatures(text))


_LINK = ("-shared", "-nostdlib") + (("-undefined", "dynamic_lookup") if os.uname().sysname == "Darwin" else ("-Wl,-Bsymbolic",))


_planted: tuple[str, ...] = ()  # compiler options of the core: machines that differ


@contextlib.contextmanager
def another_matrix_layout() -> Iterator[None]:
    """Within it, a lane holds other numbers of a simdgroup_matrix than on Apple's GPUs so far."""
    global _planted
    build.cache_clear()
    _planted = ("-DOTHER_MATRIX_LAYOUT",)
    try:
        yield
    finally:
        build.cache_clear()
        _planted = ()


def _core(compiler: str, language: str) -> Path:
    """The core and the implementation of a language as one object file."""
    _open_libm()
    sources = [HERE / name for name in ("core.cpp", f"{language}.cpp")]
    flags = ("-x", "c++", "-std=c++17", "-nostdinc++", "-fno-exceptions", "-fno-rtti", "-fPIC", "-O2", "-ffp-contract=off", "-fno-builtin",
             "-fvisibility=hidden", "-w", *_flags(), *_planted)  # fmt: skip
    digest = _digest(*(p.read_text() for p in (*sources, HERE / "core.h", HERE / "memory.h")), repr(flags), compiler)
    path = FOLDER / f"core-{digest}.o"
    if not path.is_file():
        FOLDER.mkdir(exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.o")
        both = "".join(f'#include "{source}"\n' for source in sources)
        _run([compiler, *flags, "-I", str(HERE), "-c", "-", "-o", str(fresh)], both)
        fresh.replace(path)
    return path


@functools.cache
def _open_libm() -> None:
    name = ctypes.util.find_library("m")
    if name:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.txt")
    fresh.write_text(text)
    fresh.replace(path)


def _run(command: list[str], text: str | None = None) -> bytes:
    done = subprocess.run(command, input=None if text is None else text.encode(), capture_output=True)
    if done.returncode:
        raise EmulatorError(f"emulator: the compiler failed:\n{done.stderr.decode(errors='replace')[:4000]}")
    return done.stdout
