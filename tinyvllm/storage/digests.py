"""The content of large files, in two strengths.

`content_digest` names a model by its content: SHA-256 of pieces of the whole file, by several threads, remembered in the cache folder under
the file's path, device, inode, size and both times. The system changes the second time (ctime) with every write, also where the first
is set back, so a remembered digest is that of the content until the disk itself errs.

`sums` finds damage at the speed of memory: for each 2 MiB, the 64-bit sums of its 512 rows and of its 512 columns. One changed word, any
zeroed, swapped or missing page changes them. It is no protection from a user that can also write the sums: that is the folder's mode.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tinyvllm.storage.cache import open_cache

PIECE_BYTES = 8 << 20  # of a file, for one SHA-256
SUM_BYTES = 2 << 20  # of memory, for one square of 512 x 512 words
_SIDE = 512
_TASK_BYTES = 32 * SUM_BYTES
_MAX_THREADS = 8
_SETTLED_NS = 2 * 10**9  # a file that changed this recently may change again without another time


class Stopped(Exception):
    """A digest was not computed to its end, because its caller wanted that."""


def content_digest(paths: Sequence[Path], stopped: Callable[[], bool] | None = None) -> str:
    """Hexadecimal digest of the files' contents, in this order; their names do not count. OSError if one cannot be read.

    With `stopped`, files are read in this thread alone, next to other work; it is asked before each piece, and Stopped is raised once it
    is true. A digest that is remembered is returned without it.
    """
    whole = hashlib.sha256()
    for path in paths:
        whole.update(_file_digest(path, stopped).encode())
    return whole.hexdigest()


def _file_digest(path: Path, stopped: Callable[[], bool] | None) -> str:
    place = f"digests/{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}"
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        before = file_state(descriptor)
        if (remembered := _remembered(place, before)) is not None:
            return remembered
        digest = _digest_of(descriptor, before[2], stopped)
        if file_state(descriptor) == before and is_settled(before):
            open_cache().write(place, json.dumps([*before, digest]).encode())
    finally:
        os.close(descriptor)
    return digest


def file_state(descriptor: int) -> list[int]:
    """What changes when the content does: device, inode, size, time of modification, time of change."""
    status = os.fstat(descriptor)
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def is_settled(state: list[int]) -> bool:
    """Whether the next change of the file will change this state."""
    return max(state[3:]) < time.time_ns() - _SETTLED_NS


def _remembered(place: str, state: list[int]) -> str | None:
    content = open_cache().read(place)
    *then, digest = json.loads(content) if content is not None else [None]
    return str(digest) if then == state else None


def _digest_of(descriptor: int, size: int, stopped: Callable[[], bool] | None) -> str:
    def digest(start: int) -> bytes:
        if stopped is not None and stopped():
            raise Stopped
        found, at, end = hashlib.sha256(), start, min(start + PIECE_BYTES, size)
        while at < end:
            part = os.pread(descriptor, end - at, at)
            if not part:
                raise OSError(f"truncated while it was read: {at} of {size} bytes")
            found.update(part)
            at += len(part)
        return found.digest()

    whole, starts = hashlib.sha256(size.to_bytes(8, "little")), range(0, size, PIECE_BYTES)
    with contextlib.nullcontext() if stopped is not None else _threads() as pool:
        for part in map(digest, starts) if pool is None else pool.map(digest, starts):
            whole.update(part)
    return whole.hexdigest()


def sums(*views: np.ndarray) -> list[str]:
    """For each uint8 [N] array, a digest of its length and of its sums of rows and columns."""
    with _threads() as pool:
        tasks = [[pool.submit(_sums, view[at : at + _TASK_BYTES]) for at in range(0, len(view), _TASK_BYTES)] for view in views]
        digests = []
        for view, parts in zip(views, tasks, strict=True):
            digest = hashlib.sha256(len(view).to_bytes(8, "little"))
            for part in parts:
                digest.update(part.result())
            digests.append(digest.hexdigest())
    return digests


def _sums(view: np.ndarray) -> bytes:
    found = []
    for at in range(0, len(view), SUM_BYTES):
        piece = view[at : at + SUM_BYTES]
        if len(piece) < SUM_BYTES or piece.ctypes.data % 8:
            padded = np.zeros(SUM_BYTES, np.uint8)
            padded[: len(piece)] = piece
            piece = padded
        square = piece.view(np.uint64).reshape(_SIDE, _SIDE)
        found += [np.add.reduce(square, axis=1), np.add.reduce(square, axis=0)]
    return b"".join(part.tobytes() for part in found)


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "tinyvllm-digest")
