"""Where the events of a trace go: a file that is valid JSON after every write, or memory. Both are bounded."""

from __future__ import annotations

import os
from typing import Protocol

from tinyvllm.config.values import expand_home
from tinyvllm.errors import OutputError

MAX_FILE = 1 << 30  # bytes: about an hour of steps of a millisecond
MAX_MEMORY = 64 << 20  # bytes of a trace over HTTP
_END = b"\n]\n"


class TraceOutput(Protocol):
    """Takes events, each a JSON object."""

    @property
    def full(self) -> bool:
        """Whether the bound is reached: what comes after is dropped."""
        ...

    def write(self, events: list[str]) -> None: ...

    def close(self) -> None: ...


class TraceFile:
    """A JSON array of events. Each write replaces the end of the array by the new events and an end, in one system call.

    So the file is valid whenever the process is killed. Events that were not written yet are lost then: at most a second's.
    """

    def __init__(self, path: str, limit: int = MAX_FILE):
        """OutputError if the file cannot be written. One that exists is replaced."""
        self.path, self.full = path, False
        self._limit, self._size, self._separator = limit, 0, b"[\n"
        try:
            self._file = os.open(expand_home("profile", path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            os.pwrite(self._file, b"[" + _END, 0)
        except OSError as error:
            raise OutputError(f"profile: cannot write {path}: {error.strerror or error}; give another file to --profile") from error

    def write(self, events: list[str]) -> None:
        if not events or self.full or self._file < 0:
            return
        text = self._separator + ",\n".join(events).encode()
        if self._size + len(text) + len(_END) > self._limit:
            self.full = True
            return
        try:
            written = os.pwrite(self._file, text + _END, self._size)
            if written < len(text) + len(_END):  # the disk is full: without the rest it is no JSON
                os.pwrite(self._file, (b"[" if self._size == 0 else b"") + _END, self._size)
                os.ftruncate(self._file, self._size + (1 if self._size == 0 else 0) + len(_END))
                self.full = True
                return
        except OSError as error:
            self.full = True
            raise OutputError(f"profile: cannot write {self.path}: {error.strerror or error}; the trace ends here") from error
        self._size += len(text)
        self._separator = b",\n"

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class TraceMemory:
    """The same in memory."""

    def __init__(self, limit: int = MAX_MEMORY):
        self.full = False
        self._events: list[str] = []
        self._room = limit

    def write(self, events: list[str]) -> None:
        self._room -= sum(len(event) + 2 for event in events)
        if self._room < 0:
            self.full = True
        if not self.full:
            self._events += events

    def close(self) -> None:
        pass

    def text(self) -> str:
        """The trace: valid JSON."""
        return "[\n" + ",\n".join(self._events) + "\n]\n"
