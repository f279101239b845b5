"""Lines of stderr and the log that depend on the machine or the defaults, and tell of nothing wrong."""

from __future__ import annotations

from collections.abc import Iterable

NOTICES = ("kernels are being compiled ", "the context is ")


def without_notices(lines: Iterable[str]) -> list[str]:
    """The lines but for those that name a long wait for compilers, which depends on the caches, and the default context."""
    return [line for line in lines if not line.startswith(NOTICES)]
