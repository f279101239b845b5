"""A prefix cache over a restart: what `prefix_cache_dir` names, read when the engine starts, written while it runs and when it is closed.

Each model has a folder in it, named after its weights, so that the models of one server do not overwrite each other's.
What cannot be read or written is said through the log `tinyvllm`, and the engine goes on without: a cache is no reason to stop.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tinyvllm.cache.files import Buffer, Layout, load, load_key, save
from tinyvllm.cache.journal import Journal
from tinyvllm.cache.prefix import PrefixCache
from tinyvllm.config import VERSION, EngineConfig
from tinyvllm.engine.tools.record import fingerprint
from tinyvllm.errors import FormatError, OutputError

if TYPE_CHECKING:
    from tinyvllm.runner.kv import KVPool
    from tinyvllm.runner.runner import Runner

_TOGETHER = 32 << 20  # bytes of blocks that are read or written at a time: each time waits for the device and looks up every layer
_LARGEST = 1 << 62  # bytes of the file: there is no limit but the pool
_PIECE_SECONDS = 0.001  # that a piece may hold up the engine's thread
_PIECE_BYTES = 4 << 20  # of a piece at most, if a block is not larger: fresh memory for more may take the system long
_BUSY = 50  # times a piece's seconds pass before the next one while requests run: 2 % of the time
_SHORTEST, _LONGEST = 0.05, 1.0  # seconds that may pass so
_BEHIND = 64 << 20  # bytes on their way to a slow disk, beyond which no more are handed over
_LATER = 0.1  # seconds until the disk is asked again

log = logging.getLogger("tinyvllm")


class PrefixStore:
    """One model's folder for one engine: `key` for the PrefixCache, `restore` before any step, `tend` between steps, `keep` at the end."""

    def __init__(self, folder: Path, key: bytes, runner: Runner, config: EngineConfig):
        self.key = key
        self._folder, self._pool = folder, runner.pool
        self._layout = Layout(config.block_size, runner.pool.block_bytes, identity(runner, config))
        self._journal: Journal | None = None
        self._count = 1  # blocks of the next piece
        self._ended = self._took = 0.0  # when the last one did, by time.monotonic, and its seconds

    @classmethod
    def open(cls, runner: Runner, config: EngineConfig) -> PrefixStore | None:
        """The folder of a configuration; None where it names none, or one that cannot be used."""
        if config.prefix_cache_dir is None:
            return None
        folder = Path(config.prefix_cache_dir).expanduser() / fingerprint(runner.checkpoint.config, runner.checkpoint.tensors)
        try:
            return cls(folder, load_key(folder), runner, config)
        except (FormatError, OutputError) as error:
            log.warning("the prefix cache will not outlive this process: %s", error)
            return None

    def restore(self, prefix: PrefixCache) -> int:
        """Take what was written there, as far as there are blocks; how many were filled."""
        writer = _Writer(self._pool)
        loaded = load(self._folder, prefix, self._layout, writer.add)
        writer.flush()  # also those before a damage: they are good
        if loaded.faults:
            first, *others = loaded.faults.values()
            more = f" (and {len(others)} more files)" if others else ""
            log.warning("the prefix cache starts with %d blocks: %s%s", len(writer), first, more)
        self._journal = Journal(self._folder, prefix, self._layout, loaded)
        return len(writer)

    def tend(self, busy: bool) -> float | None:
        """Hand a piece of what is newly cached to the disk, if its time has come; `busy` while requests run, whose steps wait meanwhile.

        Returns the seconds until the next piece may be, None where nothing is left.
        """
        journal = self._journal
        if journal is None or not journal.waits:
            return None
        began = time.monotonic()
        pause = self._ended - began + (min(_LONGEST, max(_SHORTEST, _BUSY * self._took)) if busy else self._took)
        if pause > 0:
            return pause
        try:
            if journal.bytes_on_their_way > _BEHIND:
                self._ended, self._took = began, _LATER
                return _LATER
            count = self._piece(journal)
        except (OutputError, RuntimeError) as error:
            log.warning("the prefix cache is not written any more while the engine runs: %s", error)
            journal.close()
            self._journal = None
            return None
        self._ended = time.monotonic()
        self._took = self._ended - began
        fits = int(_PIECE_SECONDS * count / self._took) if self._took else self._count
        self._count = max(1, min(fits, 2 * self._count, _PIECE_BYTES // self._pool.block_bytes))
        return self._took if journal.waits else None

    def _piece(self, journal: Journal) -> int:
        """How many blocks were handed over."""
        entries = journal.next(self._count)
        if entries:
            data = self._pool.read([entry.block for entry in entries])
            journal.write(entries, [row.data for row in data])
        return len(entries)

    def keep(self, prefix: PrefixCache) -> int:
        """Write all that is cached; how many blocks, 0 where that failed and the earlier files stay. Nothing is tended behind it."""
        if self._journal is not None:
            self._journal.close()
        read = _reader(self._pool, [entry.block for entry in prefix.entries()])
        try:
            return save(self._folder, prefix, self._layout, read, _LARGEST)
        except (OutputError, RuntimeError) as error:  # a device that has failed has nothing to give
            log.warning("the prefix cache was not kept: %s", error)
            return 0


def identity(runner: Runner, config: EngineConfig) -> bytes:
    """All that the bits of keys and values depend on: weights, dtypes, kernels, and what positions mean."""
    weights = fingerprint(runner.checkpoint.config, runner.checkpoint.tensors)
    given = [config.load_format, config.dtype, config.quantization, config.max_model_len]
    machine = [runner.device.split(":")[0], runner.variants(), os.environ.get("TINYVLLM_KERNELS"), VERSION]
    return json.dumps([weights, str(runner.dtype), *given, *machine]).encode()


def _together(pool: KVPool) -> int:
    return max(1, _TOGETHER // pool.block_bytes)


class _Writer:
    """Collects blocks for the pool. They are cached already, so the last ones must be flushed before anything runs."""

    def __init__(self, pool: KVPool):
        self._pool = pool
        self._data = np.empty((_together(pool), pool.block_bytes), np.uint8)
        self._blocks: list[int] = []
        self._written = 0

    def __len__(self) -> int:
        return self._written + len(self._blocks)

    def add(self, block: int, data: Buffer) -> None:
        self._data[len(self._blocks)] = np.frombuffer(data, np.uint8)
        self._blocks.append(block)
        if len(self._blocks) == len(self._data):
            self.flush()

    def flush(self) -> None:
        if self._blocks:
            self._pool.write(self._blocks, self._data[: len(self._blocks)])
            self._written += len(self._blocks)
            self._blocks = []


def _reader(pool: KVPool, blocks: list[int]) -> Callable[[int], Buffer]:
    """A function that gives the contents of these blocks, which must be asked for in this order."""
    contents = _contents(pool, blocks)

    def read(block: int) -> Buffer:
        known, data = next(contents)
        assert known == block, f"prefix cache: block {block} was asked for, {known} is next"
        return data.data

    return read


def _contents(pool: KVPool, blocks: list[int]) -> Iterator[tuple[int, np.ndarray]]:
    count = _together(pool)
    for start in range(0, len(blocks), count):
        yield from zip(blocks[start : start + count], pool.read(blocks[start : start + count]), strict=True)
