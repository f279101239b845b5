"""Compiles CUDA kernels with NVRTC and keeps the result on disk; finds NVRTC and CUDA's headers, also for tinygrad's own compiler.

They come from what the user names (NVRTC_PATH, CUDA_PATH, CUDA_HOME), from the wheels of `pip install tinyvllm[cuda]`, from a toolkit at
its usual place, or from wherever the dynamic loader knows a libnvrtc. Imports no tinygrad.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.source import kernel_text
from tinyvllm.errors import KernelError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.storage.building import kept_or_built
from tinyvllm.storage.cache import open_cache
from tinyvllm.storage.folders import reason_of, remove, warn_once

NOT_FOUND = "CUDA found a GPU but no NVRTC, the compiler of its kernels; try `pip install tinyvllm[cuda]`"
# Sums are written as they shall be rounded: only an explicit fmaf fuses. 177: functions of a header that a kernel does not use.
_OPTIONS = ("--fmad=false", "--std=c++17", "--diag-suppress=177")
_USERS_TOOLKIT = "toolkit"  # in the folder of links, a link to what CUDA_PATH named before
_LOADER_NAMES = ("libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12")


@dataclass(frozen=True)
class Report:
    """What the assembler says of one kernel: 32-bit registers of a thread; bytes of a thread's stack, of spills (stores and loads together)
    and of the shared memory that the source declares; and its words."""

    registers: int
    stack: int
    spilled: int
    shared: int
    said: str


# What compiles: text, name and options to machine code. KernelError with the compiler's words where it fails.
Compile = Callable[[str, str, tuple[str, ...]], bytes]
Building = Callable[[], AbstractContextManager[None]]


def compile_here(text: str, name: str, options: tuple[str, ...]) -> bytes:
    """Compile in this process."""
    return _nvrtc().compile(text, name, options)[0]


def cubin(kernel: Kernel, arch: str | None = None, compile: Compile = compile_here, building: Building = nullcontext) -> bytes:
    """The machine code of a CUDA kernel for a GPU of the architecture `arch` ("sm_90"), by default that of the kernel's row.

    It is looked up on disk; where it is missing, `compile` makes it within `building`, in one process at a time.

    The row of instructions that only one architecture has ("sm_90a") is compiled for that one. For a GPU that is newer than NVRTC the
    result is PTX of the newest architecture that NVRTC knows, which the driver translates. KernelError with the compiler's words where
    it does not compile, or where there is no NVRTC.
    """
    target, text = _target(kernel.target, arch), kernel_text(kernel)
    options = (f"--gpu-architecture={target}", *_OPTIONS, *_nvrtc().extra)
    made_of = "\0".join((text, *options, _nvrtc().version))
    place = f"kernels/{kernel.stem}_{target}-{hashlib.sha256(made_of.encode()).hexdigest()[:32]}.cubin"
    return kept_or_built(place, lambda: compile(text, kernel.name, options), building)


def waits(arch: str) -> bool:
    """Whether kernels wait by themselves for the one before (kernels/cuda/include/gpu.cuh) as they are compiled for a GPU of the
    architecture `arch`: an old NVRTC compiles for an older one.
    """
    return int(re.sub(r"\D", "", _target("sm_80", arch))) >= 90


def version() -> str:
    """Of the compiler: "nvrtc 13.0"; KernelError where there is none."""
    return _nvrtc().version


def report(kernel: Kernel, arch: str | None = None) -> Report:
    """What the assembler says of the kernel for `arch`, as for `cubin`. Compiles every time."""
    options = (f"--gpu-architecture={_target(kernel.target, arch)}", *_OPTIONS, *_nvrtc().extra, "--ptxas-options=-v")
    _, said = _nvrtc().compile(kernel_text(kernel), kernel.name, options)
    return read_report(said)


def read_report(said: str) -> Report:
    """The figures of one kernel in what `ptxas -v` prints."""

    def figure(pattern: str) -> int:
        return sum(map(int, re.findall(pattern, said)))

    spilled = figure(r"(\d+) bytes spill stores") + figure(r"(\d+) bytes spill loads")
    return Report(figure(r"Used (\d+) registers"), figure(r"(\d+) bytes stack frame"), spilled, figure(r"(\d+) bytes smem"), said)


def provide_nvrtc(cache: Path) -> None:
    """Set NVRTC_PATH, where the user has not, and CUDA_PATH, so that tinygrad finds driver, headers and the compiler of CUDA kernels.

    tinygrad reads both when its CUDA device is first opened, does not search where the dynamic loader does, and looks for the driver right
    in CUDA_PATH, where no toolkit has it. So CUDA_PATH becomes a folder of links in `cache`: to the headers, to the driver, and to what is
    in the toolkit that the user's CUDA_PATH names. KernelError where there is no NVRTC.
    """
    nvrtc = _nvrtc()
    os.environ.setdefault("NVRTC_PATH", str(nvrtc.path))
    links = _folder_of_links(open_cache(cache).path, _headers(nvrtc.path), _loaded_from("libcuda.so.1"), _users_toolkit())
    if links is not None:
        os.environ["CUDA_PATH"] = str(links)


def _target(row: str, arch: str | None) -> str:
    """What to compile for: the GPU's own architecture, or the row's where it is one that others do not have."""
    wanted = row if arch is None or row.endswith("a") else arch
    number, known = int(re.sub(r"\D", "", wanted)), _nvrtc().architectures
    return wanted if number in known else f"compute_{max((k for k in known if k < number), default=min(known))}"


class _Nvrtc:
    """The library, loaded."""

    def __init__(self, path: Path, library: ctypes.CDLL):
        self.path, self._library = path, library
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "says no version")
        self.version = f"nvrtc {major.value}.{minor.value}"
        self.extra = ("--minimal",) if (major.value, minor.value) >= (12, 4) else ()
        self.architectures = self._architectures()
        self._builtins = _load_builtins(path, f"{major.value}.{minor.value}")  # kept, for tinygrad's compiler too

    def _architectures(self) -> tuple[int, ...]:
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "does not say what it compiles for")
        numbers = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(numbers), "does not say what it compiles for")
        return tuple(numbers)

    def compile(self, text: str, name: str, options: tuple[str, ...]) -> tuple[bytes, str]:
        """Machine code (PTX where the options name a virtual architecture) and the compiler's words."""
        program = ctypes.c_void_p()
        made = self._library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None)
        self._check(made, f"cannot begin with {name}")
        try:
            words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            failed = self._library.nvrtcCompileProgram(program, len(options), words)
            said = self._take(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if failed:
                raise KernelError(f"kernels: {name} does not compile with {self.version} {options[0]}: {_first_errors(said)}")
            return self._take(program, "PTX" if "=compute_" in options[0] else "CUBIN"), said
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _take(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"gives no {what}")
        data = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, data), f"gives no {what}")
        return data.raw

    def _check(self, status: int, complaint: str) -> None:
        if status:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            reason = (self._library.nvrtcGetErrorString(status) or b"").decode()
            raise KernelError(f"kernels: NVRTC at {self.path} {complaint}: {reason or status}; try another with NVRTC_PATH=FILE")


def _first_errors(said: str) -> str:
    errors = [line.strip() for line in said.splitlines() if "error" in line] or said.split("\n")
    return "; ".join(errors[:3]) + (f" (and {len(errors) - 3} more)" if len(errors) > 3 else "")


# --- where NVRTC is installed


@functools.cache
def _nvrtc() -> _Nvrtc:
    for path in _candidates():
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        return _Nvrtc(path if path.is_absolute() else _loaded_from(path.name) or path, library)
    raise KernelError(NOT_FOUND)


def _load_builtins(nvrtc: Path, version: str) -> ctypes.CDLL | None:
    """The library next to NVRTC that it opens by its bare name at the first compilation; None where there is none.

    The wheel of CUDA 13 does not tell the dynamic loader to search NVRTC's own folder (it has no RUNPATH; CUDA 12's has). A library that
    the process has loaded is found by its name wherever it is.
    """
    places = [*nvrtc.parent.glob("libnvrtc-builtins.so*"), *nvrtc.resolve().parent.glob("libnvrtc-builtins.so*")]
    places.sort(key=lambda place: not place.name.endswith(f".so.{version}"))  # others serve where that one is missing
    for place in places:
        try:
            return ctypes.CDLL(str(place))
        except OSError:
            continue
    return None


def _candidates() -> Iterator[Path]:
    """Where libnvrtc may be, best first; a bare name is for the dynamic loader."""
    named = os.environ.get("NVRTC_PATH", "")
    if named and Path(named).is_file():
        yield Path(named)
    for folder in [*_named_toolkits(), *_wheels(), *_usual_toolkits()]:
        for place in ("lib", "lib64", "targets/*/lib", "bin"):
            yield from sorted((p for p in folder.glob(f"{place}/libnvrtc.so*") if ".alt." not in p.name), key=lambda p: len(p.name))
    yield from map(Path, _LOADER_NAMES)


def _named_toolkits() -> list[Path]:
    named = [_users_toolkit(), Path(os.environ["CUDA_HOME"]) if os.environ.get("CUDA_HOME") else None]
    return [folder for folder in named if folder is not None]


def _users_toolkit() -> Path | None:
    """What CUDA_PATH names, or named before `provide_nvrtc` put the folder of links there, in this process or in its parent."""
    named = Path(os.environ["CUDA_PATH"]) if os.environ.get("CUDA_PATH") else None
    if named is None or not re.fullmatch(r"cuda-[0-9a-f]{16}", named.name):
        return named
    link = named / _USERS_TOOLKIT
    return link.readlink() if link.is_symlink() else None


def _usual_toolkits() -> list[Path]:
    return [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), key=_numbers, reverse=True), Path("/opt/cuda")]


def _numbers(path: Path) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", path.name)))


def _wheels() -> list[Path]:
    """NVIDIA's wheels share the folder `nvidia`: one folder a part up to CUDA 12, one for all of it (`cu13`) since."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    return [p for root in roots for p in (root / "cuda_nvrtc", *sorted(root.glob("cu[0-9]*"), key=_numbers, reverse=True))]


def _headers(library: Path) -> list[Path]:
    """The folders with cuda_fp16.h and what it includes: of the wheels or the toolkit that the library is from, else of any."""
    at = [parent for parent in library.parents if parent != parent.parent]
    roots = [at[1] / "include", at[1].parent / "cuda_runtime/include", at[1].parent / "cuda_cccl/include"] if len(at) > 1 else []
    roots += [at[3] / "include"] if len(at) > 3 else []  # the library is in targets/*/lib
    for folder in [*_named_toolkits(), *_wheels(), *_usual_toolkits()]:
        roots += [folder / "include", folder.parent / "cuda_runtime/include", folder.parent / "cuda_cccl/include"]
    roots.append(Path("/usr/include"))
    fp16 = next((root for root in roots if (root / "cuda_fp16.h").is_file()), None)
    places = [place for root in ([fp16] if fp16 else []) + roots for place in (root, root / "cccl")]
    target = next((place for place in places if (place / "nv/target").is_file()), None)
    return [place for place in dict.fromkeys((fp16, target)) if place is not None]


def _folder_of_links(cache: Path | None, headers: list[Path], driver: Path | None, toolkit: Path | None) -> Path | None:
    """A folder with `include`, links to everything in `headers`, and links to the driver and to what the user's toolkit has.

    None, logged, where it cannot be written.
    """
    links = {f"include/{entry.name}": entry for folder in reversed(headers) for entry in sorted(folder.iterdir())}
    if toolkit is not None:
        links |= {entry.name: entry for entry in _entries(toolkit) if entry.name != "include"} | {_USERS_TOOLKIT: toolkit}
    if driver is not None:
        links["libcuda.so.1"] = driver
    if cache is None:
        return None
    listed = "\0".join(f"{name} {to}" for name, to in sorted(links.items()))
    folder = cache / f"cuda-{hashlib.sha256(listed.encode()).hexdigest()[:16]}"
    try:
        if not _is_folder_of(folder, links):
            fresh = folder.with_name(f"{folder.name}.{os.getpid()}.{threading.get_ident()}")
            (fresh / "include").mkdir(mode=0o700, parents=True)
            for name, to in links.items():
                (fresh / name).symlink_to(to)
            _settle(fresh, folder)
    except OSError as error:
        warn_once(str(folder), f"CUDA: {folder}, links to headers for tinygrad's own kernels, cannot be written: {reason_of(error)}")
        return None
    return folder


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # the user's environment may name a folder that is not there
        return []


def _is_folder_of(folder: Path, links: Mapping[str, Path]) -> bool:
    """Whether a folder has exactly these links; what is damaged is removed."""
    if not os.path.lexists(folder):
        return False
    try:
        entries = [*folder.glob("include/*"), *(entry for entry in folder.iterdir() if entry.name != "include")]
        whole = {str(entry.relative_to(folder)): entry.readlink() for entry in entries} == dict(links)
    except OSError:
        whole = False
    if not whole:
        warn_once(f"damaged {folder}", f"CUDA: {folder} is damaged; it is built again")
        remove(folder)
    return whole


def _settle(fresh: Path, folder: Path) -> None:
    try:
        fresh.rename(folder)
    except OSError:
        remove(fresh)
        if not folder.is_dir():  # otherwise another process was faster
            raise


def _loaded_from(name: str) -> Path | None:
    """The file that the dynamic loader takes for a library's name; Linux only."""
    try:
        ctypes.CDLL(name)
        mapped: Any = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {Path(line.split(maxsplit=5)[5]) for line in mapped if line.count("/") and len(line.split(maxsplit=5)) == 6}
    return next((path for path in sorted(paths) if path.name.startswith(name.split(".so")[0] + ".so")), None)
