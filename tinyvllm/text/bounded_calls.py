"""Calls of native code that may take for ever: their caller gives up after a while.

The regular expressions of a tokenizer.json run in the library `tokenizers`, by backtracking: `(a+)+b` takes 0.1 s for 22 letters, and
a text of a megabyte hours. The library bounds the steps from one position and not their sum, and a call cannot be interrupted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tinyvllm.errors import OutOfMemoryError, TokenizerError

T = TypeVar("T")

MAX_SECONDS = 10.0  # and one for each CHARACTERS
CHARACTERS = 20_000  # published tokenizers encode fifty times as many in a second
MAX_OVERDUE = 2  # calls that nothing waits for any more; then no further one begins


class BoundedCalls:
    """Runs calls that release the GIL, each in a thread of its own. The threads of those given up continue until their calls return."""

    def __init__(self, what: str):
        self._what = what
        self._lock = threading.Lock()
        self._overdue = 0

    def run(self, call: Callable[[], T], characters: int) -> T:
        """The result of the call, or what it raises; TokenizerError if it takes too long, or too many earlier ones still do."""
        with self._lock:
            if self._overdue >= MAX_OVERDUE:
                raise TokenizerError(f"tokenizer: {self._what}: {self._overdue} earlier texts still occupy it; try again later")
        task = _Task(call)
        thread = threading.Thread(target=task.run, name="tinyvllm-tokenizer", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise OutOfMemoryError(f"tokenizer: the system starts no thread ({error}); free memory, or raise ulimit -u") from error
        seconds = MAX_SECONDS + characters / CHARACTERS
        if not task.ended.wait(seconds):
            with self._lock:
                if task.give_up(self._returned):
                    self._overdue += 1
                    raise TokenizerError(
                        f"tokenizer: {self._what} takes more than {seconds:.0f} seconds for {characters} characters; shorten them, or "
                        "repair its regular expressions"
                    )
        if task.error is not None:
            raise task.error
        result: T = task.result
        return result

    def _returned(self) -> None:
        with self._lock:
            self._overdue -= 1


class _Task:
    """One call. It has ended, or it is given up and reports its end to another function: never both."""

    def __init__(self, call: Callable[[], Any]):
        self._call = call
        self._lock = threading.Lock()
        self._late: Callable[[], None] | None = None
        self.ended = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:  # also a panic of the library: the caller's to handle
            self.error = error
        with self._lock:
            self.ended.set()
            late = self._late
        if late is not None:
            late()

    def give_up(self, late: Callable[[], None]) -> bool:
        """Have `late` called at the end; False if it has ended."""
        with self._lock:
            if self.ended.is_set():
                return False
            self._late = late
            return True
