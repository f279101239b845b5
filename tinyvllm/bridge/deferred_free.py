"""Frees buffers of the CPU device outside the thread that must not wait for the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tinygrad.runtime.ops_cpu import CPUWorker

_deferred: list[Any] = []  # buffers to be freed once the CPU device is idle


def defer_in_worker(free: Callable[..., None]) -> Callable[..., None]:
    """`free`, deferred where Python collects a buffer in the thread that empties tinygrad's queue: it would wait for itself for ever."""

    def free_or_defer(opaque: Any, options: Any = None) -> None:
        if isinstance(threading.current_thread(), CPUWorker):
            _deferred.append(opaque)
        else:
            free(opaque, options)

    return free_or_defer


def release_deferred() -> None:
    """Free the deferred buffers. Only while the CPU device is idle."""
    _deferred.clear()
