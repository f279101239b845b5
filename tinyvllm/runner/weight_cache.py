"""Packed matrices kept on disk, so that the next start maps them as they are instead of packing them again.

The cache folder has one file per model and way of packing, and an index. Both are named by the digest of the model's content, so that
other weights in the same file are another model, and a copy of the file is the same. A start maps the file read-only; a second engine, or a
later start with the file still in memory, shares its pages. Before it uses a matrix it checks the sums of all, unless an earlier start has
done so since the file last changed. The index is written last. Matrices are packed into memory and then written: a full disk is an error of
that write.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import os
import re
import shutil
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from tinyvllm.backends.cpu.nodes import over_memory_nodes
from tinyvllm.errors import ModelError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.storage.cache import CacheFolder, open_cache, replace_file
from tinyvllm.storage.digests import file_state, is_settled, sums
from tinyvllm.storage.folders import Refusal, open_believed, reason_of, remove, warn_once
from tinyvllm.weights.checkpoint import Checkpoint
from tinyvllm.weights.identity import weights_digest
from tinyvllm.weights.mapping import allocate, forget_pages, in_small_pages, map_shared, read_ahead

VERSION = 3  # of the panels' layout; a change invalidates all cached files
MIN_BYTES = 64 << 20  # of weights: below this, packing again takes less time than caching is worth
MAX_FOLDER_BYTES = 128 << 30  # of all models together; those used least recently are removed for a new one
_ROOM = "weights"
_ALIGNMENT = 2 << 20  # a huge page
_SPARE = 2  # free space on the disk that is needed, in sizes of the file

Product = tuple[str, int, np.ndarray]  # format, rows, packed bytes uint8 [N]


class WeightCache:
    """The packed matrices of one model on disk: mapped from an earlier start, or a new file to fill."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, packing: str):
        self._cache, self._checkpoint, self._packing = open_cache(folder), checkpoint, packing
        self._writing: _Writing | None = None

    @property
    def complete(self) -> bool:
        """Whether an earlier start has cached all matrices. The first access checks them."""
        return bool(self._products)

    @functools.cached_property
    def _products(self) -> dict[str, Product]:
        return {} if self._stem is None else _mapped(self._cache, self._stem)

    @functools.cached_property
    def _stem(self) -> str | None:
        """The name of the files for these weights and this packing; None if nothing is kept."""
        if sum(record.nbytes for record in self._checkpoint.tensors.values()) < MIN_BYTES or self._cache.temporary:
            return None
        try:
            key = "\0".join((weights_digest(self._checkpoint), self._packing, str(VERSION)))
        except ModelError as error:
            warn_once("weights digest", f"cache: packed weights are not kept: {error}")
            return None
        return hashlib.sha256(key.encode()).hexdigest()[:32]

    def begin(self, total: int) -> None:
        """Begin a new file for about `total` bytes, unless an earlier start has left one, it is not worth it, or the disk lacks space."""
        room = self._cache.room(_ROOM)
        if not self.complete and self._stem is not None and room is not None and total >= MIN_BYTES:
            self._writing = _begin(self._cache, room, self._stem, total)

    def get(self, name: str) -> Product | None:
        """Format, rows and packed bytes, uint8 [N], of a cached product."""
        return self._products.get(name)

    def scratch(self, nbytes: int) -> np.ndarray:
        """Zeros to pack a matrix into, valid until `keep`."""
        return allocate(nbytes) if self._writing is None else self._writing.scratch(nbytes)

    def keep(self, name: str, format: str, O: int, packed: np.ndarray) -> np.ndarray:
        """Write a packed product to the file: the same bytes, mapped. `packed` itself where there is no file, or no space for more."""
        if self._writing is None:
            return packed
        try:
            return self._writing.add(name, format, O, packed)
        except OSError as error:
            self._writing.give_up()
            self._writing = None
            warn_once("weights write", f"cache: packed weights are not kept: {reason_of(error)}; continuing without them")
            return packed

    def finish(self) -> None:
        """All products are written: from now on a start maps the file."""
        if self._writing is not None:
            self._writing.finish()
            self._writing = None


@dataclass
class _Writing:
    """A new file that is filled product by product."""

    cache: CacheFolder
    path: Path
    stem: str
    descriptor: int
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    _end: int = 0
    _scratch: np.ndarray | None = None

    def scratch(self, nbytes: int) -> np.ndarray:
        """One buffer for all matrices: touching fresh memory can take longer than packing."""
        if self._scratch is None or len(self._scratch) < nbytes:
            self._scratch = allocate(nbytes)
        else:
            self._scratch[:nbytes] = 0
        return self._scratch[:nbytes]

    def add(self, name: str, format: str, O: int, packed: np.ndarray) -> np.ndarray:
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        _write_all(self.descriptor, packed, start)
        (digest,) = sums(packed)
        self.entries[name] = {"format": format, "O": O, "offset": start, "bytes": len(packed), "sums": digest}
        self._end = start + len(packed)
        return np.frombuffer(map_shared(self.descriptor, len(packed), start), np.uint8)

    def give_up(self) -> None:
        os.close(self.descriptor)
        remove(self.path)

    def finish(self) -> None:
        panels = self.path.with_name(f"{self.stem}.panels")
        if not self.entries:  # the model has no matrix that is packed
            return self.give_up()
        try:
            replace_file(self.path, panels)
        except OSError as error:
            warn_once("weights write", f"cache: packed weights are not kept: {reason_of(error)}")
            return self.give_up()
        os.close(self.descriptor)
        if not self.cache.write(f"{_ROOM}/{self.stem}.index", json.dumps(self.entries).encode()):
            remove(panels)


def _write_all(descriptor: int, data: np.ndarray, start: int) -> None:
    view, done = data.data, 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done : done + (256 << 20)], start + done)


@over_memory_nodes()
def _mapped(cache: CacheFolder, stem: str) -> dict[str, Product]:
    """The products of a file whose every byte is as it was written; nothing, and nothing left of it, if one is not."""
    name = f"{_ROOM}/{stem}.panels"
    index, room = cache.read(f"{_ROOM}/{stem}.index"), cache.room(_ROOM)
    if index is None or room is None:
        return {}
    entries = json.loads(index)
    try:
        with open(open_believed(room / f"{stem}.panels"), "rb", buffering=0) as file:
            if not _was_checked(cache, stem, index, file.fileno()):
                _check_once(cache, stem, index, file.fileno())
            read_ahead(file.fileno())
            mapped = _maps(file.fileno(), entries)
    except FileNotFoundError:
        return {}
    except Refusal as reason:
        cache.discard(name, str(reason))
        for rest in ("index", "checked"):
            remove(room / f"{stem}.{rest}")
        return {}
    with suppress(OSError):
        os.utime(room / f"{stem}.index")  # used now
    return {name: (e["format"], e["O"], np.frombuffer(each, np.uint8)) for (name, e), each in zip(entries.items(), mapped, strict=True)}


def _maps(descriptor: int, entries: dict[str, Any]) -> list[mmap.mmap]:
    """The mapped bytes of each product. Refusal if the file is shorter than its index says."""
    try:
        size, needed = os.fstat(descriptor).st_size, max(e["offset"] + e["bytes"] for e in entries.values())
        if size < needed:  # a page after the end would be a SIGBUS
            raise Refusal(f"truncated: {size} bytes, expected {needed}")
        return [map_shared(descriptor, e["bytes"], e["offset"]) for e in entries.values()]
    except (OSError, ValueError) as error:  # ValueError: it became shorter meanwhile
        raise Refusal(reason_of(error) if isinstance(error, OSError) else str(error)) from error


def _check_once(cache: CacheFolder, stem: str, index: bytes, descriptor: int) -> None:
    """Refusal if a byte is not as it was written; else later starts need not check the file, until it changes.

    What they find after a loss of power is what was read here, so the file is on the disk first. Small pages, of a file that was written
    when no large ones were free, are forgotten, and read again as huge ones (decision 86).
    """
    state, entries = file_state(descriptor), json.loads(index)
    small = _check(descriptor, entries)
    try:
        os.fsync(descriptor)
        if small:
            forget_pages(descriptor)
    except OSError:  # once for each error: a second fsync would succeed
        return
    if small:
        read_ahead(descriptor)
        _check(descriptor, entries)
    if file_state(descriptor) == state and is_settled(state):  # else it may have changed while it was read
        cache.write(f"{_ROOM}/{stem}.checked", _checked(index, state))


def _check(descriptor: int, entries: dict[str, Any]) -> bool:
    """Refusal if a byte of a product is not as it was written. Whether most of them are in small pages, which could be huge ones."""
    views = [np.frombuffer(mapped, np.uint8) for mapped in _maps(descriptor, entries)]
    for entry, found in zip(entries.values(), sums(*views), strict=True):
        if found != entry["sums"]:
            raise Refusal("packed weights are damaged")
    return in_small_pages(descriptor)


def _was_checked(cache: CacheFolder, stem: str, index: bytes, descriptor: int) -> bool:
    """Whether an earlier start has checked this file by this index, and nothing has written to it since."""
    return cache.read(f"{_ROOM}/{stem}.checked") == _checked(index, file_state(descriptor))


def _checked(index: bytes, state: list[int]) -> bytes:
    return json.dumps([hashlib.sha256(index).hexdigest(), *state]).encode()


def _begin(cache: CacheFolder, room: Path, stem: str, total: int) -> _Writing | None:
    """A new file, next to the old ones; None, logged, if the disk has no space for it or the folder cannot be written."""
    try:
        _remove_unfinished(room)
        _make_space(room, total)
        if shutil.disk_usage(room).free < _SPARE * total:
            warn_once("weights write", f"cache: packed weights are not kept: {room} has not {_SPARE * total / 1e9:.1f} GB free")
            return None
        fresh = room / f"{stem}.{os.getpid()}.fresh"
        remove(fresh)
        return _Writing(cache, fresh, stem, os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except OSError as error:
        warn_once("weights write", f"cache: packed weights are not kept: {room}: {reason_of(error)}")
        return None


def _make_space(room: Path, total: int) -> None:
    """Remove the models that were used least recently until there is space for one more, in the folder's limit and on the disk."""
    panels = sorted(room.glob("*.panels"), key=_last_use)
    held = sum(path.lstat().st_size for path in panels)
    for path in panels:
        if held + total <= MAX_FOLDER_BYTES and shutil.disk_usage(room).free >= _SPARE * total:
            return
        held -= path.lstat().st_size
        remove(path.with_suffix(".checked"))
        remove(path.with_suffix(".index"))
        remove(path)


def _last_use(panels: Path) -> float:
    index = panels.with_suffix(".index")
    return max(path.lstat().st_mtime for path in (panels, index) if os.path.lexists(path))


def _remove_unfinished(room: Path) -> None:
    """Remove the files of starts that were killed."""
    for fresh in room.glob("*.fresh"):
        match = re.fullmatch(r"\w+\.(\d{1,9})\.fresh", fresh.name)
        if match is None or not _alive(int(match[1])):
            remove(fresh)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
