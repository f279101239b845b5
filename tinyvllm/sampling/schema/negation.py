"""The opposite of a rewritten schema, in the same keywords: the instances that it refuses.

A schema holds where each of its keywords holds, so its opposite is any of: of another type, a bound that is exceeded, a property that is
missing, and so on. Some keywords have no opposite that the grammar could enforce; then there is none for the schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from typing import Any

from tinyvllm.sampling.schema.apart import Comparison, type_of
from tinyvllm.sampling.schema.patterns import none_of

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_MAX_VALUES = 64  # of an enum
_MAX_DEPTH = 24
_NO_EFFECT = frozenset({"then", "else", "$defs"})

Schema = dict[str, Any] | bool
Options = list[Schema] | None  # alternatives; None: there is no opposite


class Negation:
    """Opposites in one document. inexact: ids of rewritten schemas that allow more or less than what they were written for."""

    def __init__(self, definitions: Mapping[str, Any], comparison: Comparison, inexact: Set[int]):
        self._definitions, self._comparison, self._inexact = definitions, comparison, inexact

    def opposite(self, schema: Any, depth: int = 0) -> Schema | None:
        """A schema of all that `schema` refuses; None if it cannot be said."""
        if isinstance(schema, bool):
            return not schema
        if depth > _MAX_DEPTH or id(schema) in self._inexact or not isinstance(schema, dict) or not self._comparison.step():
            return None
        options: list[Schema] = []
        for keyword in schema:
            found = self._violations(keyword, schema, depth)
            if found is None:
                return None
            options += found
        return any_of(options)

    def _violations(self, keyword: str, schema: dict[str, Any], depth: int) -> Options:
        """Alternatives of how an instance can violate one keyword."""
        value = schema[keyword]
        if keyword in _SIMPLE:
            return [_SIMPLE[keyword](value)]
        if keyword == "type":
            return _other_types(value)
        if keyword in ("const", "enum"):
            return _other_values([value] if keyword == "const" else value)
        if keyword == "required":
            return [{"type": "object", "properties": {name: False}} for name in value]
        if keyword == "$ref":
            target = self.opposite(self._definitions.get(value), depth + 1)
            return None if target is None else [target]
        if keyword in ("allOf", "anyOf"):
            return self._violations_of_list(keyword, value, depth)
        if keyword == "properties":
            return self._violations_of_properties(value, depth)
        if keyword == "prefixItems":
            return self._violations_of_items(value, depth)
        if keyword in ("additionalProperties", "items", "patternProperties"):
            schemas = value.values() if keyword == "patternProperties" else [value]
            return [] if all(one is True or one == {} for one in schemas) else None
        return [] if keyword in _NO_EFFECT or (keyword in ("minItems", "minLength", "minProperties") and value == 0) else None

    def _violations_of_list(self, keyword: str, value: list[Any], depth: int) -> Options:
        opposites: list[Schema] = []
        for one in value:
            found = self.opposite(one, depth + 1)
            if found is None:
                return None
            opposites.append(found)
        return opposites if keyword == "allOf" else [all_of(opposites)]

    def _violations_of_properties(self, value: dict[str, Any], depth: int) -> Options:
        options: list[Schema] = []
        for name, one in value.items():
            found = self.opposite(one, depth + 1)
            if found is None:
                return None
            if found is not False:
                options.append({"type": "object", "properties": {name: found}, "required": [name]})
        return options

    def _violations_of_items(self, value: list[Any], depth: int) -> Options:
        options: list[Schema] = []
        for i, one in enumerate(value):
            found = self.opposite(one, depth + 1)
            if found is None:
                return None
            if found is not False:
                options.append({"type": "array", "prefixItems": [*[True] * i, found], "minItems": i + 1})
        return options


def any_of(options: list[Schema]) -> Schema:
    """A schema of the instances of any of these."""
    options = [one for one in options if one is not False]
    if True in options or {} in options:
        return True
    return options[0] if len(options) == 1 else {"anyOf": options} if options else False


def all_of(schemas: list[Schema]) -> Schema:
    """A schema of the instances of all of these."""
    if False in schemas:
        return False
    schemas = [one for one in schemas if one is not True and one != {}]
    return schemas[0] if len(schemas) == 1 else {"allOf": schemas} if schemas else True


def _at_most(keyword: str, kind: str, limit: int) -> Schema:
    return False if limit < 0 else {"type": kind, keyword: limit}


_SIMPLE: dict[str, Callable[[Any], Schema]] = {
    "minimum": lambda v: {"type": "number", "exclusiveMaximum": v},
    "maximum": lambda v: {"type": "number", "exclusiveMinimum": v},
    "exclusiveMinimum": lambda v: {"type": "number", "maximum": v},
    "exclusiveMaximum": lambda v: {"type": "number", "minimum": v},
    "minLength": lambda v: _at_most("maxLength", "string", v - 1),
    "maxLength": lambda v: {"type": "string", "minLength": v + 1},
    "minItems": lambda v: _at_most("maxItems", "array", v - 1),
    "maxItems": lambda v: {"type": "array", "minItems": v + 1},
    "minProperties": lambda v: {"type": "object", "maxProperties": 0} if v == 1 else _impossible_if_zero(v),
    "maxProperties": lambda v: {"type": "object", "minProperties": v + 1},
}


def _impossible_if_zero(count: int) -> Schema:
    return False if count == 0 else {"type": "object", "maxProperties": count - 1}


def _other_types(value: Any) -> Options:
    names = set(value if isinstance(value, list) else [value])
    if "integer" in names and "number" not in names:
        return None  # a number that must not be an integer cannot be said
    others = [name for name in _TYPES if name not in names]
    return [{"type": others}] if others else []


def _other_values(values: list[Any]) -> Options:
    """Alternatives for all values but these."""
    if len(values) > _MAX_VALUES:
        return None
    by_type: dict[str, list[Any]] = {}
    for value in values:
        kind = type_of(value)
        by_type.setdefault("number" if kind in ("integer", "fraction") else kind, []).append(value)
    options: list[Schema] = []
    if others := [name for name in _TYPES if name not in by_type]:
        options.append({"type": others})
    for kind, same in by_type.items():
        found = _OTHER_OF_TYPE[kind](same)
        if found is None:
            return None
        options += found
    return options


def _other_booleans(values: list[Any]) -> Options:
    return [{"const": one} for one in (True, False) if one not in values]


def _other_numbers(values: list[Any]) -> Options:
    edges = sorted(set(values))
    options: list[Schema] = [{"type": "number", "exclusiveMaximum": edges[0]}]
    options += [{"type": "number", "exclusiveMinimum": a, "exclusiveMaximum": b} for a, b in zip(edges, edges[1:], strict=False)]
    return [*options, {"type": "number", "exclusiveMinimum": edges[-1]}] if math.isfinite(edges[-1]) else None


def _other_strings(values: list[Any]) -> Options:
    pattern = none_of(values)
    return None if pattern is None else [{"type": "string", "pattern": pattern}]


def _other_containers(kind: str, keyword: str) -> Any:
    def others(values: list[Any]) -> Options:
        return [{"type": kind, keyword: 1}] if not any(values) else None  # only the empty one has an opposite

    return others


_OTHER_OF_TYPE = {
    "null": lambda values: [],
    "boolean": _other_booleans,
    "number": _other_numbers,
    "string": _other_strings,
    "array": _other_containers("array", "minItems"),
    "object": _other_containers("object", "minProperties"),
}
