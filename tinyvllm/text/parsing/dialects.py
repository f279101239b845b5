"""The readers of the dialects: each reads one call, or one list of them, and tells the parser what it finds.

A reader begins where a call may begin and raises NotThisError where there is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from tinyvllm.text.parsing.json_text import read_string, read_value, text_of
from tinyvllm.text.parsing.pythonic import read_literal
from tinyvllm.text.parsing.source import NotThisError, Reading, Source, Write
from tinyvllm.text.parsing.tools import Tool

if TYPE_CHECKING:
    from tinyvllm.text.parsing.formats import Format

_NAME = re.compile(r"[\w.\-]*")
_LONGEST_NAME = 256  # characters; what is longer is no name, and need not be waited for
_CALL_ID = re.compile(r"[A-Za-z0-9]*")


class Parser(Protocol):
    """What a reader sees of the StreamParser."""

    source: Source
    format: Format
    calls: int

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
    if parser.calls and (yield from source.passes(";")):
        yield from source.spaces()
    if (yield from source.passes("<|python_tag|>")):
        yield from source.spaces()
    yield from _read_object(parser)


def read_mistral(parser: Parser) -> Reading[None]:
    source = parser.source
    yield from source.expect("[TOOL_CALLS]")
    yield from source.spaces()
    if (yield from source.passes("[")):
        yield from _read_list(parser, lambda: _read_object(parser))
        return
    name = yield from _read_name(source)
    if (yield from source.passes("[CALL_ID]")):
        yield from source.match(_CALL_ID)
    yield from source.passes("[ARGS]")
    yield from source.spaces()
    if (yield from source.peek()) != "{":
        raise NotThisError
    parser.start_call(name)
    yield from read_value(source, parser.write_arguments)
    parser.end_call()


def read_pythonic(parser: Parser) -> Reading[None]:
    source, closing = parser.source, parser.format.closing
    yield from source.spaces()
    for mark in parser.format.marks:
        if (yield from source.passes(mark)):
            yield from source.spaces()
    yield from source.expect("[")
    yield from _read_list(parser, lambda: _read_python_call(parser))
    if closing:
        yield from _optional(parser, closing)


def read_qwen_xml(parser: Parser) -> Reading[None]:
    source = parser.source
    wrapped = yield from source.passes("<tool_call>")  # Qwen3-Coder forgets it now and then
    if wrapped:
        yield from source.spaces()
    yield from source.expect("<function=")
    tool = parser.start_call((yield from _read_up_to(source, ">")))
    parser.write_arguments("{")
    first = True
    yield from source.spaces()
    while not (yield from source.passes("</function>")):
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
    """Read `mark` and the spaces before it, if the text goes on so: a call is whole without it, as where a stop string has cut it."""

    def closing() -> Reading[None]:
        yield from parser.source.spaces()
        yield from parser.source.expect(mark)

    yield from parser.attempt(closing)


def _read_list(parser: Parser, read: Callable[[], Reading[None]]) -> Reading[None]:
    """Calls up to "]", the "[" having been read. Those that were whole count, whatever follows."""

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
    """A call as a JSON object with a name and arguments (or parameters), in any order; what else it holds is passed over."""
    source = parser.source
    name: str | None = None
    early: list[str] | None = None  # arguments that came before the name
    done = False
    yield from source.expect("{")
    while True:
        key = yield from _read_key(source)
        if key == "name" and name is None:
            name = yield from _read_text(source)
            if early is not None:
                done = _give(parser, name, early)
        elif key in ("arguments", "parameters") and not done and early is None:
            if name is None:
                early = []
                yield from _read_arguments(source, early.append)
            else:
                yield from _read_given(parser, name)
                done = True
        else:
            yield from read_value(source, _nowhere)
        yield from source.spaces()
        if (yield from source.passes("}")):
            break
        yield from source.expect(",")
        yield from source.spaces()
    if name is None:
        raise NotThisError
    if not done:
        _give(parser, name, ["{}"])
    parser.end_call()


def _give(parser: Parser, name: str, arguments: list[str]) -> bool:
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


def _read_given(parser: Parser, name: str) -> Reading[None]:
    """Arguments of a call that is certain once they open."""
    yield from parser.source.spaces()
    if (yield from parser.source.peek()) == "{":
        parser.start_call(name)
        yield from read_value(parser.source, parser.write_arguments)
    else:
        pieces: list[str] = []
        yield from _read_arguments(parser.source, pieces.append)
        _give(parser, name, pieces)


def _read_arguments(source: Source, write: Write) -> Reading[None]:
    """An object, or a text that holds one as JSON."""
    yield from source.spaces()
    if (yield from source.peek()) == "{":
        yield from read_value(source, write)
        return
    inner = Source()
    inner.text, inner.ended = (yield from _read_text(source)), True
    if not inner.text.lstrip().startswith("{"):
        raise NotThisError
    yield from read_value(inner, write)
    if inner.text[inner.at :].strip():
        raise NotThisError


def _nowhere(text: str) -> None:
    """For what is read only to be passed."""


def _read_name(source: Source) -> Reading[str]:
    name = yield from source.match(_NAME)
    if not 0 < len(name) <= _LONGEST_NAME:
        raise NotThisError
    return name


def _read_up_to(source: Source, end: str) -> Reading[str]:
    """A name and the character behind it."""
    while True:
        found = source.text.find(end, source.at)
        text = source.text[source.at : found if found >= 0 else None]
        if "\n" in text or "<" in text or len(text) > _LONGEST_NAME or (found < 0 and source.ended):
            raise NotThisError
        if found >= 0:
            source.at = found + len(end)
            return text.strip().strip("\"'")
        yield


def _read_xml_value(parser: Parser, types: frozenset[str]) -> Reading[None]:
    """What stands between <parameter=...> and </parameter>: text where the schema wants text or says nothing, else JSON if it is."""

    def spell(text: str) -> None:
        parser.write_arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    yield from parser.source.passes("\n")
    if types <= {"string"}:
        parser.write_arguments('"')
        yield from parser.source.until("</parameter>", spell, "\n")
        parser.write_arguments('"')
        return
    pieces: list[str] = []
    yield from parser.source.until("</parameter>", pieces.append, "\n")
    parser.write_arguments(_converted("".join(pieces), types))


def _converted(text: str, types: frozenset[str]) -> str:
    """JSON text of what was written: as a value of one of `types`, and where it is none of them as text."""
    spelled = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    pieces: list[str] = []
    source = Source()
    source.text, source.ended = spelled, True
    try:
        for _ in read_value(source, pieces.append):
            pass
        value = "".join(pieces)
        if not source.text[source.at :].strip() and _type_of(value) in types:
            return value
    except NotThisError:
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
    while not (yield from source.passes(")")):
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
