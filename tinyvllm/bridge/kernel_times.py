"""Timing of the kernels of captured steps, one by one: what a profile has of a step that it samples."""

from __future__ import annotations

import threading

from tinyvllm.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One launch: seconds of time.perf_counter at its start, how many it took, and the work that its plan states (0 for none)."""

    name: str
    start: float
    seconds: float
    flops: int
    nbytes: int


class KernelTimer:
    """The launches of captured steps that one thread has run between `start_timing` and `stop_timing`, and what it took to note them."""

    def __init__(self) -> None:
        self.times: list[KernelTime] = []
        self.spent = 0.0  # seconds after the kernels had run


_current: tuple[int, KernelTimer] | None = None  # the thread that is timed: another engine of the process is not


def kernel_timer() -> KernelTimer | None:
    """What wants the times of the captured step that this thread runs now; usually None."""
    current = _current
    return None if current is None or current[0] != threading.get_ident() else current[1]


def start_timing(timer: KernelTimer) -> None:
    """Time the captured steps of this thread until `stop_timing`."""
    global _current
    _current = threading.get_ident(), timer


def stop_timing(timer: KernelTimer) -> None:
    """End what `start_timing` began, unless another timer has begun since."""
    global _current
    current = _current
    if current is not None and current[1] is timer:
        _current = None
