"""What the parser of a command says about its options: names in files, types, lists, secrets. All is derived from argparse's actions."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tinyvllm.cli.options import AppendModel
from tinyvllm.config.switches import OPTION_PREFIX, SWITCHES

PLACES = ("config", "preset")  # options that say where the others are; not in files themselves
_BOOLEANS = {**dict.fromkeys(("true", "yes", "on"), True), **dict.fromkeys(("false", "no", "off"), False)}
_NOT_OPTIONS = (argparse._HelpAction, argparse._VersionAction)
_SEPARATED = re.compile(r".+([,;])\.\.\.")  # metavar of a text with several entries: "T,..."


class Definition(NamedTuple):
    """One option, or one argument without dashes, of a command.

    key      its name in files: the option without its dashes
    group    title of its group in --help
    default  the parser's; argparse.SUPPRESS if the command takes the one of its configuration
    """

    key: str
    action: argparse.Action
    group: str
    default: Any
    required: bool

    @property
    def is_boolean(self) -> bool:
        return isinstance(self.action, (argparse._StoreTrueAction, argparse._StoreFalseAction, argparse.BooleanOptionalAction))

    @property
    def is_list(self) -> bool:
        return isinstance(self.action, (argparse._AppendAction, AppendModel)) or self.action.nargs in ("*", "+")

    @property
    def names_models(self) -> bool:
        """Whether it also takes a mapping: options of a model by its served name."""
        return isinstance(self.action, AppendModel)

    @property
    def is_json(self) -> bool:
        """Whether it is JSON text, which a file may have as a mapping."""
        return self.action.metavar == "JSON"

    @property
    def is_secret(self) -> bool:
        return self.action.metavar == "KEY"

    @property
    def separator(self) -> str | None:
        """What separates the entries of a text that has several, which a file may have as a list."""
        match = _SEPARATED.fullmatch(str(self.action.metavar))
        return match[1] if match else None

    @property
    def scalar(self) -> str:
        """What a single value must be."""
        if self.is_boolean:
            return "true or false"
        if self.action.choices is not None:
            return f"one of {', '.join(map(str, self.action.choices))}"
        return {int: "an integer", float: "a number"}.get(self.action.type, "a text")  # type: ignore[call-overload, no-any-return]

    @property
    def expected(self) -> str:
        """What the value in a file must be."""
        if self.names_models:
            return "a text, a list of texts, or a mapping of names to models"
        lists = f" or a list, each {self.scalar}" if self.is_list else " or a list of them" if self.separator else ""
        return self.scalar + lists + (" or a mapping" if self.is_json else "")

    @property
    def variable(self) -> str:
        """The environment variable with its value."""
        return switch_of(self.key) or f"{OPTION_PREFIX}{self.key.upper().replace('-', '_')}"

    def parse(self, text: str) -> Any:
        """One value. ValueError if it is none of the option's type."""
        if self.is_boolean:
            if text.lower() not in _BOOLEANS:
                raise ValueError(text)
            return _BOOLEANS[text.lower()]
        try:
            value = self.action.type(text) if callable(self.action.type) else text
        except (argparse.ArgumentTypeError, TypeError, ArithmeticError) as error:
            raise ValueError(str(error)) from None
        if self.action.choices is not None and value not in self.action.choices:
            raise ValueError(text)
        return value


def switch_of(key: str) -> str | None:
    """The switch of the environment with the name of an option. It keeps its own meaning, and is the option's only variable."""
    name = f"TINYVLLM_{key.upper().replace('-', '_')}"
    return name if any(switch.name == name for switch in SWITCHES) else None


def key_of(action: argparse.Action) -> str:
    """The first long option, without dashes; the name of an argument without them."""
    long = [option for option in action.option_strings if option.startswith("--")]
    return long[0][2:] if long else action.dest


def negations(action: argparse.Action) -> list[str]:
    """--no-X for a switch --X, which is on or not there: with it the command line turns off what a file turns on."""
    if not isinstance(action, argparse._StoreTrueAction):
        return []
    return [f"--no-{option[2:]}" for option in action.option_strings if option.startswith("--")]


def definitions(parser: argparse.ArgumentParser) -> dict[str, Definition]:
    """What a file may say for the command of this parser, by key."""
    found: dict[str, Definition] = {}
    for group in parser._action_groups:
        for action in group._group_actions:
            if not isinstance(action, _NOT_OPTIONS) and action.dest not in PLACES:
                key = key_of(action)
                found[key] = Definition(key, action, group.title or "", _default(parser, action), action.required and action.nargs != "*")
    return found


def is_configurable(parser: argparse.ArgumentParser) -> bool:
    """Whether the command takes --config."""
    return any(action.dest == "config" for action in parser._actions)


def model_definitions(known: Mapping[str, Definition], models: Definition) -> dict[str, Definition]:
    """What a file may say about one of several models: the options of their group, and the model's own path."""
    own = {key: definition for key, definition in known.items() if definition.group == models.group}
    path = argparse.ArgumentParser(add_help=False).add_argument(*models.action.option_strings, metavar="PATH")
    return {**own, models.key: Definition(models.key, path, models.group, None, False)}


def _default(parser: argparse.ArgumentParser, action: argparse.Action) -> Any:
    """As argparse itself sets it: a text goes through the type, and no arguments of any number are an empty list."""
    if action.default is None and action.nargs == "*" and not action.option_strings:
        return []
    is_text = isinstance(action.default, str) and action.default is not argparse.SUPPRESS
    return parser._get_value(action, action.default) if is_text else action.default
