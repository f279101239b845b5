"""--config FILE.yaml: options of all commands, options of each command, and presets. The whole file is checked, whatever the command."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tinyvllm.cli.aliases import ALIASES
from tinyvllm.cli.definitions import Definition, model_definitions
from tinyvllm.cli.values import UNSET, Layer, NamedModel, Origin, Value
from tinyvllm.config.values import expand_home
from tinyvllm.errors import ArgumentError, nearest
from tinyvllm.foreign import quoted, read_bounded
from tinyvllm.yaml_file import Node, YamlError, parse_yaml

MAX_CONFIG_BYTES = 64 << 10  # several times the file that sets every option of every command
PRESETS = "presets"
Sets = Mapping[str, Mapping[str, Definition]]  # definitions of each command


def read_config(path: str, preset: str | None, command: str, sets: Sets) -> tuple[list[Layer], list[tuple[str, Origin]]]:
    """The options of a command in a file, in layers of ascending rank, and the keys that only other commands have.

    ArgumentError, with the line, for anything that is no option of any command.
    """
    reader, root = _Reader(path, command, sets), _root(path)
    if root is not None:
        reader.require(root, root.is_mapping, "the file", "a mapping of options")
    presets = {} if root is None else reader.presets(root)
    if preset is not None and preset not in presets:
        known = f"; it has {', '.join(presets)}" if presets else "; it has none"
        raise ArgumentError(f"--preset: {path} has no preset {preset!r}{nearest(preset, presets)}{known}")
    layers, unused = reader.options([item for item in root.items() if item[0] != PRESETS] if root is not None else [], None)
    for name, node in presets.items():
        more, more_unused = reader.options(node.items(), name)
        if name == preset:
            layers, unused = layers + more, unused + more_unused
    return layers, unused


def _root(path: str) -> Node | None:
    file = expand_home("--config", path)
    if file.suffix.lower() not in (".yaml", ".yml"):
        raise ArgumentError(f"--config must end in .yaml or .yml, got {path!r}")
    try:
        return parse_yaml(_bytes(file, path))
    except ImportError as error:
        raise ArgumentError(f"--config {path}: YAML needs PyYAML, which is not installed: pip install 'tinyvllm[yaml]'") from error
    except YamlError as error:
        at = f":{error.line}" if error.line else ""
        raise ArgumentError(f"--config {path}{at}: this is not YAML that can be read: {error.problem}") from error


def _bytes(file: Path, path: str) -> bytes:
    try:
        return read_bounded(file, MAX_CONFIG_BYTES)
    except OSError as error:
        raise ArgumentError(f"--config: cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ArgumentError(f"--config {path}: {error}") from error


class _Reader:
    """Reads the mappings of one file."""

    def __init__(self, path: str, command: str, sets: Sets):
        self._path, self._command, self._sets = path, command, sets

    def require(self, node: Node, good: bool, what: str, expected: str) -> None:
        if not good:
            raise self._error(node.line, f"{what} must be {expected}, got {node}")

    def _error(self, line: int, text: str) -> ArgumentError:
        return ArgumentError(f"--config {self._path}:{line}: {text}")

    def presets(self, root: Node) -> dict[str, Node]:
        node = next((value for key, _, value in root.items() if key == PRESETS), None)
        if node is None:
            return {}
        self.require(node, node.is_mapping, PRESETS, "a mapping of names to options")
        for name, _, value in node.items():
            self.require(value, value.is_mapping, f"preset {quoted(name)}", "a mapping of options")
        return {name: value for name, _, value in node.items()}

    def options(self, items: list[tuple[str, int, Node]], preset: str | None) -> tuple[list[Layer], list[tuple[str, Origin]]]:
        """The options of all commands and then those of this command; and which options of other commands are there."""
        common: Layer = {}
        own: Layer = {}
        unused: list[tuple[str, Origin]] = []
        for key, line, node in items:
            if key in self._sets:
                layer = self._section(key, node, preset)
                own = layer if key == self._command else own
                continue
            value = self._common(key, line, node, preset, common, [other for other, _ in unused])
            if value is None:
                unused.append((_dashed(key), Origin("file", self._path, line, preset)))
            else:
                common[_dashed(key)] = value
        return [common, own], unused

    def _common(self, key: str, line: int, node: Node, preset: str | None, layer: Layer, unused: list[str]) -> Value | None:
        """The value of an option outside sections; None if this command has no such option."""
        name = _dashed(key)
        owners = [command for command, known in self._sets.items() if name in known]
        if not owners:
            every = {key for known in self._sets.values() for key in known}
            raise self._error(line, f"unknown key {quoted(key)}{_hint(key, [*every, *self._sets, PRESETS])}")
        self._check_new(name, line, [*layer, *unused])
        if self._command in owners:
            return self._value(self._sets[self._command], name, line, node, preset)
        self._check_any(owners, name, line, node, preset)
        return None

    def _check_any(self, owners: list[str], name: str, line: int, node: Node, preset: str | None) -> None:
        """An option of other commands must have a value that one of them takes."""
        for command in owners[:-1]:
            try:
                self._value(self._sets[command], name, line, node, preset)
                return
            except ArgumentError:
                continue
        self._value(self._sets[owners[-1]], name, line, node, preset)

    def _section(self, command: str, node: Node, preset: str | None) -> Layer:
        if not node.is_mapping:
            owners = [name for name, known in self._sets.items() if command in known]
            hint = f"; the option --{command} of {owners[0]} belongs to that section: {{{owners[0]}: {{{command}: ...}}}}" if owners else ""
            raise self._error(node.line, f"{command} is a command: expected a mapping of its options, got {node}{hint}")
        return self._mapping(self._sets[command], node, command, preset)

    def _mapping(self, known: Mapping[str, Definition], node: Node, whose: str, preset: str | None) -> Layer:
        layer: Layer = {}
        for key, line, value in node.items():
            name = _dashed(key)
            if name not in known:
                raise self._error(line, f"unknown key {quoted(key)} of {whose}{_hint(key, known)}")
            self._check_new(name, line, layer)
            layer[name] = self._value(known, name, line, value, preset)
        return layer

    def _check_new(self, name: str, line: int, layer: Collection[str]) -> None:
        if name in layer:
            raise self._error(line, f"the key {name!r} is there twice, once with dashes and once with underscores")

    def _value(self, known: Mapping[str, Definition], name: str, line: int, node: Node, preset: str | None) -> Value:
        """The value of an option of a command whose options are `known`."""
        definition = known[name]
        origin = Origin("file", self._path, line, preset)
        if node.is_null and not node.is_empty:
            return Value(UNSET, origin)
        if node.is_mapping and definition.names_models:
            return Value(self._models(model_definitions(known, definition), node, preset), origin)
        if node.is_mapping and definition.is_json:
            return Value(self._json(definition, node), origin)
        if node.is_list and definition.is_list:
            return Value([self._scalar(definition, entry) for entry in node.entries()], origin)
        if node.is_list and definition.separator:
            entries = [self._entry(definition, definition.separator, entry) for entry in node.entries()]
            return Value(definition.separator.join(entries), origin)
        value = self._scalar(definition, node)
        return Value([value] if definition.is_list else value, origin)

    def _scalar(self, definition: Definition, node: Node) -> Any:
        """One value, read by the option's own type: `off` is a text for --speculative-config, and 1.10 is one for --revision."""
        is_text = definition.scalar == "a text"
        if not (node.is_mapping or node.is_list or node.is_null) and (node.is_plain or is_text or definition.action.choices is not None):
            try:
                return definition.parse(node.text)
            except ValueError:
                pass
        advice = "; write null for its default" if node.is_empty else ""
        got = f"the text {node}" if _is_quoted(node) else node
        raise self._error(node.line, f"{definition.key} must be {definition.expected}, got {got}{advice}")

    def _entry(self, definition: Definition, separator: str, node: Node) -> str:
        text = str(self._scalar(definition, node))
        if separator in text:
            raise self._error(node.line, f"an entry of {definition.key} must be without {separator!r}, got {quoted(text)}")
        return text

    def _json(self, definition: Definition, node: Node) -> str:
        try:
            return json.dumps(node.value(), allow_nan=False)
        except (YamlError, ValueError, TypeError) as error:
            raise self._error(node.line, f"{definition.key} must be JSON: {error}") from error

    def _models(self, known: Mapping[str, Definition], node: Node, preset: str | None) -> list[NamedModel]:
        return [NamedModel(name, self._model(known, name, line, value, preset)) for name, line, value in node.items()]

    def _model(self, known: Mapping[str, Definition], name: str, line: int, node: Node, preset: str | None) -> Layer:
        if not name:
            raise self._error(line, "a model must have a name, got an empty one")
        if node.is_mapping:
            return self._mapping(known, node, f"model {quoted(name)}", preset)
        return {"model": self._value(known, "model", line, node, preset)}


def _is_quoted(node: Node) -> bool:
    return not (node.is_plain or node.is_mapping or node.is_list)


def _dashed(key: str) -> str:
    return key.replace("_", "-")


def _hint(key: str, known: Collection[str]) -> str:
    alias = ALIASES.get(f"--{_dashed(key)}")
    ours = None if alias is None else [alias.ours] if alias.ours is not None else list(alias.nearest)
    if alias is None or not ours:
        return nearest(_dashed(key), known)
    names = ", ".join(_dashed(name).lstrip("-") for name in ours)
    return f": its name here is {names}" if alias.ours is not None else f"{': ' if alias.why else ''}{alias.why}; nearest: {names}"
