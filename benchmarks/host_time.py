"""The processor time of the host in the steps of an engine on the CPU, apart from that of its kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tinyvllm.backends.cpu.threads import thread_pool


def host_seconds(function: Callable[[], object]) -> float:
    """Processor seconds of this thread in the function, without those in which it ran kernels as a thread of the CPU's pool."""
    pool, inside = thread_pool(), [0.0]
    run = pool.run

    def timed(*arguments: Any) -> None:
        start = time.thread_time()
        run(*arguments)
        inside[0] += time.thread_time() - start

    pool.run = timed  # type: ignore[method-assign, assignment]
    try:
        start = time.thread_time()
        function()
        return time.thread_time() - start - inside[0]
    finally:
        del pool.run  # type: ignore[method-assign]
