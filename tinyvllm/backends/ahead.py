"""Kernels compiled before they are needed, by several compilers at the same time."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

from tinyvllm.backends.cpu.cores import cores

Key = TypeVar("Key", bound=Hashable)
Compile = Callable[[Key], bytes]


class CompileAhead(Generic[Key]):
    """Compiles in the background, one compiler a core. `compiler` makes what one thread compiles with, for as long as it has work."""

    def __init__(self, compiler: Callable[[], contextlib.AbstractContextManager[Compile[Key]]]):
        self._compiler, self._pending = compiler, dict[Key, Future[bytes]]()

    def start(self, keys: Iterable[Key]) -> None:
        """Compile these in their order; `result` waits for what it needs."""
        fresh = {key: Future[bytes]() for key in dict.fromkeys(keys) if key not in self._pending}
        if not fresh:
            return
        self._pending |= fresh
        work = deque(fresh.items())
        try:
            for number in range(min(len(fresh), cores().processes)):
                # a daemon: the interpreter would wait at its end until all is compiled
                threading.Thread(target=self._compile_all, args=(work,), name=f"tinyvllm-compile-{number}", daemon=True).start()
        except RuntimeError:  # no more threads for want of memory: what is left is compiled when it is needed
            with contextlib.suppress(IndexError):
                while True:
                    self._pending.pop(work.pop()[0], None)

    def _compile_all(self, work: deque[tuple[Key, Future[bytes]]]) -> None:
        with self._compiler() as compile_one:
            while True:
                try:
                    key, future = work.popleft()
                except IndexError:
                    return
                try:
                    future.set_result(compile_one(key))
                except BaseException as error:
                    future.set_exception(error)

    def result(self, key: Key) -> bytes | None:
        """What was compiled ahead, which is then forgotten; None if nothing was. Waits for it, and raises what the compiler has raised."""
        future = self._pending.pop(key, None)
        return None if future is None else future.result()

    def clear(self) -> None:
        """Wait for what is being compiled, and drop it."""
        while self._pending:
            with contextlib.suppress(Exception):
                self._pending.popitem()[1].result()
