"""The readers of the dialects: each reads one call, or one list of calls, and reports it to the parser.

A reader starts at a possible start of a call and raises MismatchError if there is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Protocol

from tinyvllm.text.parsing.formats import Format
from tinyvllm.text.parsing.json_text import read_string, read_value, text_of
from tinyvllm.text.parsing.pythonic import read_literal
from tinyvllm.text.parsing.source import MismatchError, Reading, Source, Write
from tinyvllm.text.parsing.tools import Tool

_NAME = re.compile(r"[\w.\-]*")
_MAX_NAME = 256  # characters; a longer text is no name, so the reader stops waiting for its end
_CALL_ID = re.compile(r"[A-Za-z0-9]*")


class Parser(Protocol):
    """The part of a StreamParser that readers use."""

    source: Source
    format: Format
    calls: int

    def name_call(self, name: str) -> None: ...
    def start_call(self, name: str) -> Tool: ...
    def write_arguments(self, text: str) -> None: ...
    def end_call(self) -> None: ...
    def attempt(self, reader: Callable[[], Reading[None]]) -> Reading[bool]: ...


def read_hermes(parser: Parser) -> Reading[None]:
    source = parser.source
    yield from source.expect("<tool_call>")
    yield from source.spaces()
    yield from _read_object(parser)
    yield from _optional(parser, "</tool_call>")


def read_llama3(parser: Parser) -> Reading[None]:
    source = parser.source
    yield from source.spaces()
    if parser.calls and (yield from source.skip(";")):
        yield from source.spaces()
    if (yield from source.skip("<|python_tag|>")):
        yield from source.spaces()
    yield from _read_object(parser)


def read_mistral(parser: Parser) -> Reading[None]:
    source = parser.source
    yield from source.expect("[TOOL_CALLS]")
    yield from source.spaces()
    if (yield from source.skip("[")):
        yield from _read_list(parser, lambda: _read_object(parser))
        return
    name = yield from _read_name(source)
    if (yield from source.skip("[CALL_ID]")):
        yield from source.match(_CALL_ID)
    yield from source.skip("[ARGS]")
    yield from source.spaces()
    if (yield from source.peek()) != "{":
        raise MismatchError
    parser.start_call(name)
    yield from read_value(source, parser.write_arguments)
    parser.end_call()


def read_pythonic(parser: Parser) -> Reading[None]:
    source, closing = parser.source, parser.format.closing
    yield from source.spaces()
    for mark in parser.format.marks:
        if (yield from source.skip(mark)):
            yield from source.spaces()
    yield from source.expect("[")
    yield from _read_list(parser, lambda: _read_python_call(parser))
    if closing:
        yield from _optional(parser, closing)


def read_qwen_xml(parser: Parser) -> Reading[None]:
    source = parser.source
    wrapped = yield from source.skip("<tool_call>")  # Qwen3-Coder sometimes omits it
    if wrapped:
        yield from source.spaces()
    yield from source.expect("<function=")
    tool = parser.start_call((yield from _read_up_to(source, ">")))
    parser.write_arguments("{")
    first = True
    yield from source.spaces()
    while not (yield from source.skip("</function>")):
        yield from source.expect("<parameter=")
        key = yield from _read_up_to(source, ">")
        parser.write_arguments(("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        yield from _read_xml_value(parser, tool.types(key))
        yield from source.spaces()
        first = False
    parser.write_arguments("}")
    parser.end_call()
    if wrapped:
        yield from _optional(parser, "</tool_call>")


READERS: Mapping[str, Callable[[Parser], Reading[None]]] = {
    "hermes": read_hermes,
    "llama3": read_llama3,
    "mistral": read_mistral,
    "pythonic": read_pythonic,
    "qwen_xml": read_qwen_xml,
}


def _optional(parser: Parser, mark: str) -> Reading[None]:
    """Read `mark` and the spaces before it, if they follow. A call is complete without it: a stop string may have cut it off."""

    def closing() -> Reading[None]:
        yield from parser.source.spaces()
        yield from parser.source.expect(mark)

    yield from parser.attempt(closing)


def _read_list(parser: Parser, read: Callable[[], Reading[None]]) -> Reading[None]:
    """Calls up to "]", after the "[". Complete calls count, whatever follows them."""

    def further() -> Reading[None]:
        yield from parser.source.spaces()
        yield from parser.source.expect(",")
        yield from parser.source.spaces()
        yield from read()

    yield from parser.source.spaces()
    yield from read()
    while (yield from parser.attempt(further)):
        pass
    yield from _optional(parser, "]")


def _read_object(parser: Parser) -> Reading[None]:
    """A call as a JSON object with a name and arguments (or parameters), in any order; other keys are skipped."""
    source = parser.source
    name: str | None = None
    early: list[str] | None = None  # arguments that came before the name
    done = False
    yield from source.expect("{")
    while True:
        key = yield from _read_key(source)
        if key == "name" and name is None:
            name = yield from _read_text(source)
            parser.name_call(name)
            if early is not None:
                done = _write_call(parser, name, early)
        elif key in ("arguments", "parameters") and not done and early is None:
            if name is None:
                early = []
                yield from _read_arguments(source, early.append)
            else:
                yield from _read_known_arguments(parser, name)
                done = True
        else:
            yield from read_value(source, _discard)
        yield from source.spaces()
        if (yield from source.skip("}")):
            break
        yield from source.expect(",")
        yield from source.spaces()
    if name is None:
        raise MismatchError
    if not done:
        _write_call(parser, name, ["{}"])
    parser.end_call()


def _write_call(parser: Parser, name: str, arguments: list[str]) -> bool:
    parser.start_call(name)
    for piece in arguments:
        parser.write_arguments(piece)
    return True


def _read_key(source: Source) -> Reading[str]:
    key = yield from _read_text(source)
    yield from source.spaces()
    yield from source.expect(":")
    return key


def _read_text(source: Source) -> Reading[str]:
    pieces: list[str] = []
    yield from source.spaces()
    yield from read_string(source, pieces.append)
    return text_of(pieces)


def _read_known_arguments(parser: Parser, name: str) -> Reading[None]:
    """Arguments of a call whose name is known; the call is certain once they open."""
    yield from parser.source.spaces()
    if (yield from parser.source.peek()) == "{":
        parser.start_call(name)
        yield from read_value(parser.source, parser.write_arguments)
    else:
        pieces: list[str] = []
        yield from _read_arguments(parser.source, pieces.append)
        _write_call(parser, name, pieces)


def _read_arguments(source: Source, write: Write) -> Reading[None]:
    """An object, or a string that contains one as JSON."""
    yield from source.spaces()
    if (yield from source.peek()) == "{":
        yield from read_value(source, write)
        return
    inner = Source()
    inner.text, inner.ended = (yield from _read_text(source)), True
    if not inner.text.lstrip().startswith("{"):
        raise MismatchError
    yield from read_value(inner, write)
    if inner.text[inner.at :].strip():
        raise MismatchError


def _discard(text: str) -> None:
    """The writer for values that are skipped."""


def _read_name(source: Source) -> Reading[str]:
    name = yield from source.match(_NAME)
    if not 0 < len(name) <= _MAX_NAME:
        raise MismatchError
    return name


def _read_up_to(source: Source, end: str) -> Reading[str]:
    """A name and the character after it."""
    while True:
        end_at = source.text.find(end, source.at)
        text = source.text[source.at : end_at if end_at >= 0 else None]
        if "\n" in text or "<" in text or len(text) > _MAX_NAME or (end_at < 0 and source.ended):
            raise MismatchError
        if end_at >= 0:
            source.at = end_at + len(end)
            return text.strip().strip("\"'")
        yield


def _read_xml_value(parser: Parser, types: frozenset[str]) -> Reading[None]:
    """The value between <parameter=...> and </parameter>: text if the schema requires text or has no type, else JSON if it is valid."""

    def write_escaped(text: str) -> None:
        parser.write_arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    yield from parser.source.skip("\n")
    if types <= {"string"}:
        parser.write_arguments('"')
        yield from parser.source.until("</parameter>", write_escaped, "\n")
        parser.write_arguments('"')
        return
    pieces: list[str] = []
    yield from parser.source.until("</parameter>", pieces.append, "\n")
    parser.write_arguments(_converted("".join(pieces), types))


def _converted(text: str, types: frozenset[str]) -> str:
    """A parameter as JSON: a value of one of `types` if it is one, else a string."""
    text_as_json = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    pieces: list[str] = []
    source = Source()
    source.text, source.ended = text_as_json, True
    try:
        for _ in read_value(source, pieces.append):
            pass
        value = "".join(pieces)
        if not source.text[source.at :].strip() and _type_of(value) in types:
            return value
    except MismatchError:
        pass
    return json.dumps(text, ensure_ascii=False)


def _type_of(value: str) -> str:
    named = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
    return named.get(value[0], "number")


def _read_python_call(parser: Parser) -> Reading[None]:
    """name(key=literal, ...)"""
    source = parser.source
    name = yield from _read_name(source)
    yield from source.expect("(")
    parser.start_call(name)
    parser.write_arguments("{")
    yield from source.spaces()
    first = True
    while not (yield from source.skip(")")):
        if not first:
            yield from source.expect(",")
            yield from source.spaces()
        key = yield from _read_name(source)
        yield from source.spaces()
        yield from source.expect("=")
        parser.write_arguments(("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        yield from source.spaces()
        yield from read_literal(source, parser.write_arguments)
        yield from source.spaces()
        first = False
    parser.write_arguments("}")
    parser.end_call()
