"""`tinyvllm show-config COMMAND ARGUMENTS...`: the options that the command would run with, as YAML or JSON, each with its origin."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Iterator
from typing import Any

from tinyvllm.cli.arguments import PARSERS, configured, split_command
from tinyvllm.cli.config_schema import config_schema
from tinyvllm.cli.configuration import Configuration
from tinyvllm.cli.definitions import Definition, definitions, is_configurable, switch_of
from tinyvllm.cli.values import DEFAULT, NamedModel, Origin, Value
from tinyvllm.config.engine import EngineConfig
from tinyvllm.config.switches import SWITCHES
from tinyvllm.errors import ArgumentError
from tinyvllm.server.core.config import ServerConfig

HIDDEN = "***"
_DEFAULTS = {"engine": EngineConfig, "server": ServerConfig}  # first word of a group's title -> what has the defaults of its options
_USER = re.compile(r"(?<=://)[^/@\s]*@")  # name and password in a URL


def run(options: argparse.Namespace) -> int:
    if options.schema:
        if options.target is not None or options.json:
            raise ArgumentError("show-config --schema is for the files of all commands: give no command, and no --json")
        print(json.dumps(config_schema(PARSERS), indent=2))
        return 0
    if options.target is None:
        raise ArgumentError("show-config needs a command, such as: tinyvllm show-config serve --config FILE.yaml")
    command, arguments = split_command([options.target, *options.arguments])
    parser = PARSERS[command]()
    if not is_configurable(parser):
        raise ArgumentError(f"show-config: {command} has no options in configuration files")
    if "--json" in arguments and "--json" not in parser.known_options():
        raise ArgumentError(f"--json belongs before the command: tinyvllm show-config --json {command} ...")
    shown = configured(command, arguments)
    values = {key: _shown(shown.definitions[key], value) for key, value in shown.values.items()}
    print(_as_json(shown, values) if options.json else _as_yaml(shown, values))
    return 0


# --- values


def _shown(definition: Definition, value: Value) -> Value:
    """A value without secrets; null where only the running command knows it. The switch that an option has, if it is set, is its value."""
    name = switch_of(definition.key)
    if value.origin is DEFAULT and name is not None and os.environ.get(name):
        value = Value(_of_switch(definition, os.environ[name]), Origin("environment", variable=name))
    content = _default_of(definition) if value.value is argparse.SUPPRESS else value.value
    return Value(_without_secrets(definition, content), value.origin)


def _of_switch(definition: Definition, text: str) -> Any:
    """A switch's text as the option's value; the text itself where the command will refuse it."""
    try:
        return text if definition.is_list else definition.parse(text)
    except ValueError:
        return text


def _default_of(definition: Definition) -> Any:
    """The default of the option's configuration, if it has one. The sampling parameters' is the model's own recommendation: null."""
    fields = {field.name: field for field in dataclasses.fields(kind)} if (kind := _DEFAULTS.get(definition.group.split()[0])) else {}
    field = fields.get(definition.action.dest) or fields.get(f"{definition.action.dest}s")
    default = None if field is None or field.default is dataclasses.MISSING else field.default
    return dataclasses.asdict(default) if dataclasses.is_dataclass(default) and not isinstance(default, type) else default


def _without_secrets(definition: Definition, value: Any) -> Any:
    if isinstance(value, NamedModel):
        return NamedModel(value.name, {key: Value(_visible(part.value), part.origin) for key, part in value.options.items()})
    if isinstance(value, (list, tuple)):
        return [_without_secrets(definition, entry) for entry in value]
    return HIDDEN if definition.is_secret and value is not None else _visible(value)


def _visible(value: Any) -> Any:
    if isinstance(value, (str, int, float)) or value is None or isinstance(value, dict):
        return _USER.sub(f"{HIDDEN}@", value) if isinstance(value, str) else value
    return None  # UNSET


def _switches() -> dict[str, str]:
    """The switches that are set. They are no options, but change what a command does."""
    secrets = {f"TINYVLLM_{key.upper().replace('-', '_')}" for make in PARSERS.values() for key in _secret_keys(make())}
    return {s.name: HIDDEN if s.name in secrets else os.environ[s.name] for s in SWITCHES if s.name in os.environ}


def _secret_keys(parser: argparse.ArgumentParser) -> set[str]:
    return {key for key, definition in definitions(parser).items() if definition.is_secret}


# --- forms


def _as_json(shown: Configuration, values: dict[str, Value]) -> str:
    return json.dumps(
        {
            "command": shown.command,
            "config": shown.file,
            "preset": shown.preset,
            "options": {key: _entry(value) for key, value in values.items()},
            "switches": _switches(),
            "unused": [{"key": key, "origin": _origin(origin)} for key, origin in shown.unused],
        },
        indent=2,
    )


def _entry(value: Value) -> dict[str, Any]:
    return {"value": _plain(value.value), "origin": _origin(value.origin)}


def _plain(value: Any) -> Any:
    """Models of a mapping as a mapping, each of their options with its origin."""
    if isinstance(value, list) and value and isinstance(value[0], NamedModel):
        return {model.name: {key: _entry(part) for key, part in model.options.items()} for model in value}
    return value


def _origin(origin: Origin) -> dict[str, Any]:
    return {name: value for name, value in origin._asdict().items() if value is not None}


def _as_yaml(shown: Configuration, values: dict[str, Value]) -> str:
    """A section that --config reads again, apart from secrets. Defaults are comments."""
    lines: list[tuple[str, str]] = []
    for key, value in values.items():
        lines += [(f"# {text}", "default") if value.origin is DEFAULT else (text, origin) for text, origin in _lines(key, value, "")]
    width = max(min(len(text), 60) for text, _ in lines)
    is_empty = all(value.origin is DEFAULT for value in values.values())
    rows = [f"{shown.command}:{' {}' if is_empty else ''}"]
    rows += [f"  {text:{width}}  # {origin}" if origin else f"  {text}" for text, origin in lines]
    rows += [f"# {name}={json.dumps(text)}  # environment" for name, text in _switches().items()]
    rows += [f"# no option of {shown.command}: {key}  # {origin}" for key, origin in shown.unused]
    return "\n".join(rows)


def _lines(key: str, value: Value, indent: str) -> Iterator[tuple[str, str]]:
    """(text, origin) of each line of a value."""
    models = value.value
    if isinstance(models, list) and models and isinstance(models[0], NamedModel):
        yield f"{indent}{key}:", str(value.origin)
        for model in models:
            yield f"{indent}  {json.dumps(model.name, ensure_ascii=False)}:{'' if model.options else ' {}'}", ""
            for name, part in model.options.items():
                yield from _lines(name, part, f"{indent}    ")
    else:
        yield f"{indent}{key}: {json.dumps(value.value, ensure_ascii=False)}", str(value.origin)
