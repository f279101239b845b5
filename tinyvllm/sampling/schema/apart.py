"""Whether two rewritten schemas can be seen to have no instance in common, and whether one refuses a value.

Both answers are proofs: False means "not proven". The work for one schema is bounded by a budget of steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_STEPS = 60_000  # comparisons for one whole schema, about a quarter of a second
_MAX_DEPTH = 12  # levels of references and alternatives that a proof follows

_ALL_TYPES = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
_ATOMS = {"number": frozenset({"integer", "fraction"})}
_NOTHING: dict[str, Any] = {"enum": []}


class Comparison:
    """Compares the schemas of one document. definitions: rewritten schemas by the reference that leads to them."""

    def __init__(self, definitions: Mapping[str, Any]):
        self._definitions = definitions
        self._steps = 0

    def step(self) -> bool:
        """Count one step of work; False when the budget is used up."""
        self._steps += 1
        return self._steps < MAX_STEPS

    @property
    def exhausted(self) -> bool:
        """Whether the budget is used up, so that nothing more can be proven."""
        return self._steps >= MAX_STEPS

    def parts(self, schema: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
        """The schemas that all hold for an instance of `schema`: itself, the members of allOf, and targets of references."""
        if schema is False:
            yield _NOTHING
        if not isinstance(schema, dict) or depth > _MAX_DEPTH or not self.step():
            return
        yield schema
        for member in schema.get("allOf", ()):
            yield from self.parts(member, depth + 1)
        if "$ref" in schema:
            yield from self.parts(self._definitions.get(schema["$ref"]), depth + 1)

    def values(self, schema: Any) -> list[Any] | None:
        """The values of a schema that allows a list of them only."""
        for part in self.parts(schema):
            if "const" in part:
                return [part["const"]]
            if "enum" in part:
                return list(part["enum"])
        return None

    def types(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """The types that instances can have; numbers are "integer" or "fraction"."""
        found = _ALL_TYPES
        for part in self.parts(schema, depth):
            if "type" in part:
                names = part["type"] if isinstance(part["type"], list) else [part["type"]]
                found &= frozenset().union(*(_ATOMS.get(name, {name}) for name in names))
            if "const" in part or "enum" in part:
                found &= frozenset(type_of(value) for value in ([part["const"]] if "const" in part else part["enum"]))
            if "anyOf" in part and depth < _MAX_DEPTH:
                found &= frozenset().union(*(self.types(one, depth + 1) for one in part["anyOf"]))
        return found

    def apart(self, a: Any, b: Any, depth: int = 0) -> bool:
        """Whether it is proven that no instance satisfies both."""
        if depth > _MAX_DEPTH or not self.step():
            return False
        shared = self.types(a) & self.types(b)
        if not shared:
            return True
        if (values := self.values(a)) is not None:
            return all(self.refuses(b, value) for value in values)
        if (values := self.values(b)) is not None:
            return all(self.refuses(a, value) for value in values)
        parts_a, parts_b = list(self.parts(a)), list(self.parts(b))
        for parts, other in ((parts_a, b), (parts_b, a)):
            if any("anyOf" in part and all(self.apart(one, other, depth + 1) for one in part["anyOf"]) for part in parts):
                return True
        return all(self._apart_as(kind, parts_a, parts_b, depth) for kind in shared)

    def _apart_as(self, kind: str, a: list[dict[str, Any]], b: list[dict[str, Any]], depth: int) -> bool:
        """Whether no instance of this type satisfies all of both lists."""
        if kind in ("integer", "fraction"):
            low, low_open = _lower(a + b)
            high, high_open = _upper(a + b)
            return low > high or (low == high and (low_open or high_open))
        if kind == "string":
            return _largest(a + b, "minLength") > _least(a + b, "maxLength")
        if kind == "array":
            return self._arrays_apart(a, b, depth)
        return kind == "object" and self._objects_apart(a, b, depth)

    def _arrays_apart(self, a: list[dict[str, Any]], b: list[dict[str, Any]], depth: int) -> bool:
        shortest = _largest(a + b, "minItems")
        if shortest > _least(a + b, "maxItems"):
            return True
        first = range(int(min(shortest, 8)))
        return any(self.apart(x, y, depth + 1) for i in first for x in _items(a, i) for y in _items(b, i))

    def _objects_apart(self, a: list[dict[str, Any]], b: list[dict[str, Any]], depth: int) -> bool:
        required = dict.fromkeys(name for part in a + b for name in part.get("required", ()))
        if len(required) > _least(a + b, "maxProperties"):
            return True
        for name in required:
            ours, theirs = _properties(a, name), _properties(b, name)
            if False in ours or False in theirs or any(self.apart(x, y, depth + 1) for x in ours for y in theirs):
                return True
        return False

    def refuses(self, schema: Any, value: Any, depth: int = 0) -> bool:
        """Whether it is proven that a value is no instance of a schema."""
        if depth > _MAX_DEPTH or not self.step():
            return False
        return any(self._part_refuses(part, value, depth) for part in self.parts(schema, depth))

    def _part_refuses(self, part: dict[str, Any], value: Any, depth: int) -> bool:
        kind = type_of(value)
        if "type" in part and kind not in self.types({"type": part["type"]}):
            return True
        if ("const" in part and not equal(part["const"], value)) or ("enum" in part and not any(equal(v, value) for v in part["enum"])):
            return True
        if "anyOf" in part and all(self.refuses(one, value, depth + 1) for one in part["anyOf"]):
            return True
        if kind in ("integer", "fraction"):
            (low, low_open), (high, high_open) = _lower([part]), _upper([part])
            return not low <= value <= high or (value == low and low_open) or (value == high and high_open)
        if kind == "string":
            return not part.get("minLength", 0) <= len(value) <= part.get("maxLength", float("inf"))
        if kind == "array":
            short = not part.get("minItems", 0) <= len(value) <= part.get("maxItems", float("inf"))
            return short or any(self.refuses(item, one, depth + 1) for i, one in enumerate(value) for item in _items([part], i))
        return kind == "object" and self._refuses_object(part, value, depth)

    def _refuses_object(self, part: dict[str, Any], value: dict[str, Any], depth: int) -> bool:
        if any(name not in value for name in part.get("required", ())) or not (
            part.get("minProperties", 0) <= len(value) <= part.get("maxProperties", float("inf"))
        ):
            return True
        return any(self.refuses(schema, one, depth + 1) for name, one in value.items() for schema in _properties([part], name))


def type_of(value: Any) -> str:
    """The JSON type of a value; numbers are "integer" or "fraction"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if value == int(value) else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def equal(a: Any, b: Any) -> bool:
    """Equality of JSON values: 1 is 1.0, but not true."""
    if type_of(a) != type_of(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
    return bool(a == b)


def _lower(parts: list[dict[str, Any]]) -> tuple[float, bool]:
    """The highest lower bound of numbers, and whether it is excluded."""
    bounds = [(part["minimum"], False) for part in parts if "minimum" in part]
    bounds += [(part["exclusiveMinimum"], True) for part in parts if "exclusiveMinimum" in part]
    return max(bounds, default=(float("-inf"), False))


def _upper(parts: list[dict[str, Any]]) -> tuple[float, bool]:
    bounds = [(-part["maximum"], False) for part in parts if "maximum" in part]
    bounds += [(-part["exclusiveMaximum"], True) for part in parts if "exclusiveMaximum" in part]
    high, excluded = max(bounds, default=(float("-inf"), False))
    return -high, excluded


def _largest(parts: list[dict[str, Any]], keyword: str) -> float:
    return max((part[keyword] for part in parts if keyword in part), default=0)


def _least(parts: list[dict[str, Any]], keyword: str) -> float:
    return min((part[keyword] for part in parts if keyword in part), default=float("inf"))


def _items(parts: list[dict[str, Any]], i: int) -> list[Any]:
    """The schemas that hold for item i."""
    found = []
    for part in parts:
        prefix = part.get("prefixItems", ())
        if i < len(prefix):
            found.append(prefix[i])
        elif "items" in part:
            found.append(part["items"])
    return found


def _properties(parts: list[dict[str, Any]], name: str) -> list[Any]:
    """Schemas that hold for a property, as far as no pattern must be matched to know."""
    found = []
    for part in parts:
        if name in part.get("properties", ()):
            found.append(part["properties"][name])
        elif "additionalProperties" in part and not part.get("patternProperties"):
            found.append(part["additionalProperties"])
    return found
