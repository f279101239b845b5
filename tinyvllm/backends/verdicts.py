"""What the self-test has found about kernels on this machine, kept in the cache folder: what passed, what failed and why.

One file, by a key that names device, driver, compiler and sources: another driver, another version of a kernel is another key, whose
kernels are tested again. Before a kernel is launched for the first time, a mark is written. A kernel that ends the process leaves its
mark, which the next process takes for its failure. Testing processes take turns, so that no mark of a running one is taken for that.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from typing import Any

from tinyvllm.storage.cache import CacheFolder

FILE = "selftest.json"
MAX_KEYS = 8  # devices and versions that are remembered
MAX_TEXT = 300  # characters of a reason
WAIT_SECONDS = 60.0  # for another process that is testing
CRASHED = "the process ended while it was tested"


class Verdicts:
    """The verdicts under one key. `cache` None keeps nothing."""

    def __init__(self, cache: CacheFolder | None, key: str):
        self._cache, self._key, self._alone = cache, key, False
        self._read()

    def _read(self) -> None:
        held = _of_file(self._cache).get(self._key, {})
        self.passed: set[str] = set(held.get("passed", ()))
        self.failed: dict[str, str] = dict(held.get("failed", {}))
        self._mark: str | None = held.get("testing")

    def knows(self, name: str) -> bool:
        """Whether the kernel needs no test."""
        return name in self.passed or name in self.failed

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Around tests: one process at a time, which takes a mark of an earlier one for a failure."""
        with _lock(self._cache) as self._alone:
            self._read()
            if self._alone and self._mark is not None:
                self.failed[self._mark] = CRASHED
                self.passed.discard(self._mark)
                self._clear()
            yield
        self._alone = False

    @contextlib.contextmanager
    def testing(self, name: str) -> Iterator[None]:
        """Around the first launch of a kernel: if the process does not survive it, the next one knows."""
        self._mark = name if self._alone else None
        self._write()
        try:
            yield
        finally:
            self._clear()

    def keep(self, name: str, reason: str | None) -> None:
        """The kernel passed, or why it failed. Written with the next mark, or by `save`."""
        self.passed.discard(name)
        self.failed.pop(name, None)
        if reason is None:
            self.passed.add(name)
        else:
            self.failed[name] = reason[:MAX_TEXT]

    def forget(self) -> None:
        """Test everything again."""
        self.passed.clear()
        self.failed.clear()

    def save(self) -> None:
        self._write()

    def _clear(self) -> None:
        self._mark = None
        self._write()

    def _write(self) -> None:
        if self._cache is None:
            return
        every = _of_file(self._cache)
        every.pop(self._key, None)
        held: dict[str, Any] = {"passed": sorted(self.passed), "failed": self.failed}
        kept = dict(list(every.items())[-(MAX_KEYS - 1) :])
        kept[self._key] = held | ({} if self._mark is None else {"testing": self._mark})
        self._cache.write(FILE, json.dumps(kept, indent=1).encode())


def _of_file(cache: CacheFolder | None) -> dict[str, dict[str, Any]]:
    """By key; nothing if there is no file, or one of another format."""
    content = None if cache is None else cache.read(FILE)
    try:
        every = json.loads(content or b"{}")
        return {str(key): held for key, held in every.items() if _is_sound(held)}
    except (ValueError, AttributeError, RecursionError):
        return {}


def _is_sound(held: Any) -> bool:
    passed, failed, mark = held.get("passed"), held.get("failed"), held.get("testing")
    texts = [*passed, *failed, *failed.values()] if isinstance(passed, list) and isinstance(failed, dict) else [None]
    return all(isinstance(text, str) for text in texts) and isinstance(mark, str | None)


@contextlib.contextmanager
def _lock(cache: CacheFolder | None) -> Iterator[bool]:
    """Whether this process is the only one that tests. False after WAIT_SECONDS, or where no file can be locked."""
    if cache is None or cache.path is None:
        yield False
        return
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        file = os.open(cache.path / f"{FILE}.lock", flags, 0o600)  # never removed: another process may be waiting for this very file
    except OSError:
        yield False
        return
    try:
        yield _locked(file)
    finally:
        os.close(file)


def _locked(file: int) -> bool:
    end = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)
