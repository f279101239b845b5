"""The keywords of JSON Schema: how far each is enforced, which only describe, how their values are checked, and misspelt ones."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from tinyvllm.errors import RequestError

MAX_OPTIONAL = 480  # properties that may be missing in one object: the parser follows four items for each, 2000 at most
MAX_MULTIPLE = 20_000  # an automaton with a state for each remainder: 10^5 take 0.2 s, 10^8 hang
MAX_ALTERNATIVES = 64  # that one minProperties, maxProperties or uniqueItems becomes

_INT_FORMATS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
NUMBER_FORMATS: dict[str, tuple[int, int]] = {
    name: (0, 2 ** int(name[4:]) - 1) if name[0] == "u" else (-(2 ** (int(name[3:]) - 1)), 2 ** (int(name[3:]) - 1) - 1)
    for name in sorted(_INT_FORMATS)
}
_OTHER_FORMATS = (  # of the specification and of OpenAPI: annotations, and no misspelling of the others
    "idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer",
    "regex", "float", "double", "byte", "binary", "password",
)  # fmt: skip

ENFORCED: dict[str, str] = {
    "type": "a name or a list of names; an integer has no point and no exponent",
    "enum": "numbers as the schema writes them; integers beyond 2^53 are refused",
    "const": "numbers as the schema writes them; integers beyond 2^53 are refused",
    "$ref": "within the schema: `#`, JSON pointers, anchors and `$id`s, recursive ones too; to draft 7 keywords next to it have no effect",
    "$dynamicRef": "where one `$dynamicAnchor` or `$anchor` has its name",
    "$recursiveRef": "where no `$recursiveAnchor` is true",
    "$defs": "what `$ref` finds",
    "definitions": "what `$ref` finds",
    "allOf": "",
    "anyOf": "",
    "oneOf": "alternatives that exclude each other, or each of which can be written without the others (see `not`)",
    "not": "what has an opposite in these keywords: not `pattern`, `format`, `multipleOf`, `items`, closed `additionalProperties`",
    "if": "what has an opposite (see `not`)",
    "then": "next to `if`",
    "else": "next to `if`",
    "properties": f"in the order in which the schema names them; at most {MAX_OPTIONAL} that are not `required`",
    "required": "",
    "additionalProperties": "a name may come twice",
    "patternProperties": "the patterns must exclude each other",
    "propertyNames": "`enum`, `const`, `pattern`, or `minLength` and `maxLength`",
    "minProperties": "0, 1, or no more than `required` names",
    "maxProperties": f"where all `properties` are required, or at most {MAX_ALTERNATIVES} choices of the others fit",
    "dependentRequired": "",
    "dependentSchemas": "",
    "dependencies": "",
    "unevaluatedProperties": "where what `properties` and `allOf` evaluate is known; else it forbids no less",
    "items": "a schema, or (to draft 2019-09) a list of them",
    "prefixItems": "",
    "additionalItems": "next to a list of `items`",
    "unevaluatedItems": "as `items`, without other keywords that evaluate items",
    "contains": "the first items are those that match",
    "minContains": "next to `contains`",
    "maxContains": "next to `contains`, where it has an opposite (see `not`)",
    "uniqueItems": f"items of an `enum`, in any order if they have at most {MAX_ALTERNATIVES} orders, else in the enum's; at most 6 values",
    "minItems": "",
    "maxItems": "",
    "minLength": "",
    "maxLength": "",
    "pattern": "without look-around (but `^(?=...)`), back references and word boundaries",
    "format": f"{', '.join(FORMATS)}: their spelling; int8 to int64 and uint8 to uint64: their bounds; any other is an annotation",
    "minimum": "",
    "maximum": "",
    "exclusiveMinimum": "",
    "exclusiveMaximum": "",
    "multipleOf": f"of {MAX_MULTIPLE} steps at most, several in one schema together; decimals as the step has them (0.50 for 0.25)",
}
ANNOTATIONS = (
    "$anchor", "$comment", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", "$vocabulary", "contentEncoding", "contentMediaType",
    "contentSchema", "default", "deprecated", "description", "examples", "id", "readOnly", "title", "writeOnly",
)  # fmt: skip
DIALECTS = ("draft-04", "draft-06", "draft-07", "draft/2019-09", "draft/2020-12")

CHILD_SCHEMAS = frozenset({
    "additionalProperties", "additionalItems", "items", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedProperties", "unevaluatedItems",
})  # fmt: skip
CHILD_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
CHILD_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})

_TYPES = {"array", "boolean", "integer", "null", "number", "object", "string"}
_COUNTS = ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength", "minContains", "maxContains")
_NUMBERS = ("minimum", "maximum", "multipleOf")


def wrong(path: str, expected: str, value: object) -> RequestError:
    """The error for a keyword: its place, what is expected, and what is there."""
    place = path if len(path) <= 200 else f"{path[:80]}...{path[-100:]}"
    return RequestError(f"structured_outputs: json: {place}: {expected}; got {' '.join(f'{value!r:.80}'.split())}")


def pointer(path: str, name: object) -> str:
    """A path with one more step, as a JSON pointer writes it."""
    return f"{path}/{str(name).replace('~', '~0').replace('/', '~1')}"


def misspelt_keyword(name: str) -> str | None:
    """The keyword that an unknown one is likely to mean, if it would be enforced; a misspelt annotation harms nothing.

    Names that begin with _, x- or other signs are chosen so, and no misspellings.
    """
    likely = _nearest(name, (*ENFORCED, *ANNOTATIONS))
    return likely if likely in ENFORCED and likely not in ("$defs", "definitions") else None


def misspelt_format(name: str) -> str | None:
    """The format that an unknown one is likely to mean, if it would be enforced."""
    likely = _nearest(name, (*FORMATS, *NUMBER_FORMATS, *_OTHER_FORMATS))
    return likely if likely not in _OTHER_FORMATS else None


def _nearest(name: str, known: tuple[str, ...]) -> str | None:
    """The known word that differs from `name` in case, - and _ only, by one letter from four letters on, or by two from nine on."""
    if not name[:1].isalpha() and name[:1] != "$" or len(name) > 40:
        return None
    plain = _plain(name)
    for word in known:
        if _plain(word) == plain:
            return word
    close = [(_distance(_plain(word), plain), not word.startswith(name), word) for word in known if _allowed(word, name)]
    distance, _, word = min(close, default=(1, True, ""))
    return word if word and distance <= _allowed(word, name) else None


def _allowed(word: str, name: str) -> int:
    """By how many letters a misspelt form of `word` may differ; 0 if `name` cannot be one."""
    allowed = 0 if len(word) < 4 or word[0].lower() != name[0].lower() else 1 if len(word) < 9 else 2
    return allowed if abs(len(word) - len(name)) <= allowed else 0


def _plain(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "")


def _distance(a: str, b: str) -> int:
    """How many letters must be added, left out, replaced or swapped with the next to get from a to b."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        two_before, before = before, row
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[-1] = min(row[-1], two_before[j - 2] + 1)
    return row[-1]


def check_values(path: str, part: dict[str, Any]) -> None:
    """RequestError for a keyword with a value that it cannot have; schemas inside are not looked at."""
    for keyword, value in part.items():
        check_value(pointer(path, keyword), keyword, value)


def check_value(path: str, keyword: str, value: Any) -> None:
    """RequestError for a value that the keyword cannot have."""
    if (check := _VALUES.get(keyword)) is not None:
        check(path, value)


def expect(path: str, value: Any, kind: type, expected: str) -> Any:
    """The value, if it is of this type; else RequestError."""
    if not isinstance(value, kind):
        raise wrong(path, f"{expected} is expected", value)
    return value


def _check_type(path: str, value: Any) -> None:
    names = value if isinstance(value, list) else [value]
    if not names or any(not isinstance(name, str) or name not in _TYPES for name in names):
        raise wrong(path, f"type must be one or several of {', '.join(sorted(_TYPES))}", value)


def _check_count(path: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise wrong(path, "a count must be an integer of 0 or more", value)


def _check_number(path: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (path.endswith("/multipleOf") and value <= 0):
        raise wrong(path, "a number is expected (above 0 for multipleOf)", value)


def _check_bound(path: str, value: Any) -> None:
    if not isinstance(value, bool):  # true and false are draft 4's
        _check_number(path, value)


def _check_names(path: str, value: Any) -> None:
    if any(not isinstance(name, str) for name in expect(path, value, list, "a list of names")):
        raise wrong(path, "a list of names is expected", value)


def _check_enum(path: str, value: Any) -> None:
    if not expect(path, value, list, "a list of values"):
        raise wrong(path, "enum must name at least one value", value)


def _check_text(path: str, value: Any) -> None:
    expect(path, value, str, "a text")


def _check_list(path: str, value: Any) -> None:
    expect(path, value, list, "a list of schemas")


def _check_map(path: str, value: Any) -> None:
    expect(path, value, dict, "an object of schemas")


def _check_truth(path: str, value: Any) -> None:
    expect(path, value, bool, "true or false")


_VALUES = {
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _check_list),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas", "dependentRequired", "dependencies"), _check_map),
    "uniqueItems": _check_truth,
    "type": _check_type,
    "required": _check_names,
    "enum": _check_enum,
    "format": _check_text,
    "pattern": _check_text,
    "exclusiveMinimum": _check_bound,
    "exclusiveMaximum": _check_bound,
} | dict.fromkeys(_COUNTS, _check_count) | dict.fromkeys(_NUMBERS, _check_number)  # fmt: skip


def common_multiple(a: Decimal, b: Decimal) -> Decimal:
    """The least number that both divide, of decimal fractions."""
    exponent = min(_exponent(a), _exponent(b))
    if max(a.adjusted(), b.adjusted()) - exponent > 18:  # beyond any use, and the powers would be costly
        return Decimal(10**18 + 1)
    scale = Decimal(10) ** -exponent
    return Decimal(math.lcm(int(a * scale), int(b * scale))) / scale


def automaton_states(step: Decimal) -> int:
    """How many remainders must be distinguished: factors of ten only append zeros."""
    return int("".join(map(str, step.normalize().as_tuple().digits)))


def _exponent(a: Decimal) -> int:
    exponent = a.normalize().as_tuple().exponent
    assert isinstance(exponent, int)
    return exponent
