"""How much host memory this process may still allocate, and which limit sets that: the machine, a control group, or ulimit -v.

A control group's limit is enforced by SIGKILL, so nothing can be refused once it is reached: sizes follow it from the start.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath

from tinyvllm.errors import OutOfMemoryError
from tinyvllm.lazy_dataclass import dataclass

START_ADDRESS_SPACE = 400 << 20  # of the interpreter, numpy and tinygrad with an open device; 330 MiB were measured, without a model
START_MEMORY = 80 << 20  # the part of it that is used; 61 MiB were measured
# what a loaded model takes next to weights and KV cache: libraries, stacks and malloc arenas of threads, buffers of steps; measured with
# the bundled model
RUN_ADDRESS_SPACE, RUN_MEMORY = 400 << 20, 64 << 20
RESERVE = 32 << 20  # what buffers and tokenisation leave: without it the small allocations of everything else would fail
NATIVE_RESERVE = 16 << 20  # the same for calls of native libraries that end the process; the stack of a new thread takes 8 MiB of it
_M_ARENA_MAX, _MAX_ARENAS = -8, 2  # of glibc's mallopt
_ADVICE = "try again later, or send a shorter request"
_UNLIMITED = 1 << 62  # control groups of version 1 report a number beyond this for "none"


@dataclass(frozen=True)
class Headroom:
    """Bytes that may still be allocated, what sets the limit, in words for a message, and whether it counts unused address space, too."""

    bytes: int
    limit: str
    address_space: bool = False

    def __str__(self) -> str:
        return f"{megabytes(self.bytes)} can be allocated ({self.limit})"

    @property
    def run_bytes(self) -> int:
        """What a loaded model takes of it next to weights and KV cache."""
        return RUN_ADDRESS_SPACE if self.address_space else RUN_MEMORY


def headroom(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Headroom:
    """The smallest of what the machine has free, what the control group leaves, and what ulimit -v leaves."""
    found = [_machine(proc), *_control_groups(proc, cgroups), *_address_space(proc)]
    least = min(found, key=lambda one: one.bytes)
    return replace(least, bytes=max(0, least.bytes))


def require(nbytes: int, what: str, advice: str = _ADVICE) -> None:
    """OutOfMemoryError, one line with what is needed and what there is, if `nbytes` for `what` would leave less than RESERVE."""
    left = headroom()
    if nbytes + RESERVE > left.bytes:
        raise _missing(nbytes, what, left, RESERVE, advice)


_promised = 0  # bytes of the native calls that run
_promising = threading.Lock()


@contextmanager
def native_call(nbytes: int, what: str) -> Iterator[None]:
    """Around a call of a native library that ends the process where an allocation fails, as Rust's do; it may allocate `nbytes`.

    OutOfMemoryError if that and what the calls of other threads may still allocate cannot be mapped now, with NATIVE_RESERVE for
    allocations outside of such calls. Mapping costs 10 microseconds; it sees ulimit -v and strict overcommitment, which make allocations
    fail, but not control groups, which do not.
    """
    global _promised
    with _promising:
        try:
            mmap.mmap(-1, _promised + nbytes + NATIVE_RESERVE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except (OSError, MemoryError):
            raise _missing(nbytes, what, headroom(), NATIVE_RESERVE, _ADVICE) from None
        _promised += nbytes
    try:
        yield
    finally:
        with _promising:
            _promised -= nbytes


def _missing(nbytes: int, what: str, left: Headroom, kept: int, advice: str) -> OutOfMemoryError:
    return OutOfMemoryError(f"memory: {what} needs {megabytes(nbytes)}, {left}, of which {megabytes(kept)} are kept free; {advice}")


def require_start() -> None:
    """OutOfMemoryError, one line, if there is not even room for the libraries. Before they are imported: they fail in ways of their own."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed != resource.RLIM_INFINITY and allowed < START_ADDRESS_SPACE:
        raise OutOfMemoryError(
            f"memory: tinyvllm needs {megabytes(START_ADDRESS_SPACE)} of address space and more for a model, ulimit -v is "
            f"{megabytes(allowed)}; raise it"
        )
    left, used = headroom(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if left.bytes + used < START_MEMORY:
        raise OutOfMemoryError(
            f"memory: tinyvllm needs {megabytes(START_MEMORY)} and more for a model, {megabytes(left.bytes + used)} can be allocated "
            f"({left.limit}); free memory or raise the limit"
        )


def limit_arenas() -> None:
    """Under ulimit -v let malloc have two arenas: each of its up to eight per core reserves 64 MiB of address space, mostly unused."""
    if sys.platform == "linux" and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        with suppress(AttributeError):  # a C library without arenas
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _MAX_ARENAS)


def megabytes(nbytes: int) -> str:
    """ "512 MiB", or "1.5 GiB" from 10 GiB on with one digit."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 10 << 30 else f"{-(-nbytes // 2**20)} MiB"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, in Python's, the system's or a library's way; its causes count."""
    return any(_says_memory(one) for one in _chain(error))


def _says_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, ImportError):
        return "failed to map segment" in str(error)
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and the members of a group."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        pending.append(one.__cause__)
        if isinstance(one, BaseExceptionGroup):
            pending += one.exceptions


# ---- the three limits ----


def _machine(proc: Path) -> Headroom:
    what = "free memory of this machine"
    if sys.platform == "darwin":  # whose free memory means little: three quarters of all memory
        said = subprocess.run(["sysctl", "-n", "hw.memsize"], capture_output=True, text=True, check=True).stdout
        return Headroom(int(said) * 3 // 4, what)
    try:
        fields = _numbers(proc / "meminfo")
        return Headroom(fields["MemAvailable:"] * 1024, what)
    except (OSError, KeyError):
        return Headroom(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), what)


def control_group_folders(controller: str, proc: Path, cgroups: Path) -> Iterator[tuple[int, Path]]:
    """The folders of the control groups around this process that may limit `controller`, each with the version of control groups.

    In a container the path may be one of the host, and only the root is there.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers and controller not in controllers.split(","):
            continue
        version, root, relative = (1, cgroups / controller, path) if controllers else (2, cgroups, path)
        inner = PurePosixPath(relative.lstrip("/"))
        yield from ((version, root / folder) for folder in (inner, *inner.parents) if ".." not in folder.parts)


_GROUP_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def _control_groups(proc: Path, cgroups: Path) -> Iterator[Headroom]:
    """What each control group around this process leaves; none where the system has none."""
    for version, folder in control_group_folders("memory", proc, cgroups):
        limit, usage, reclaimable = _GROUP_FILES[version]
        try:
            allowed = int((folder / limit).read_text())  # "max" is no number
            if allowed >= _UNLIMITED:
                continue
            used = int((folder / usage).read_text())
            cached = _numbers(folder / "memory.stat").get(reclaimable, 0)
        except (OSError, ValueError):
            continue
        yield Headroom(allowed - used + cached, f"the control group's {limit} is {megabytes(allowed)}")


def _address_space(proc: Path) -> Iterator[Headroom]:
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed == resource.RLIM_INFINITY:
        return
    try:
        used = int((proc / "self" / "statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return
    yield Headroom(allowed - used, f"ulimit -v is {megabytes(allowed)}", address_space=True)


def _numbers(path: Path) -> dict[str, int]:
    """The lines "NAME NUMBER ..." of a file of the kernel."""
    words = (line.split() for line in path.read_text().splitlines())
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdecimal()}
