"""Options from everywhere, in ascending rank: the parser's defaults, the configuration file, environment variables, the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tinyvllm.cli.aliases import translated
from tinyvllm.cli.definitions import PLACES, Definition, definitions, is_configurable, negations, switch_of
from tinyvllm.cli.values import COMMAND_LINE, DEFAULT, UNSET, Layer, NamedModel, Origin, Value
from tinyvllm.config.switches import OPTION_PREFIX
from tinyvllm.errors import ArgumentError, nearest

Parsers = Mapping[str, Callable[[], argparse.ArgumentParser]]
_PLACE_VARIABLES = {name: f"{OPTION_PREFIX}{name.upper()}" for name in PLACES}


class Configuration:
    """The options of one command, merged.

    options  what the command runs with
    values   each option with its origin, by key; the value is argparse.SUPPRESS where the engine's or server's own default holds
    unused   what the file and the environment say for other commands only
    """

    def __init__(self, command: str, known: Mapping[str, Definition]):
        self.command, self.definitions = command, known
        self.options = argparse.Namespace()
        self.values: Layer = {}
        self.unused: list[tuple[str, Origin]] = []
        self.file: str | None = None
        self.preset: str | None = None


def configure(command: str, arguments: Sequence[str], parsers: Parsers, environ: Mapping[str, str]) -> Configuration:
    """Merge what is given to a command. ArgumentError for a value that is none of its option's type, and for what no command has."""
    parser = parsers[command]()
    known = definitions(parser)
    given = _from_command_line(parsers[command](), parser, arguments)
    result = Configuration(command, known)
    if not is_configurable(parser):
        _merge(result, parser, [_given_layer(known, given)])
        return result
    result.file, result.preset = (getattr(given, name, None) or environ.get(_PLACE_VARIABLES[name]) or None for name in PLACES)
    if result.preset is not None and result.file is None:
        raise ArgumentError(f"--preset {result.preset} names a part of a configuration file: give --config FILE.yaml, too")
    layers: list[Layer] = []
    if result.file is not None:
        from tinyvllm.cli.config_file import read_config

        layers, result.unused = read_config(result.file, result.preset, command, _definitions_of_all(parsers))
    layers.append(_from_environment(result, environ, parsers, {key for layer in layers for key in layer}))
    _merge(result, parser, [*layers, _given_layer(known, given)])
    vars(result.options).update(config=result.file, preset=result.preset)
    return result


def _definitions_of_all(parsers: Parsers) -> dict[str, dict[str, Definition]]:
    made = {command: make() for command, make in parsers.items()}
    return {command: definitions(parser) for command, parser in made.items() if is_configurable(parser)}


# --- the command line


def _from_command_line(parser: argparse.ArgumentParser, described: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """What the arguments say, without defaults. `described` is the same parser for --help. --no-X turns off a switch X of a file."""
    parser.print_help = described.print_help  # type: ignore[method-assign]
    known = {option for action in parser._actions for option in action.option_strings}
    parser._defaults.clear()
    for action in list(parser._actions):
        action.required, action.default = False, argparse.SUPPRESS
        for negation in negations(action):
            parser.add_argument(negation, dest=action.dest, action="store_false", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
            known.add(negation)
    return parser.parse_args(list(translated(list(arguments), known)))


def _given_layer(known: Mapping[str, Definition], given: argparse.Namespace) -> Layer:
    return {key: Value(getattr(given, d.action.dest), COMMAND_LINE) for key, d in known.items() if hasattr(given, d.action.dest)}


# --- the environment


def _from_environment(result: Configuration, environ: Mapping[str, str], parsers: Parsers, in_file: Collection[str]) -> Layer:
    """The variables of this command's options. A switch with the name of an option keeps its meaning, and outranks the file's option."""
    layer: Layer = {}
    for key, definition in result.definitions.items():
        name = definition.variable
        is_switch = not name.startswith(OPTION_PREFIX)
        if name in environ and not (is_switch and (key not in in_file or definition.is_list or not environ[name])):
            layer[key] = Value(_from_variable(definition, environ[name]), Origin("environment", variable=name))
    ours = {definition.variable for definition in result.definitions.values()} | set(_PLACE_VARIABLES.values())
    others = sorted(name for name in environ if name.startswith(OPTION_PREFIX) and name not in ours)
    if others:
        _check_others(others, parsers)
        result.unused += [(_key_of_variable(name), Origin("environment", variable=name)) for name in others]
    return layer


def _check_others(names: Sequence[str], parsers: Parsers) -> None:
    """Variables of options that this command does not have must be those of another one."""
    every = {definition.variable for known in _definitions_of_all(parsers).values() for definition in known.values()}
    for name in names:
        if name in every:
            continue
        switch = switch_of(_key_of_variable(name))
        hint = f": the name is {switch}" if switch else f"{nearest(name, every)}; {OPTION_PREFIX}X is the option --x of a command"
        raise ArgumentError(f"environment variable {name} is not known{hint}")


def _key_of_variable(name: str) -> str:
    return name.removeprefix(OPTION_PREFIX).lower().replace("_", "-")


def _from_variable(definition: Definition, text: str) -> Any:
    try:
        if definition.is_boolean and text in ("0", "1"):
            return text == "1"
        if definition.is_list:
            return [definition.parse(entry) for entry in _entries(text)]
        return definition.parse(text)
    except (ValueError, RecursionError) as error:
        what = f"{definition.scalar} or a JSON list of texts" if definition.is_list else definition.scalar
        what += ", or 1 or 0" if definition.is_boolean else ""
        got = "" if definition.is_secret else f", got {text!r:.60}"
        raise ArgumentError(f"environment variable {definition.variable} must be {what}{got}") from error


def _entries(text: str) -> list[str]:
    """A text, or the texts of a JSON list."""
    if not (text.startswith("[") and text.endswith("]")):
        return [text]
    entries = json.loads(text)
    if not all(isinstance(entry, (str, int, float)) and not isinstance(entry, bool) for entry in entries):
        raise ValueError(text)
    return [str(entry) for entry in entries]


# --- all of them


def _merge(result: Configuration, parser: argparse.ArgumentParser, layers: Sequence[Layer]) -> None:
    """Set `values` and `options`. A later layer replaces whole values, also those that a model of a mapping has of its own."""
    for key, definition in result.definitions.items():
        result.values[key] = Value(definition.default, DEFAULT)
        for layer in layers:
            if key in layer:
                unset = layer[key].value is UNSET
                result.values[key] = Value(definition.default, DEFAULT) if unset else layer[key]
        if definition.names_models:
            result.values[key] = _outranked(key, result.values[key], layers)
    missing = [d for key, d in result.definitions.items() if d.required and result.values[key].origin is DEFAULT]
    if missing:
        names = ", ".join(argparse._get_action_name(definition.action) or definition.key for definition in missing)
        parser.error(f"the following arguments are required: {names}")
    for key, value in result.values.items():
        if value.value is not argparse.SUPPRESS:
            setattr(result.options, result.definitions[key].action.dest, value.value)


def _outranked(key: str, value: Value, layers: Sequence[Layer]) -> Value:
    """A list of models without the options of theirs that a layer above has for all models."""
    if not isinstance(value.value, list) or not any(isinstance(model, NamedModel) for model in value.value):
        return value
    place = max(number for number, layer in enumerate(layers) if key in layer)
    above = {other for layer in layers[place + 1 :] for other in layer}
    models = [NamedModel(model.name, {k: v for k, v in model.options.items() if k not in above}) for model in value.value]
    return Value(models, value.origin)
