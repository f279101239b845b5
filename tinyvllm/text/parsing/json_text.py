"""JSON read while it comes: what is written on is valid JSON up to there, without the spaces between its parts.

More is accepted than JSON allows in one point, since models do it: line ends and tabs inside strings, which are written as escapes.
No recursion: models and attackers nest as deep as they like.
"""

from __future__ import annotations

import json
import re

from tinyvllm.text.parsing.source import NotThisError, Reading, Source, Write

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_LETTERS = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]{4}")


def read_value(source: Source, write: Write) -> Reading[None]:
    """One JSON value. NotThisError where it is not one, or ends early; what was valid by then has been written."""
    closers: list[str] = []  # of the containers that are open
    while True:
        yield from source.spaces()
        if (yield from _begin(source, write, closers)):
            continue  # inside a new container that is not empty
        while closers and (yield from _end(source, write, closers)):
            pass
        if not closers:
            return


def _begin(source: Source, write: Write, closers: list[str]) -> Reading[bool]:
    """A whole scalar or empty container, or the opening of one that holds something: True."""
    first = yield from source.peek()
    if first == '"':
        yield from read_string(source, write)
    elif first and first in "{[":
        source.at += 1
        closers.append("}" if first == "{" else "]")
        write(first)
        yield from source.spaces()
        if (yield from source.peek()) != closers[-1]:
            if first == "{":
                yield from _key(source, write)
            return True
    elif first and first in "tfn":
        word = {"t": "true", "f": "false", "n": "null"}[first]
        yield from source.expect(word)
        write(word)
    else:
        number = yield from source.match(_NUMBER_LETTERS)
        if not _NUMBER.fullmatch(number):
            raise NotThisError
        write(number)
    return False


def _end(source: Source, write: Write, closers: list[str]) -> Reading[bool]:
    """What follows a value in a container: its end, True, or a comma and in an object the next key, False."""
    yield from source.spaces()
    if (yield from source.passes(closers[-1])):
        write(closers.pop())
        return True
    yield from source.expect(",")
    write(",")
    yield from source.spaces()
    if closers[-1] == "}":
        yield from _key(source, write)
    return False


def _key(source: Source, write: Write) -> Reading[None]:
    yield from read_string(source, write)
    yield from source.spaces()
    yield from source.expect(":")
    write(":")


def read_string(source: Source, write: Write) -> Reading[None]:
    """One string with its quotes."""
    yield from source.expect('"')
    write('"')
    while True:
        piece = _PLAIN.match(source.text, source.at).group()  # type: ignore[union-attr]
        source.at += len(piece)
        write(piece)
        next_one = yield from source.peek()
        if next_one == "":
            raise NotThisError
        if next_one == '"':
            source.at += 1
            write('"')
            return
        if next_one == "\\":
            yield from _escape(source, write)
        elif next_one < " ":
            source.at += 1
            write(json.dumps(next_one)[1:-1])


def _escape(source: Source, write: Write) -> Reading[None]:
    letter = (yield from source.peek(2))[1:]
    size = 6 if letter == "u" else 2
    text = yield from source.peek(size)
    if letter == "" or letter not in '"\\/bfnrtu' or (letter == "u" and not _HEX.fullmatch(text[2:])):
        raise NotThisError
    source.at += size
    write(text)


def text_of(pieces: list[str]) -> str:
    """The text that a string, as read_string wrote it, stands for."""
    text: str = json.loads("".join(pieces))
    return text
