"""A text that arrives in pieces: readers are generators that yield when they need more of it.

So the result of reading depends only on the text, not on where it was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Write = Callable[[str], object]

_SPACES = re.compile(r"\s*")
_TRIM = 1 << 14  # characters already read that may stay in memory


class MismatchError(Exception):
    """The text does not match the reader's dialect."""


class Source:
    """The text so far; `at` characters have been read. While `pinned`, nothing is dropped, and `at` may be set back."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.pinned = False

    def add(self, text: str) -> None:
        if self.at > _TRIM and not self.pinned:
            self.text, self.at = self.text[self.at :], 0
        self.text += text

    def peek(self, count: int = 1) -> Reading[str]:
        """The next characters; fewer only at the end of the text."""
        while len(self.text) - self.at < count and not self.ended:
            yield
        return self.text[self.at : self.at + count]

    def skip(self, word: str) -> Reading[bool]:
        """Read `word` if the text continues with it. Waits only while that is undecided."""
        while not self.text.startswith(word, self.at):
            if self.ended or not word.startswith(self.text[self.at :]):
                return False
            yield
        self.at += len(word)
        return True

    def expect(self, word: str) -> Reading[None]:
        if not (yield from self.skip(word)):
            raise MismatchError

    def spaces(self) -> Reading[None]:
        yield from self.match(_SPACES)

    def match(self, pattern: re.Pattern[str]) -> Reading[str]:
        """The longest match of `pattern`, which must be a starred class of characters."""
        pieces = []
        while True:
            end = pattern.match(self.text, self.at).end()  # type: ignore[union-attr]
            pieces.append(self.text[self.at : end])
            self.at = end
            if end < len(self.text) or self.ended:
                return "".join(pieces)
            yield

    def until(self, mark: str, write: Write, before: str = "") -> Reading[None]:
        """Write the text up to `mark` as it arrives, without one `before` directly in front of the mark, and read the mark.

        MismatchError if the text ends first; all text that cannot be part of the mark has been written by then.
        """
        whole = before + mark
        while (mark_at := self.text.find(mark, self.at)) < 0:
            if self.ended:
                raise MismatchError
            safe = len(self.text) - max(partial_mark(self.text, self.at, whole), partial_mark(self.text, self.at, mark))
            write(self.text[self.at : safe])
            self.at = safe
            yield
        end = mark_at - len(before) if self.text.endswith(before, self.at, mark_at) else mark_at
        write(self.text[self.at : end])
        self.at = mark_at + len(mark)


def partial_mark(text: str, start: int, mark: str) -> int:
    """Number of characters at the end of text[start:] that may be the start of `mark`; fewer than its length."""
    longest = min(len(mark) - 1, len(text) - start)
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)
