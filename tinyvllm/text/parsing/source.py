"""A text that comes in pieces, read as if it were there: readers are generators that yield where they need more of it.

So what is read depends on the text alone and never on where it was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Write = Callable[[str], object]

_SPACES = re.compile(r"\s*")
_TRIM = 1 << 14  # characters already read that may be kept


class NotThisError(Exception):
    """The text does not go on as the reader's dialect wants."""


class Source:
    """`text` so far, of which `at` have been read. While `pinned` nothing is forgotten, and `at` may be set back."""

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

    def passes(self, word: str) -> Reading[bool]:
        """Read `word` if the text goes on with it. Waits no longer than that is open."""
        while not self.text.startswith(word, self.at):
            if self.ended or not word.startswith(self.text[self.at :]):
                return False
            yield
        self.at += len(word)
        return True

    def expect(self, word: str) -> Reading[None]:
        if not (yield from self.passes(word)):
            raise NotThisError

    def spaces(self) -> Reading[None]:
        yield from self.match(_SPACES)

    def match(self, pattern: re.Pattern[str]) -> Reading[str]:
        """The longest run of characters that `pattern`, a class of characters with a star, matches."""
        pieces = []
        while True:
            end = pattern.match(self.text, self.at).end()  # type: ignore[union-attr]
            pieces.append(self.text[self.at : end])
            self.at = end
            if end < len(self.text) or self.ended:
                return "".join(pieces)
            yield

    def until(self, mark: str, write: Write, before: str = "") -> Reading[None]:
        """Write what comes before `mark` as it comes, without one `before` that stands directly before it, and read the mark.

        NotThisError if the text ends first; what was certain by then has been written.
        """
        whole = before + mark
        while (found := self.text.find(mark, self.at)) < 0:
            if self.ended:
                raise NotThisError
            safe = len(self.text) - max(begun(self.text, self.at, whole), begun(self.text, self.at, mark))
            write(self.text[self.at : safe])
            self.at = safe
            yield
        end = found - len(before) if self.text.endswith(before, self.at, found) else found
        write(self.text[self.at : end])
        self.at = found + len(mark)


def begun(text: str, start: int, mark: str) -> int:
    """How many characters at the end of text[start:] may be the beginning of `mark`; less than all of it."""
    most = min(len(mark) - 1, len(text) - start)
    return next((size for size in range(most, 0, -1) if text.endswith(mark[:size])), 0)
