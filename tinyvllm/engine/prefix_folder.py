"""A prefix cache over a restart: what `prefix_cache_dir` names, read when the engine starts and written when it is closed.

What cannot be read or written is said once through the log `tinyvllm`, and the engine goes on without: a cache is no reason to stop.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable

import numpy as np

import tinyvllm
from tinyvllm.cache.files import KEY_BYTES, Buffer, load, load_key, save
from tinyvllm.cache.prefix import PrefixCache
from tinyvllm.engine.record import fingerprint
from tinyvllm.errors import FormatError, OutputError
from tinyvllm.runner.kv import KVPool
from tinyvllm.runner.runner import Runner

_BATCH = 64  # blocks that are read or written at a time: each time waits for the device and looks up every layer
_LARGEST = 1 << 62  # bytes of the file: all of the pool

log = logging.getLogger("tinyvllm")


def key_of(folder: str | None) -> bytes:
    """The key of the prefix cache's hashes: the folder's, or a new one where there is no folder or it cannot be used."""
    if folder is not None:
        try:
            return load_key(folder)
        except (FormatError, OutputError) as error:
            log.warning("prefix cache starts cold: %s", error)
    return secrets.token_bytes(KEY_BYTES)


def identity(runner: Runner, max_model_len: int | None, load_format: str) -> bytes:
    """All that the bits of keys and values depend on: weights, dtypes, kernels, and what positions mean."""
    checkpoint = runner.checkpoint
    words = [
        fingerprint(checkpoint.config, checkpoint.tensors), load_format, str(runner.dtype), runner.matrix_format, runner.device.split(":")[0],
        runner.rows(), os.environ.get("TINYVLLM_KERNELS", ""), max_model_len, tinyvllm.__version__,
    ]  # fmt: skip
    return json.dumps(words, sort_keys=True).encode()


def restore(folder: str, prefix: PrefixCache, pool: KVPool, made_for: bytes) -> int:
    """Take what was written there, as far as there are blocks; their number, 0 where nothing can be used."""
    writer = _Writer(pool)
    try:
        count = load(folder, prefix, made_for, pool.block_bytes, writer.add)
    except FormatError as error:
        log.warning("prefix cache of %d blocks: %s", len(writer), error)
        count = len(writer)  # what came before it is good
    writer.flush()
    return count


def keep(folder: str, prefix: PrefixCache, pool: KVPool, made_for: bytes) -> int:
    """Write all that is cached; the number of its blocks, 0 where that failed."""
    try:
        return save(folder, prefix, made_for, pool.block_bytes, _reader(pool, [entry.block for entry in prefix.entries()]), _LARGEST)
    except OutputError as error:
        log.warning("the prefix cache was not kept: %s", error)
        return 0


class _Writer:
    """Collects blocks for the pool. What is collected is cached already, so it must be flushed before anything runs."""

    def __init__(self, pool: KVPool):
        self._pool = pool
        self._data = np.empty((_BATCH, pool.block_bytes), np.uint8)
        self._blocks: list[int] = []
        self._written = 0

    def __len__(self) -> int:
        return self._written + len(self._blocks)

    def add(self, block: int, data: Buffer) -> None:
        self._data[len(self._blocks)] = np.frombuffer(data, np.uint8)
        self._blocks.append(block)
        if len(self._blocks) == _BATCH:
            self.flush()

    def flush(self) -> None:
        if self._blocks:
            self._pool.write(self._blocks, self._data[: len(self._blocks)])
            self._written += len(self._blocks)
            self._blocks = []


def _reader(pool: KVPool, blocks: list[int]) -> Callable[[int], Buffer]:
    """A function that gives the contents of these blocks, asked for in this order."""

    def contents() -> object:
        for start in range(0, len(blocks), _BATCH):
            some = blocks[start : start + _BATCH]
            yield from zip(some, pool.read(some), strict=True)

    following = iter(contents())  # type: ignore[call-overload]

    def read(block: int) -> Buffer:
        known, data = next(following)
        assert known == block, f"prefix cache: block {block} asked for, {known} was next"
        return memoryview(data)

    return read
