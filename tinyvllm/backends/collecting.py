"""Notes kernels instead of launching them: ops can be called to find out which kernels they launch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tinyvllm.backends.kernel import Kernel

_collected: list[list[Kernel]] = []  # the innermost `collecting_kernels` is the last


@contextlib.contextmanager
def collecting_kernels() -> Iterator[list[Kernel]]:
    """Within it, every backend's `launch` only notes the kernel in the list."""
    kernels: list[Kernel] = []
    _collected.append(kernels)
    try:
        yield kernels
    finally:
        _collected.pop()


def collecting() -> bool:
    """Whether kernels are only noted now."""
    return bool(_collected)


def collects(kernel: Kernel) -> bool:
    """Whether the kernel was noted and must not be launched."""
    if _collected:
        _collected[-1].append(kernel)
    return bool(_collected)
