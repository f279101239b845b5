"""The tools of a request, for parsers and grammars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from tinyvllm.errors import RequestError
from tinyvllm.lazy_dataclass import dataclass

_TYPE_OF = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object"}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments, an object."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def schema_of(self, parameter: str) -> Mapping[str, Any]:
        """The schema of one argument; {} if it has none."""
        properties = self.parameters.get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return schema if isinstance(schema, Mapping) else {}

    def types(self, parameter: str) -> frozenset[str]:
        """JSON types of an argument that its schema names; "integer" implies "number"."""
        return frozenset(_types(self.schema_of(parameter), self.parameters, 8))


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Tool]:
    """Tools in OpenAI's form, {"type": "function", "function": {name, description, parameters}}, by name.

    RequestError for one of another form, or two of one name.
    """
    by_name: dict[str, Tool] = {}
    for index, entry in enumerate(tools or ()):
        function = entry.get("function") if isinstance(entry, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise RequestError(f'tools[{index}] must be {{"type": "function", "function": {{"name": ...}}}}, got {entry!r:.80}')
        parameters = function.get("parameters") or {}  # type: ignore[union-attr]
        if not isinstance(parameters, Mapping):
            raise RequestError(f"tools[{index}].function.parameters must be a JSON schema, got {parameters!r:.80}")
        if name in by_name:
            raise RequestError(f"tools[{index}]: duplicate function name {name!r}")
        by_name[name] = Tool(name, parameters)
    return by_name


def _types(schema: object, root: Mapping[str, Any], depth: int) -> set[str]:
    """Types of a schema; depth limits references, which may be circular."""
    if not isinstance(schema, Mapping) or not depth:
        return set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else {t for t in named if isinstance(t, str)} if isinstance(named, list) else set()
    if not types:
        values = [*(schema["enum"] if isinstance(schema.get("enum"), list) else ()), *([schema["const"]] if "const" in schema else ())]
        types = {_TYPE_OF[type(value)] for value in values if type(value) in _TYPE_OF}
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema[key] if isinstance(schema.get(key), list) else ():
            types |= _types(part, root, depth - 1)
    if isinstance(reference := schema.get("$ref"), str):
        types |= _types(_resolve(reference, root), root, depth - 1)
    return types | ({"number"} if "integer" in types else set())


def _resolve(reference: str, root: Mapping[str, Any]) -> object:
    """The target of a reference within the schema, such as "#/$defs/Place"; None for other references."""
    if not reference.startswith("#"):
        return None
    place: object = root
    for step in reference[1:].split("/")[1:]:
        place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place
