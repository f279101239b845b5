"""Reads JSON while it streams. The text passed on is a valid JSON prefix at every point, without spaces between its parts.

One extension to JSON, since models write it: newlines and tabs inside strings, which are passed on as escapes. No recursion: models and
attackers can nest values deeply.
"""

from __future__ import annotations

import json
import re

from tinyvllm.text.parsing.source import MismatchError, Reading, Source, Write

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_LETTERS = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]{4}")


def read_value(source: Source, write: Write) -> Reading[None]:
    """One JSON value. MismatchError if it is invalid or ends early; the valid part has been written by then."""
    closers: list[str] = []  # of the open containers
    while True:
        yield from source.spaces()
        if (yield from _begin(source, write, closers)):
            continue  # inside a new container that is not empty
        while closers and (yield from _end(source, write, closers)):
            pass
        if not closers:
            return


def _begin(source: Source, write: Write, closers: list[str]) -> Reading[bool]:
    """Read a scalar or an empty container (False), or the opening of a non-empty container (True)."""
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
            raise MismatchError
        write(number)
    return False


def _end(source: Source, write: Write, closers: list[str]) -> Reading[bool]:
    """Read what follows a value in a container: its end (True), or a comma and, in an object, the next key (False)."""
    yield from source.spaces()
    if (yield from source.skip(closers[-1])):
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
            raise MismatchError
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
        raise MismatchError
    source.at += size
    write(text)


def text_of(pieces: list[str]) -> str:
    """The value of a JSON string that read_string has written."""
    text: str = json.loads("".join(pieces))
    return text
