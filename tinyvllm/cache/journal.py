"""Writes newly cached blocks to disk while the engine runs, so that a killed process loses little. No tensors.

The engine's thread chooses the blocks and passes their contents; the journal's own thread writes them, into one file after another. The
oldest file is removed when all of them hold twice the pool; those of its blocks that are still cached are written again.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import field
from pathlib import Path

from tinyvllm.cache.files import Buffer, Layout, Loaded, append, files_of
from tinyvllm.cache.prefix import Entry, PrefixCache
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.storage.folders import remove

_FILES = 4  # over which a pool's blocks are spread; one is removed at a time
_DOOMED = 4  # files that may stay until their cached blocks have been written again


@dataclass
class _File:
    """A file and the hashes in it."""

    path: Path
    size: int  # bytes
    hashes: list[bytes] = field(default_factory=list)


class Journal:
    """The recent files of a folder, for one cache. All methods belong to the engine's thread; only `close` waits for the disk."""

    def __init__(self, folder: str | Path, cache: PrefixCache, layout: Layout, loaded: Loaded):
        """`loaded` is the result of `load` for this folder."""
        self._folder, self._cache, self._layout = Path(folder), cache, layout
        self._pool_bytes = cache.pool.num_blocks * layout.group_bytes(1)  # if each block is written by itself
        self._files = [_File(p, p.stat().st_size, hashes) for p, hashes in loaded.stored.items() if p not in loaded.faults]
        self._doomed = list(loaded.faults)  # their good blocks are written again, and then they are removed
        self._stored = {digest: file for file in self._files for digest in file.hashes}
        self._waiting = OrderedDict.fromkeys(e.hash for e in cache.entries() if e.hash not in self._stored)
        self._current: _File | None = None
        self._number = max((int(p.stem.removeprefix("recent-")) for p in files_of(folder) if p.stem.startswith("recent-")), default=0)
        self._writer = ThreadPoolExecutor(1, "tinyvllm-prefix-cache")
        self._writing: deque[tuple[int, Future[None]]] = deque()  # bytes handed to the writer
        cache.on_insert = self._inserted

    @property
    def waits(self) -> bool:
        """Whether a cached block has not been handed to the writer."""
        return bool(self._waiting)

    @property
    def bytes_on_their_way(self) -> int:
        """Bytes handed to the writer and not yet written. OutputError if a write failed: the journal has ended then."""
        while self._writing and self._writing[0][1].done():
            self._writing.popleft()[1].result()
        return sum(size for size, _ in self._writing)

    def next(self, count: int) -> list[Entry]:
        """Up to `count` cached blocks that are not on disk, in the order in which they were cached."""
        found: list[Entry] = []
        while len(found) < count and self._waiting:
            digest, _ = self._waiting.popitem(last=False)
            if (entry := self._cache.entry(digest)) is not None:
                found.append(entry)
        return found

    def write(self, entries: Sequence[Entry], data: Sequence[Buffer]) -> None:
        """Have blocks written; `data` belongs to the journal from now on."""
        size = self._layout.group_bytes(len(entries))
        file = self._current
        if file is None or file.size + size > self._pool_bytes // _FILES:
            file = self._current = _File(self._fresh(), 0)
            self._files.append(file)
        file.size += size
        file.hashes += [entry.hash for entry in entries]
        self._stored.update((entry.hash, file) for entry in entries)
        self._writing.append((size, self._writer.submit(append, file.path, self._layout, entries, data)))
        self._make_room()

    def close(self) -> None:
        """Wait for the pending writes; the journal ignores the cache from now on."""
        self._cache.on_insert = None
        self._writer.shutdown()

    def _fresh(self) -> Path:
        """A file name that does not exist, not even from another process that wrongly uses the folder."""
        while True:
            self._number += 1
            if not os.path.lexists(path := self._folder / f"recent-{self._number}.kv"):
                return path

    def _inserted(self, digest: bytes) -> None:
        if digest not in self._stored:
            self._waiting[digest] = None
            if len(self._waiting) > 2 * self._cache.pool.num_blocks:  # the disk is slower than the engine, and most of them were evicted
                self._waiting = OrderedDict.fromkeys(d for d in self._waiting if self._cache.entry(d) is not None)

    def _make_room(self) -> None:
        while len(self._files) > 1 and sum(file.size for file in self._files) > 2 * self._pool_bytes:
            oldest = self._files.pop(0)
            for digest in oldest.hashes:
                if self._stored.get(digest) is oldest:
                    del self._stored[digest]
                    if self._cache.entry(digest) is not None:
                        self._waiting[digest] = None
            self._doomed.append(oldest.path)
        while self._doomed and (not self._waiting or len(self._doomed) > _DOOMED):
            self._writer.submit(remove, self._doomed.pop(0))
