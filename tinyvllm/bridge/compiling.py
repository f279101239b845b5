"""How long this process has waited for compilers, and one line on stderr when it is more than a second."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tinygrad.runtime.support.compiler_cpu import ClangJITCompiler

log = logging.getLogger("tinyvllm")

NOTICE_SECONDS = 1.0


class CompileClock:
    """Seconds in which at least one compiler ran."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running, self._since, self._total, self._noted = 0, 0.0, 0.0, False

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._elapsed()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Around one compilation, in any thread. Logs once that there is compiling, when it has taken NOTICE_SECONDS in all."""
        with self._lock:
            if not self._running:
                self._since = time.perf_counter()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                total = self._elapsed()
                self._running -= 1
                if not self._running:
                    self._total = total
                first, self._noted = total > NOTICE_SECONDS and not self._noted, self._noted or total > NOTICE_SECONDS
            if first:
                log.warning("kernels are being compiled for their first use on this machine; later starts find them in the cache folder")

    def _elapsed(self) -> float:
        return self._total + (time.perf_counter() - self._since if self._running else 0.0)


compile_clock = CompileClock()


def timed(compile: Callable[..., bytes]) -> Callable[..., bytes]:
    """One of tinygrad's compilers, `compile(..., source)`, whose work the clock counts."""

    @functools.wraps(compile)
    def timed_compile(*arguments: Any) -> bytes:
        with compile_clock.compiling():
            return compile(*arguments)

    return timed_compile


_compile = timed(ClangJITCompiler.compile)


def time_generated_kernels() -> None:
    """Let the clock have tinygrad's compilations for the CPU, too."""
    compiler: Any = ClangJITCompiler
    compiler.compile = _compile
