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
        self._lock = threading.Lock()
        self._work = deque[tuple[Key, Future[bytes]]]()  # guarded by _lock
        self._compilers = 0  # threads that have not found an empty queue; guarded by _lock

    def start(self, keys: Iterable[Key]) -> None:
        """Compile these in their order, after those of earlier calls; `result` waits for what it needs."""
        fresh = {key: Future[bytes]() for key in dict.fromkeys(keys) if key not in self._pending}
        self._pending |= fresh
        with self._lock:
            self._work += fresh.items()
            missing = min(len(self._work), cores().processes - self._compilers)
        try:
            for _ in range(missing):
                # a daemon: the interpreter would wait at its end until all is compiled
                threading.Thread(target=self._compile_all, name="tinyvllm-compile", daemon=True).start()
                with self._lock:
                    self._compilers += 1
        except RuntimeError:  # no more threads for want of memory: what none of them has begun is compiled when it is needed
            with self._lock:
                while self._work:
                    self._pending.pop(self._work.pop()[0], None)

    def _compile_all(self) -> None:
        with contextlib.ExitStack() as stack:
            compile_one: Compile[Key] | None = None
            while (next_one := self._next()) is not None:
                key, future = next_one
                try:
                    compile_one = compile_one or stack.enter_context(self._compiler())
                    future.set_result(compile_one(key))
                except BaseException as error:
                    future.set_exception(error)

    def _next(self) -> tuple[Key, Future[bytes]] | None:
        """What is compiled next; None, and the caller's thread counts no more, where there is nothing."""
        with self._lock:
            if self._work:
                return self._work.popleft()
            self._compilers -= 1
            return None

    def result(self, key: Key) -> bytes | None:
        """What was compiled ahead, which is then forgotten; None if nothing was. Waits for it, and raises what the compiler has raised."""
        future = self._pending.pop(key, None)
        return None if future is None else future.result()

    def clear(self) -> None:
        """Wait for what is being compiled, and drop it."""
        while self._pending:
            with contextlib.suppress(Exception):
                self._pending.popitem()[1].result()
