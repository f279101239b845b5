"""A small file that appears under its name only when it is complete."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator

from tinyvllm.config.values import expand_home
from tinyvllm.errors import OutputError


@contextlib.contextmanager
def new_file(name: str) -> Iterator[Callable[[str], None]]:
    """A function that writes the whole text of a file, which appears under its name only when it is complete. "-" is stdout.

    OutputError on entering if the file cannot be written: before the hours of computing, not after.
    """
    if name == "-":
        yield _print
        return
    target = expand_home("file", name).resolve()
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")

    def publish(text: str) -> None:
        with _writing(name):
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, target)

    with _writing(name):
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        unfinished.touch()
    try:
        yield publish
    finally:
        unfinished.unlink(missing_ok=True)


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def _writing(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {name}: {error.strerror or error}") from error
