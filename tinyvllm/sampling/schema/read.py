"""A client's JSON schema: parsed, bounded, rewritten, and as the text that the grammar reads."""

from __future__ import annotations

import json
import re
from typing import Any

from tinyvllm.errors import RequestError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.sampling.schema.rewrite import Rewriter

MAX_CHARS = 256 * 1024  # characters of a schema as compact JSON
_MAX_REWRITTEN = 4 * MAX_CHARS  # of the rewritten one: opposites repeat parts of it
_MAX_NODES = 200_000

_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # written as \u and a number
_MAPS = ("properties", "patternProperties")


@dataclass(frozen=True)
class ReadSchema:
    """What the grammar gets, and what it does not hold.

    text     the rewritten schema as compact JSON
    named    whether it names properties. Then its grammar must not write letters as \\u0061: a name spelled so would differ from the
             schema's and escape its constraints
    ignored  JSON pointers of keywords without effect: unknown ones and formats, and in a lenient reading those that cannot be enforced
    """

    text: str
    named: bool
    ignored: tuple[str, ...]


def read_schema(schema: str | dict[str, Any], lenient: bool = False) -> ReadSchema:
    """Read a schema. RequestError names the keyword that cannot be enforced and its path; lenient: leave it out instead."""
    text, parsed = _parsed(schema)
    if len(text) > MAX_CHARS:
        raise RequestError(f"structured_outputs: json: the schema has {len(text)} characters, at most {MAX_CHARS} are read: cut it down")
    rewriter = Rewriter(parsed, lenient)
    try:
        document = rewriter.document()
    except RecursionError:
        raise _too_deep() from None
    if document is False:
        raise RequestError("structured_outputs: json: #: the schema allows nothing: false, or a `not` of everything")
    document = {} if document is True else document
    named = _check_writable(document)
    try:
        rewritten = json.dumps(document, separators=(",", ":"))
    except RecursionError:
        raise _too_deep() from None
    if len(rewritten) > _MAX_REWRITTEN:
        raise _too_large(len(rewritten))
    return ReadSchema(rewritten, named, tuple(rewriter.ignored))


def refuse_constant(name: str) -> None:
    """For json's `parse_constant`: Python would read NaN and Infinity."""
    raise ValueError(f"{name} is no number of JSON")


def _parsed(schema: str | dict[str, Any]) -> tuple[str, Any]:
    try:
        parsed = json.loads(schema, parse_constant=refuse_constant) if isinstance(schema, str) else schema
        text = json.dumps(parsed, allow_nan=False, separators=(",", ":"))
        text.encode("utf-8")
        return text, json.loads(text)  # keys of a dict that are no strings are strings by now
    except RecursionError:
        raise _too_deep() from None
    except (TypeError, ValueError) as error:  # JSONDecodeError and UnicodeError are ValueErrors
        raise RequestError(f"structured_outputs: json: not JSON: {str(error):.200}") from None


def _check_writable(document: Any) -> bool:
    """Whether properties are named anywhere; RequestError for constants that cannot be written then. Counts the document, too."""
    named, unwritable, nodes = False, False, 0
    stack = [document]
    while stack:
        one = stack.pop()
        nodes += 1
        if nodes > _MAX_NODES:
            raise _too_large(nodes)
        if isinstance(one, dict):
            named = named or any(one.get(keyword) for keyword in _MAPS)
            unwritable = unwritable or any(_has_control(one[keyword]) for keyword in ("const", "enum") if keyword in one)
            stack += one.values()
        elif isinstance(one, list):
            stack += one
    if named and unwritable:
        raise RequestError("structured_outputs: json: control characters of const and enum cannot be written where properties are named")
    return named


def _has_control(value: object) -> bool:
    """Whether a text in a value has characters that JSON can only write as \\u."""
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, str) and _CONTROL.search(one):
            return True
        if isinstance(one, dict):
            stack += [*one, *one.values()]
        elif isinstance(one, list):
            stack += one
    return False


def _too_deep() -> RequestError:
    return RequestError("structured_outputs: json: the schema is nested too deeply: flatten it with $defs")


def _too_large(size: int) -> RequestError:
    return RequestError(f"structured_outputs: json: the schema is too large once not, if and oneOf are written out ({size}): cut it down")
