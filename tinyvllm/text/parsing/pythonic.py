"""Reads Python literals while they stream, and passes them on as JSON."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from tinyvllm.text.parsing.source import MismatchError, Reading, Source, Write

_PLAIN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_OTHER = re.compile(r"[^\[\](){},'\"]*")
_ESCAPE_LENGTHS = {"x": 4, "u": 6, "U": 10}
_MAX_LITERAL = 1 << 16  # characters of a literal other than a string, which is parsed as a tree


def read_literal(source: Source, write: Write) -> Reading[None]:
    """One literal: a string is passed on as it is read, others when complete. MismatchError for values that JSON cannot express."""
    first = yield from source.peek()
    if first and first in "'\"":
        write('"')
        yield from _read_text(source, lambda text: write(_json_escaped(text)), raw=False)
        write('"')
        return
    pieces: list[str] = []
    yield from _read_raw(source, pieces.append)
    write(_as_json("".join(pieces)))


def _json_escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _read_text(source: Source, write: Write, raw: bool) -> Reading[None]:
    """A quoted string; raw: unchanged, with its quotes."""
    quote = yield from source.peek()
    source.at += 1
    if raw:
        write(quote)
    while True:
        piece = _PLAIN[quote].match(source.text, source.at).group()  # type: ignore[union-attr]
        source.at += len(piece)
        write(piece)
        following = yield from source.peek()
        if not following:
            raise MismatchError
        if following == quote:
            source.at += 1
            if raw:
                write(quote)
            return
        if following == "\\":
            escape = yield from _read_escape(source)
            write(escape if raw else _unescaped(escape))


def _read_escape(source: Source) -> Reading[str]:
    letter = (yield from source.peek(2))[1:]
    length = _ESCAPE_LENGTHS.get(letter, 2)
    escape = yield from source.peek(length)
    if len(escape) < length:
        raise MismatchError
    source.at += length
    return escape


def _unescaped(escape: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python keeps unknown escapes, with a warning
        try:
            value: str = ast.literal_eval(f'"{escape}"')
        except (SyntaxError, ValueError):
            raise MismatchError from None
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise MismatchError
    return value


def _read_raw(source: Source, write: Write) -> Reading[None]:
    """A literal, unchanged, up to a comma or bracket outside it."""
    depth = length = 0
    while length <= _MAX_LITERAL:
        piece = yield from source.match(_OTHER)
        write(piece)
        following = yield from source.peek()
        length += len(piece) + 1
        if not following or (not depth and following in ",])}"):
            return
        if following in "'\"":
            before = source.at
            yield from _read_text(source, write, raw=True)
            length += max(0, source.at - before)
        else:
            depth += (following in "([{") - (following in ")]}")
            source.at += 1
            write(following)
    raise MismatchError


def _as_json(literal: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return json.dumps(_value(ast.parse(literal.strip(), mode="eval").body), ensure_ascii=False, allow_nan=False)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise MismatchError from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, type(None))):
        return node.value
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):  # models mix JSON and Python
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and type(number := _value(node.operand)) in (int, float):
        return -number
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value(key) for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_value, node.values), strict=True))
    raise MismatchError
