"""Files mapped into memory: bytes are read when touched, tensors are views of them, pages are released after use.

Covers the operating system only, not the two file formats nor tinygrad. A mapping lives exactly as long as an array that views
it: numpy's chain of `base` references holds it, and deleting the last array unmaps it.
"""

from __future__ import annotations

import mmap
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import prod
from pathlib import Path

import numpy as np

from tinyvllm.errors import FormatError, ModelError, OutOfMemoryError
from tinyvllm.lazy_dataclass import dataclass

HUGE_PAGE = 2 << 20
ROW_STEP = 32  # rows of a built matrix: integers of any number of bits that are packed along the rows fill whole words
_PIECE = 1 << 20  # weights that are built at a time
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of a file, as stored.

    `format` is a name such as "F32", "BF16", "Q4_K" or "F8_E4M3"; `shape` is row-major, outermost first, as numpy has it; `data` is
    uint8 [bytes], a read-only view into the mapped file.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    data: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(self.data.nbytes)

    @property
    def stored(self) -> tuple[np.ndarray, ...]:
        """The bytes in the file."""
        return (self.data,)


@dataclass(frozen=True, eq=False)
class BuiltRecord:
    """A matrix of the model [O, I] that a quantized checkpoint stores as several tensors (weights/quantized).

    Its rows are built when they are read, in `format`: one of quant/formats.py, which may be a float format (an exact one: F32 where in
    doubt). `build(first, end)` returns uint8 [end - first, bytes of a row]; `first` is a multiple of ROW_STEP, and `end` too, or it is O.
    `reason` says why the format is a float format: it is shown when the model is loaded. With an `order`, int [I], column j of the rows is
    column order[j] of the matrix: the format needs the columns of a group next to each other.
    """

    name: str
    format: str
    shape: tuple[int, int]
    sources: tuple[TensorRecord, ...]
    build: Callable[[int, int], np.ndarray]
    reason: str = ""
    order: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return sum(source.nbytes for source in self.sources)

    @property
    def stored(self) -> tuple[np.ndarray, ...]:
        """The bytes in the file."""
        return tuple(source.data for source in self.sources)

    @property
    def data(self) -> np.ndarray:
        """All rows, uint8 [bytes], in memory of their own."""
        out, done = None, 0
        for rows in self.pieces():
            out = allocate(self.shape[0] * rows.shape[1]).reshape(self.shape[0], -1) if out is None else out
            out[done : done + len(rows)] = rows
            done += len(rows)
        return np.empty(0, np.uint8) if out is None else out.reshape(-1)

    def pieces(self) -> Iterator[np.ndarray]:
        """The rows in order, a few at a time: uint8 [rows, bytes of a row]."""
        step = max(1, _PIECE // max(1, prod(self.shape[1:])) // ROW_STEP) * ROW_STEP
        for first in range(0, self.shape[0], step):
            yield self.build(first, min(first + step, self.shape[0]))


Record = TensorRecord | BuiltRecord


def map_file(path: Path, speaker: str) -> np.ndarray:
    """The file as uint8 [size], read-only, mapped privately. `speaker` opens the error messages.

    ModelError if it cannot be opened, FormatError if it is empty or a git-lfs pointer file.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise FormatError(f"{speaker}: {path} is empty; download it again")
            mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"{speaker}: cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if mapped[: len(_LFS_POINTER)] == _LFS_POINTER:
        raise FormatError(f"{speaker}: {path} is a git-lfs pointer, not the file itself; run `git lfs pull` in its folder")
    return np.frombuffer(mapped, np.uint8)


def allocate(nbytes: int) -> np.ndarray:
    """uint8 [nbytes] of zeros, page aligned, in pages of its own, which return to the system with the last view.

    Large ones begin at a huge page and ask for huge pages as far as whole ones go: weights are read from end to end at every step, and
    4 KiB pages cost a seventh of the bandwidth (one core, Q4_0: 33 GB/s of 38). What is after the last whole one stays in small pages, so
    that no memory is lost.
    """
    large = nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE")
    try:
        memory = mmap.mmap(-1, max(nbytes, 1) + (HUGE_PAGE if large else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    except (OSError, OverflowError, ValueError) as error:
        raise OutOfMemoryError(f"weights: the host cannot allocate {nbytes / 1e9:.1f} GB for one tensor: {error}") from error
    start = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE if large else 0
    if large:
        try:
            memory.madvise(mmap.MADV_NOHUGEPAGE)
            memory.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE * HUGE_PAGE)
        except OSError:
            pass  # a kernel built without huge pages; ordinary ones do
    return np.frombuffer(memory, np.uint8, nbytes, start)[:]


def map_shared(descriptor: int, nbytes: int, offset: int) -> mmap.mmap:
    """Bytes of a file that many processes map, read-only. OSError, or ValueError where the file is shorter.

    What is read for it becomes huge pages where the file system has large folios (ext4 from Linux 6.16 on, XFS).
    """
    mapped = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=offset)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def read_ahead(descriptor: int) -> None:
    """Read what is not in memory of a file, without waiting for it. As a whole: pages become huge within a long run only."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)


def in_small_pages(descriptor: int) -> bool:
    """Whether most of what this process has mapped of a file, and has touched, is in small pages that could be huge ones."""
    resident = huge = 0
    if not _has_large_folios(sys.platform, platform.release()):
        return False
    try:
        path, inside = os.readlink(f"/proc/self/fd/{descriptor}"), False
        with open("/proc/self/smaps") as areas:
            for line in areas:
                name, *rest = line.split(maxsplit=5)
                if not name.endswith(":"):
                    inside = rest[-1].rstrip() == path
                elif inside and name == "Rss:":
                    resident += int(rest[0])
                elif inside and name == "FilePmdMapped:":
                    huge += int(rest[0])
    except (OSError, ValueError):
        return False
    return 2 * huge < resident


def _has_large_folios(system: str, release: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", release)
    return system == "linux" and numbers is not None and (int(numbers[1]), int(numbers[2])) >= (6, 16)


def forget_pages(descriptor: int) -> None:
    """Leave out of memory what nothing maps of a file that is on the disk: it is read again when it is touched."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def drop_pages(view: np.ndarray) -> None:
    """Release the pages of `view` from this process's memory if it is part of a mapped file; the next access reads them again."""
    mapping = _mapping_under(view)
    if mapping is None or view.nbytes == 0 or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = view.ctypes.data - np.frombuffer(mapping, np.uint8).ctypes.data
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    mapping.madvise(mmap.MADV_DONTNEED, first, start + view.nbytes - first)


def require_whole(view: np.ndarray, what: str) -> None:
    """FormatError if the mapped file that `view` is part of has become shorter than it was: reading beyond its end is a SIGBUS.

    A file that is truncated during a read, or later while its weights are used, still ends the process. Nothing in Python can catch that.
    """
    mapping = _mapping_under(view)
    if mapping is None or view.nbytes == 0:
        return
    end, size = view.ctypes.data - np.frombuffer(mapping, np.uint8).ctypes.data + view.nbytes, mapping.size()
    if size < end:
        raise FormatError(
            f"{what}: its file was truncated while it was open: {end} bytes are needed, it has {size}; replace the file of a running model "
            "by renaming another over it"
        )


def is_mapped(view: np.ndarray) -> bool:
    """Whether `view` is part of a mapped file rather than of memory that was written."""
    return _mapping_under(view) is not None


def _mapping_under(view: np.ndarray) -> mmap.mmap | None:
    """The read-only file mapping that `view` is part of; None for memory whose content would be lost."""
    base: object = view
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return None
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) else None
