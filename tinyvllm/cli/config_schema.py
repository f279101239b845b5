"""The JSON schema of configuration files, from the parsers of the commands: what --config accepts, for editors."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tinyvllm.cli.config_file import PRESETS
from tinyvllm.cli.definitions import Definition, definitions, is_configurable, model_definitions

Schema = dict[str, Any]
_SCALARS = {int: "integer", float: "number"}


def config_schema(parsers: Mapping[str, Callable[[], argparse.ArgumentParser]]) -> Schema:
    """A schema of draft 2020-12. Keys with underscores are valid, too; editors suggest those with dashes."""
    made = {command: make() for command, make in parsers.items()}
    sets = {command: definitions(parser) for command, parser in made.items() if is_configurable(parser)}
    common: dict[str, list[Schema]] = {}
    for known in sets.values():
        for key, definition in known.items():
            forms = common.setdefault(key, [])
            if (form := _schema(definition, known)) not in forms and key not in (*sets, PRESETS):
                forms.append(form)
    options = {key: forms[0] if len(forms) == 1 else {"anyOf": forms} for key, forms in common.items() if forms}
    sections = {command: {"$ref": f"#/$defs/{command}"} for command in sets}
    presets = {"type": "object", "additionalProperties": {"$ref": "#/$defs/preset"}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tinyvllm configuration",
        **_object(options, {**sections, PRESETS: {"description": "sets of options by name, for --preset", **presets}}),
        "$defs": {
            **{command: _object({key: _schema(d, known) for key, d in known.items()}) for command, known in sets.items()},
            "preset": _object(options, sections),
        },
    }


def _object(options: Mapping[str, Schema], exact: Mapping[str, Schema] | None = None) -> Schema:
    """A mapping of options, whose names may have underscores, and of other keys, whose names may not."""
    underscored = {f"^{key.replace('-', '_')}$": schema for key, schema in options.items() if "-" in key}
    return {
        "type": "object",
        "properties": {**options, **(exact or {})},
        "patternProperties": underscored,
        "additionalProperties": False,
    }


def _schema(definition: Definition, known: Mapping[str, Definition]) -> Schema:
    one = _scalar(definition)
    forms = [one]
    if definition.is_list or definition.separator:
        forms.append({"type": "array", "items": one})
    if definition.is_json:
        forms.append({"type": "object"})
    if definition.names_models:
        path = {"type": ["string", "number", "boolean", "null"]}
        model = _object({key: _schema(d, known) for key, d in model_definitions(known, definition).items()})
        forms.append({"type": "object", "additionalProperties": {"anyOf": [path, model]}})
    described = {"description": definition.action.help or definition.key, "anyOf": [*forms, {"type": "null"}]}
    return described if not _has_default(definition) else {**described, "default": definition.default}


def _has_default(definition: Definition) -> bool:
    return isinstance(definition.default, (str, int, float)) and definition.default is not argparse.SUPPRESS


def _scalar(definition: Definition) -> Schema:
    """A text is also written without quotes: then it may look like a number or a boolean."""
    if definition.is_boolean:
        return {"type": "boolean"}
    if definition.action.choices is not None:
        return {"enum": _listed(definition.action.choices)}
    kind: Any = definition.action.type
    return {"type": _SCALARS[kind]} if kind in _SCALARS else {"type": ["string", "number", "boolean"]}


def _listed(choices: Iterable[Any]) -> list[Any]:
    return list(choices)
