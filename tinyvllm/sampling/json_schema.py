"""Which keywords of JSON Schema (drafts 4 to 2020-12) hold the output, which only describe, and which are refused by name.

llguidance's grammar enforces its keywords, ignores those that it has never heard of, and takes some values that make it slow
or that it reads otherwise than the specification. So every keyword that can be reached is looked at here first. docs/structured.md has
the table.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from tinyvllm.errors import RequestError

MAX_CHARS = 256 * 1024  # characters of a schema as compact JSON
MOST_OPTIONAL = 480  # properties that may be missing in one object: the parser follows four items for each, 2000 at most
_LARGEST_MULTIPLE = 20_000  # an automaton with a state for each remainder: 10^5 take 0.2 s, 10^8 hang

ENFORCED: dict[str, str] = {
    "type": "a name or a list of names; an integer has no point and no exponent",
    "enum": "numbers as the schema writes them",
    "const": "numbers as the schema writes them",
    "$ref": "`#` and JSON pointers into the same schema (`#/$defs/...`), recursive ones too",
    "$defs": "what `$ref` finds",
    "definitions": "what `$ref` finds",
    "allOf": "",
    "anyOf": "",
    "oneOf": "where the alternatives exclude each other for all to see (by types, constants, required constants); else refused",
    "properties": f"in the order in which the schema names them; at most {MOST_OPTIONAL} that are not `required`",
    "required": "",
    "additionalProperties": "a name may come twice",
    "patternProperties": "the patterns must exclude each other",
    "minProperties": "0, 1, or no more than `required` names",
    "maxProperties": "where everything in `properties` is required, or 0 or 1",
    "items": "a schema, or (to draft 2019-09) a list of them",
    "prefixItems": "",
    "additionalItems": "next to a list of `items`",
    "minItems": "",
    "maxItems": "",
    "minLength": "",
    "maxLength": "",
    "pattern": "without look-around, back references and word boundaries",
    "format": "",  # filled in below
    "minimum": "",
    "maximum": "",
    "exclusiveMinimum": "",
    "exclusiveMaximum": "",
    "multipleOf": f"of {_LARGEST_MULTIPLE} steps at most, several in one schema together; decimals as the step has them (0.50 for 0.25)",
}
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
ENFORCED["format"] = f"{', '.join(FORMATS)}: their spelling; any other is refused"
ANNOTATIONS = (
    "$anchor", "$comment", "$id", "$schema", "$vocabulary", "contentEncoding", "contentMediaType",
    "contentSchema", "default", "deprecated", "description", "examples", "id", "readOnly", "title", "writeOnly",
)  # fmt: skip
REFUSED = (
    "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "contains", "dependencies", "dependentRequired",
    "dependentSchemas", "else", "if", "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems",
    "unevaluatedProperties", "uniqueItems",
)  # fmt: skip
DIALECTS = ("draft-04", "draft-06", "draft-07", "draft/2019-09", "draft/2020-12")

_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # written as \u and a number
_SCHEMAS = ("additionalProperties", "additionalItems", "items")  # keywords whose value is a schema
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")  # a list of schemas
_MAPS = ("properties", "patternProperties")  # schemas by name
_TYPES = {"array", "boolean", "integer", "null", "number", "object", "string"}
_COUNTS = ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength")
_NUMBERS = ("minimum", "maximum", "multipleOf")


def read_schema(schema: str | dict[str, Any]) -> tuple[str, bool]:
    """(the schema as compact JSON, whether it names properties), once everything in it is known to be enforced.

    RequestError names the keyword and its path. A grammar for a schema that names properties must not write letters as \\u0061: a
    name spelled so would differ from the schema's and escape its constraints. Then nothing can have control characters.
    """
    text, parsed = _parsed(schema)
    if len(text) > MAX_CHARS:
        raise RequestError(f"structured_outputs: json: the schema has {len(text)} characters, at most {MAX_CHARS} are read: cut it down")
    named = check(parsed)
    return "{}" if parsed is True else text, named


def check(schema: object) -> bool:
    """RequestError for the first keyword, of those that can be reached from the root, that could not be enforced.

    Whether properties are named anywhere.
    """
    steps, named, unwritable = Decimal(1), False, ""
    for path, part in _reachable(schema):
        if part is True or (part is False and path != "#"):
            continue
        if not isinstance(part, dict):
            raise _wrong(path, "a schema must be an object (or true; and false, but not for all of it)", part)
        for keyword, value in part.items():
            _check_keyword(f"{path}/{keyword}", keyword, value, part, nested=path != "#")
        named = named or any(part.get(keyword) for keyword in _MAPS)
        unwritable = unwritable or next((f"{path}/{k}" for k in ("const", "enum") if k in part and _has_control(part[k])), "")
        if "multipleOf" in part:
            steps = _common_multiple(steps, Decimal(repr(part["multipleOf"])))
            if _automaton_states(steps) > _LARGEST_MULTIPLE:
                what = f"multipleOf, with the others of this schema, makes numbers of {_automaton_states(steps)} remainders"
                raise _wrong(f"{path}/multipleOf", f"{what}, at most {_LARGEST_MULTIPLE} are counted", part["multipleOf"])
    if named and unwritable:
        raise RequestError(f"structured_outputs: json: {unwritable}: control characters cannot be written where properties are named")
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


def _parsed(schema: str | dict[str, Any]) -> tuple[str, Any]:
    try:
        parsed = json.loads(schema, parse_constant=refuse_constant) if isinstance(schema, str) else schema
        text = json.dumps(parsed, allow_nan=False, separators=(",", ":"))
        text.encode("utf-8")
        return text, json.loads(text)  # keys of a dict that are no strings are strings by now
    except RecursionError:
        raise RequestError("structured_outputs: json: the schema is nested too deeply: flatten it with $defs") from None
    except (TypeError, ValueError) as error:  # JSONDecodeError and UnicodeError are ValueErrors
        raise RequestError(f"structured_outputs: json: not JSON: {error}") from None


def refuse_constant(name: str) -> None:
    """For json's `parse_constant`: Python would read NaN and Infinity."""
    raise ValueError(f"{name} is no number of JSON")


def _reachable(root: object) -> Iterator[tuple[str, object]]:
    """Every schema that applies to some part of an output, once, with the JSON pointer by which it was found first."""
    stack, seen = [("#", root)], set[int]()
    while stack:
        path, part = stack.pop()
        if isinstance(part, dict):
            if id(part) in seen:
                continue
            seen.add(id(part))
        yield path, part
        if isinstance(part, dict):
            stack += _children(path, part, root)


def _children(path: str, part: dict[str, Any], root: object) -> Iterator[tuple[str, object]]:
    for keyword, value in part.items():
        here = f"{path}/{_escaped(keyword)}"
        if keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
            yield from ((f"{here}/{i}", one) for i, one in enumerate(_expect(here, value, list, "a list of schemas")))
        elif keyword in _MAPS:
            named = _expect(here, value, dict, "an object of schemas")
            yield from ((f"{here}/{_escaped(name)}", one) for name, one in named.items())
        elif keyword in _SCHEMAS:
            yield here, value
        elif keyword == "$ref":
            yield _target(here, value, root)


def _target(path: str, reference: object, root: object) -> tuple[str, object]:
    """Where a $ref leads: (its pointer, the schema)."""
    if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
        raise _wrong(path, "$ref must be # or a JSON pointer into the same schema, such as #/$defs/name", reference)
    found: Any = root
    for name in reference[2:].split("/") if reference != "#" else ():
        name = _percent_decoded(name).replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(name)] if isinstance(found, list) else found[name]
        except (KeyError, IndexError, TypeError, ValueError):
            raise _wrong(path, "$ref leads nowhere in this schema", reference) from None
    return reference, found


def _percent_decoded(name: str) -> str:
    from urllib.parse import unquote

    return unquote(name)


def _check_keyword(path: str, keyword: str, value: Any, part: dict[str, Any], nested: bool) -> None:
    """RequestError unless the keyword is known, is enforced with this value, or needs no enforcement."""
    if keyword in REFUSED:
        raise _wrong(path, f"the keyword {keyword} is not supported, and is not ignored either: leave it out or say it otherwise", value)
    if keyword in ANNOTATIONS:
        if keyword in ("$id", "id") and nested:
            raise _wrong(path, f"{keyword} is supported at the root only, as it changes what $ref means", value)
        if keyword == "$schema" and not any(dialect in str(value) for dialect in DIALECTS):
            raise _wrong(path, f"$schema must name one of {', '.join(DIALECTS)}", value)
        return
    if keyword not in ENFORCED:
        raise _wrong(path, f"the keyword {keyword} is unknown, and nothing is silently ignored: leave it out", value)
    check_value = _VALUES.get(keyword)
    if check_value is not None:
        check_value(path, value)
    if keyword == "properties" and len(_expect(path, value, dict, "an object of schemas")) - _required(part) > MOST_OPTIONAL:
        raise _wrong(path, f"at most {MOST_OPTIONAL} properties may be optional", f"{len(value)} with {_required(part)} required")
    if keyword == "minProperties" and value > 1 and value > _required(part):
        expected = "minProperties above 1 is supported up to the number of required names, as the others may repeat a name"
        raise _wrong(path, expected, value)


def _required(part: dict[str, Any]) -> int:
    names = part.get("required")
    return len(set(map(str, names))) if isinstance(names, list) else 0


def _check_type(path: str, value: Any) -> None:
    names = value if isinstance(value, list) else [value]
    if not names or any(not isinstance(name, str) or name not in _TYPES for name in names):
        raise _wrong(path, f"type must be one or several of {', '.join(sorted(_TYPES))}", value)


def _check_count(path: str, value: Any) -> None:
    if type(value) is not int or value < 0:
        raise _wrong(path, "a count must be an integer of 0 or more", value)


def _check_number(path: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (path.endswith("/multipleOf") and value <= 0):
        raise _wrong(path, "a number is expected (above 0 for multipleOf)", value)


def _check_bound(path: str, value: Any) -> None:
    if not isinstance(value, bool):  # true and false are draft 4's
        _check_number(path, value)


def _check_names(path: str, value: Any) -> None:
    if any(not isinstance(name, str) for name in _expect(path, value, list, "a list of names")):
        raise _wrong(path, "a list of names is expected", value)


def _check_enum(path: str, value: Any) -> None:
    if not _expect(path, value, list, "a list of values"):
        raise _wrong(path, "enum must name at least one value", value)


def _check_format(path: str, value: Any) -> None:
    if value not in FORMATS:
        raise _wrong(path, f"the format is not supported; known are {', '.join(FORMATS)}", value)


def _check_text(path: str, value: Any) -> None:
    _expect(path, value, str, "a text")


_VALUES = {
    "type": _check_type,
    "required": _check_names,
    "enum": _check_enum,
    "format": _check_format,
    "pattern": _check_text,
    "exclusiveMinimum": _check_bound,
    "exclusiveMaximum": _check_bound,
} | dict.fromkeys(_COUNTS, _check_count) | dict.fromkeys(_NUMBERS, _check_number)  # fmt: skip


def _common_multiple(a: Decimal, b: Decimal) -> Decimal:
    """The least number that both divide, of decimal fractions."""
    exponent = min(_exponent(a), _exponent(b))
    if max(a.adjusted(), b.adjusted()) - exponent > 18:  # beyond any use, and the powers would be costly
        return Decimal(10**18 + 1)
    scale = Decimal(10) ** -exponent
    return Decimal(math.lcm(int(a * scale), int(b * scale))) / scale


def _exponent(a: Decimal) -> int:
    exponent = a.normalize().as_tuple().exponent
    assert isinstance(exponent, int)
    return exponent


def _automaton_states(step: Decimal) -> int:
    """How many remainders must be distinguished: factors of ten only append zeros."""
    return int("".join(map(str, step.normalize().as_tuple().digits)))


def _expect(path: str, value: Any, kind: type, expected: str) -> Any:
    if not isinstance(value, kind):
        raise _wrong(path, f"{expected} is expected", value)
    return value


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _wrong(path: str, expected: str, value: object) -> RequestError:
    return RequestError(f"structured_outputs: json: {path:.200}: {expected}; got {' '.join(f'{value!r:.80}'.split())}")
