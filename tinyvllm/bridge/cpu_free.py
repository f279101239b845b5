"""Letting go of the CPU device's buffers in a thread that may not wait for the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tinygrad.runtime.ops_cpu import CPUWorker

_held: list[Any] = []  # buffers to be let go once the CPU device is idle


def never_waiting_for_itself(free: Callable[..., None]) -> Callable[..., None]:
    """`free`, for buffers that Python collects in the very thread that empties tinygrad's queue: it would wait for itself for ever."""

    def later(opaque: Any, options: Any = None) -> None:
        if isinstance(threading.current_thread(), CPUWorker):
            _held.append(opaque)
        else:
            free(opaque, options)

    return later


def let_go() -> None:
    """Let go of what was held back. Only while the CPU device is idle."""
    _held.clear()
