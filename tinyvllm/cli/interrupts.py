"""Ctrl-C between two steps of an engine: an exception in the middle of a step would leave the engine inconsistent."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C is remembered instead of raised; the function says whether there was one. A second Ctrl-C is raised."""
    interrupts: list[int] = []

    def handler(number: int, frame: object) -> None:
        if interrupts:
            raise KeyboardInterrupt
        interrupts.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: bool(interrupts)
    finally:
        signal.signal(signal.SIGINT, before)
