"""Files of lines: requests that are read one at a time, and answers that grow by whole lines, so that a second run continues the first.

`main.py batch` and `--prompts-file --output` share this. Only regular files: both are read again, and a device or a pipe has no end or no
second reading. Memory is one line and the keys of the answers.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from tinyvllm.config.values import expand_home
from tinyvllm.errors import ArgumentError, FormatError, OutputError

MAX_LINE = 32 << 20  # bytes of a line of input
MAX_ANSWER = 256 << 20  # bytes of a line of output that is read again
SYNC_SECONDS = 1.0  # of answers that a power cut may lose; a kill loses none

# the name of the request that a line of output answers, None if it is no such line
KeyOf = Callable[[Mapping[str, Any]], str | None]
IsFailed = Callable[[Mapping[str, Any]], bool]  # whether such a line is the answer to a request that failed


def read_lines(path: str, option: str = "") -> Iterator[tuple[int, bytes]]:
    """(number, line) of a regular file that `option` names, without empty lines.

    ArgumentError if it cannot be read, FormatError for a line beyond MAX_LINE.
    """
    number = 0
    try:
        with open(_open_regular(path, os.O_RDONLY), "rb") as file:
            while raw := file.readline(MAX_LINE + 1):
                number += 1
                if len(raw) > MAX_LINE:
                    raise FormatError(f"{path}:{number}: the line is longer than {MAX_LINE >> 20} MiB: is this a file of lines?")
                if raw.strip():
                    yield number, raw
    except OSError as error:
        raise ArgumentError(f"{option} {path}: {error.strerror or error}".lstrip()) from error


def _open_regular(path: str, flags: int) -> int:
    """The descriptor of a regular file; ArgumentError for a device, a pipe or a socket, whose reading may never end."""
    descriptor = os.open(expand_home("file", path), flags | getattr(os, "O_NONBLOCK", 0), 0o644)  # a pipe must not wait for its other end
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kinds = ((stat.S_ISDIR, "a directory"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"), (stat.S_ISFIFO, "a pipe"))
        kind = next((name for test, name in kinds if test(mode)), "no file")
        raise ArgumentError(f"{path} is {kind}, expected a regular file: it is read more than once")
    return descriptor


class AnswerFile:
    """The file of answers. An incomplete last line of an earlier run is cut off; `done` are the keys that have an answer,
    `failed` the number of those whose answer is an error.

    Each line is handed to the system at once, and is on the disk after SYNC_SECONDS. ArgumentError if the file has answers to requests that
    are not `wanted`, or if another run writes it; OutputError if it cannot be written.
    """

    def __init__(self, name: str, wanted: Container[str], key_of: KeyOf, is_failed: IsFailed = lambda record: False):
        self.name = name
        self._unsynced_since: float | None = None
        try:
            self._file = _open_regular(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise _cannot_write(name, error) from error
        try:
            _lock(self._file, name)
            self.done, self.failed, whole = _answered(self._file, name, wanted, key_of, is_failed)
            os.ftruncate(self._file, whole)
        except BaseException as error:
            os.close(self._file)
            if isinstance(error, OSError):
                raise _cannot_write(name, error) from error
            raise

    def write(self, line: bytes) -> None:
        """Append one line, in one go: lines of several tasks never mix."""
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            raise _cannot_write(self.name, error) from error
        if self._unsynced_since is None:
            self._unsynced_since = time.monotonic()

    def sync_if_due(self) -> None:
        """Bring lines that are older than SYNC_SECONDS to the disk. Callers call it often, from any thread, one at a time."""
        if self._unsynced_since is not None and time.monotonic() - self._unsynced_since >= SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        self._unsynced_since = None
        try:
            os.fsync(self._file)
        except OSError as error:
            raise _cannot_write(self.name, error) from error

    def close(self) -> None:
        try:
            self._sync()
        finally:
            os.close(self._file)


def _cannot_write(name: str, error: OSError) -> OutputError:
    return OutputError(f"cannot write {name}: {error.strerror or error}")


def _lock(file: int, name: str) -> None:
    try:
        import fcntl
    except ImportError:  # a system without it
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ArgumentError(f"{name} is being written by another run: wait for it, or name another file") from None


def _answered(file: int, name: str, wanted: Container[str], key_of: KeyOf, is_failed: IsFailed) -> tuple[set[str], int, int]:
    """(keys of the whole lines, number of those that failed, bytes of these lines)."""
    done: set[str] = set()
    failed = whole = 0
    with open(file, "rb", closefd=False) as reader:
        while raw := reader.readline(MAX_ANSWER + 1):
            record = _record(raw)
            key = None if record is None else key_of(record)
            if key is None:
                if len(raw) <= MAX_ANSWER and not reader.read(1):
                    break  # the last line, incomplete
                raise FormatError(f"{name}: byte {whole}: not a line of answers: the file is not the output of a batch; name another one")
            if key not in wanted:
                raise ArgumentError(f"{name} has an answer to {key!r:.80}, which is not in the input: name another file")
            done.add(key)
            failed += record is not None and is_failed(record)
            whole += len(raw)
    return done, failed, whole


def _record(raw: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(raw) if raw.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
