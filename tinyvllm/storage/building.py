"""Files of the cache folder that are built where they are missing: by one process, while others that need the same wait."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tinyvllm.storage.cache import open_cache

WAIT_SECONDS = 60.0  # for another process that builds the same


def kept_or_built(
    place: str, build: Callable[[], bytes], building: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
) -> bytes:
    """The content of "ROOM/FILE" in the cache folder; where it is missing, what `build` returns, which is kept.

    `building` is entered around building and waiting. What `build` raises is passed on, and nothing is kept.
    """
    cache = open_cache()
    content = cache.read(place)
    if content is None:
        with building(), _turn(cache.room(place.rpartition("/")[0]), place):
            content = cache.read(place)  # another process may have built it meanwhile
            if content is None:
                content = build()
                cache.write(place, content)
    return content


@contextlib.contextmanager
def _turn(folder: Path | None, place: str) -> Iterator[None]:
    """One process builds a file, and others that need it wait, for WAIT_SECONDS at most."""
    if folder is None:
        yield
        return
    path, flags = folder / f"{Path(place).name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        lock = os.open(path, flags, 0o600)
    except OSError:  # a full disk or a read-only folder: each process builds for itself
        yield
        return
    try:
        end = time.monotonic() + WAIT_SECONDS
        while not _locked(lock) and time.monotonic() < end:
            time.sleep(0.05)
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(lock)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
