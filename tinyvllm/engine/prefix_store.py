"""The prefix cache on disk (`prefix_cache_dir`): read when the engine starts, written while it runs and when it is closed.

Each model has a folder in it, named by the digest of its content, so that the models of one server do not overwrite each other's files.
What cannot be read or written is logged (`tinyvllm`), and the engine continues without it: a cache is no reason to stop.
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
from tinyvllm.config.engine import EngineConfig
from tinyvllm.config.values import expand_home
from tinyvllm.errors import ModelError, OutputError
from tinyvllm.version import VERSION
from tinyvllm.weights.identity import weights_digest

if TYPE_CHECKING:
    from tinyvllm.runner.kv import KVPool
    from tinyvllm.runner.runner import Runner

_BATCH_BYTES = 32 << 20  # of blocks that are read or written at a time: each time waits for the device and looks up every layer
_MAX_FILE_BYTES = 1 << 62  # the pool is the only limit
_PIECE_SECONDS = 0.001  # that one piece may stall the engine's thread
_MAX_PIECE_BYTES = 4 << 20  # unless a block is larger: the system may take long to give fresh memory for more
_BUSY_PAUSE = 50  # while requests run, this many times the seconds of a piece pass before the next: 2 % of the time
_MIN_PAUSE, _MAX_PAUSE = 0.05, 1.0  # seconds
_MAX_PENDING_BYTES = 64 << 20  # on their way to a slow disk; beyond that no more are handed over
_RETRY_SECONDS = 0.1  # until the disk is tried again

log = logging.getLogger("tinyvllm")


class PrefixStore:
    """The folder of one model: `key` for the PrefixCache, `restore` before any step, `write_some` between steps, `save` at the end."""

    def __init__(self, folder: Path, weights: str, runner: Runner, config: EngineConfig):
        """`weights` is the digest of the model's content: the folder's name, and part of what each file was written for."""
        self._folder, self._pool = folder / weights, runner.pool
        self.key = load_key(self._folder)
        self._layout = Layout(config.block_size, runner.pool.block_bytes, identity(runner, config, weights))
        self._journal: Journal | None = None
        self._num_blocks = 1  # of the next piece
        self._last_end = self._last_seconds = 0.0  # when the last piece ended, by time.monotonic, and how long it took

    @classmethod
    def open(cls, runner: Runner, config: EngineConfig) -> PrefixStore | None:
        """The store of a configuration; None if it names no folder, or one that cannot be used."""
        if config.prefix_cache_dir is None:
            return None
        try:
            return cls(expand_home("prefix_cache_dir", config.prefix_cache_dir), weights_digest(runner.checkpoint), runner, config)
        except (ModelError, OutputError) as error:
            log.warning("prefix cache: it will not outlive this process: %s", error)
            return None

    def restore(self, prefix: PrefixCache) -> int:
        """Load the blocks on disk as far as the pool has room; how many were loaded."""
        writer = _Writer(self._pool)
        loaded = load(self._folder, prefix, self._layout, writer.add)
        writer.flush()  # also the blocks before a damaged one: they are valid
        if loaded.faults:
            first, *others = loaded.faults.values()
            more = f" (and {len(others)} more files)" if others else ""
            log.warning("prefix cache: it starts with %d blocks: %s%s", len(writer), first, more)
        self._journal = Journal(self._folder, prefix, self._layout, loaded)
        return len(writer)

    def write_some(self, busy: bool) -> float | None:
        """Hand a piece of the newly cached blocks to the disk, if its time has come; `busy` while requests run, whose steps wait for it.

        Returns the seconds until the next piece, None if nothing is left.
        """
        journal = self._journal
        if journal is None or not journal.waits:
            return None
        start = time.monotonic()
        busy_pause = min(_MAX_PAUSE, max(_MIN_PAUSE, _BUSY_PAUSE * self._last_seconds))
        pause = self._last_end - start + (busy_pause if busy else self._last_seconds)
        if pause > 0:
            return pause
        try:
            if journal.bytes_on_their_way > _MAX_PENDING_BYTES:
                self._last_end, self._last_seconds = start, _RETRY_SECONDS
                return _RETRY_SECONDS
            count = self._write_piece(journal)
        except (OutputError, RuntimeError) as error:
            log.warning("prefix cache: it is not written any more while the engine runs: %s", error)
            journal.close()
            self._journal = None
            return None
        self._last_end = time.monotonic()
        self._last_seconds = self._last_end - start
        fits = int(_PIECE_SECONDS * count / self._last_seconds) if self._last_seconds else self._num_blocks
        self._num_blocks = max(1, min(fits, 2 * self._num_blocks, _MAX_PIECE_BYTES // self._pool.block_bytes))
        return self._last_seconds if journal.waits else None

    def _write_piece(self, journal: Journal) -> int:
        """Hand the next blocks to the journal; how many."""
        entries = journal.next(self._num_blocks)
        if entries:
            data = self._pool.read([entry.block for entry in entries])
            journal.write(entries, [row.data for row in data])
        return len(entries)

    def save(self, prefix: PrefixCache) -> int:
        """Write all cached blocks; how many, 0 if that failed and the earlier files stay. The last call on a store."""
        if self._journal is not None:
            self._journal.close()
        read = _reader(self._pool, [entry.block for entry in prefix.entries()])
        try:
            return save(self._folder, prefix, self._layout, read, _MAX_FILE_BYTES)
        except (OutputError, RuntimeError) as error:  # a device that has failed cannot be read
            log.warning("prefix cache: it was not saved: %s", error)
            return 0


def identity(runner: Runner, config: EngineConfig, weights: str) -> bytes:
    """All that the bits of keys and values depend on: weights (their digest), dtypes, kernels, and the meaning of positions."""
    options = [config.load_format, config.dtype, runner.weight_identity, config.max_model_len, config.kv_cache_dtype]
    groups = [runner.groups.layers] if runner.groups.blocks.count > 1 else []
    machine = [runner.placement.kind, runner.variants(), os.environ.get("TINYVLLM_KERNELS"), VERSION]
    divided = [len(runner.model.blk)] if config.more_devices else []
    return json.dumps([weights, str(runner.dtype), *options, *groups, *machine, *divided]).encode()


def _blocks_at_a_time(pool: KVPool) -> int:
    return max(1, _BATCH_BYTES // pool.block_bytes)


class _Writer:
    """Collects blocks for the pool. The prefix cache has them already, so the last ones must be flushed before a step runs."""

    def __init__(self, pool: KVPool):
        self._pool = pool
        self._data = np.empty((_blocks_at_a_time(pool), pool.block_bytes), np.uint8)
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
    """A function that returns the contents of these blocks, which must be read in this order."""
    contents = _contents(pool, blocks)

    def read(block: int) -> Buffer:
        expected, data = next(contents)
        assert expected == block, f"prefix cache: block {block} was read, {expected} is next"
        return data.data

    return read


def _contents(pool: KVPool, blocks: list[int]) -> Iterator[tuple[int, np.ndarray]]:
    count = _blocks_at_a_time(pool)
    for start in range(0, len(blocks), count):
        yield from zip(blocks[start : start + count], pool.read(blocks[start : start + count]), strict=True)
