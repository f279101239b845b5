"""Settings from a file or from options, read strictly: an unknown key, a wrong type or a number out of range is an error that names it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinyvllm.config.values import expand_home
from tinyvllm.errors import ArgumentError, FormatError, nearest
from tinyvllm.foreign import parse_json, quoted, read_bounded
from tinyvllm.yaml_file import YamlError, parse_yaml

MAX_FILE = 256 << 10  # bytes of a description of a sweep
MAX_LIST = 256  # entries of one axis


class Settings:
    """One mapping, read key by key; `finish` refuses the keys that were not read."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values, self._where, self._known = values, where, list[str]()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        self._known.append(key)
        return self._values.get(key, default)

    def refuse(self, key: str, expected: str, value: object) -> ArgumentError:
        return ArgumentError(f"{self._where}: {key} must be {expected}, got {quoted(value)}{_boolean_hint(value)}")

    def integer(self, key: str, default: int, low: int, high: int) -> int:
        value = self.get(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(key, f"an integer from {low} to {high}", value)
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.refuse(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        value = self.get(key, default)
        if value is not None and (not isinstance(value, str) or not value):
            raise self.refuse(key, "a text", value)
        return value

    def mapping(self, key: str) -> Settings:
        """The mapping under a key, empty if it is missing."""
        value = self.get(key, {})
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise self.refuse(key, "a mapping of names", value)
        return Settings(value, f"{self._where}: {key}")

    def items(self) -> Mapping[str, Any]:
        """All keys and values, which count as read."""
        self._known += self._values
        return self._values

    def axis(self, key: str, default: Sequence[Any], parse: Callable[[Any], Any]) -> tuple[Any, ...]:
        """The entries of a list, each by `parse`, which returns None for what it does not take; a single value is a list of one."""
        value = self.get(key, default)
        entries = list(value) if isinstance(value, (list, tuple)) else [value]
        if not entries or len(entries) > MAX_LIST:
            raise self.refuse(key, f"a list of 1 to {MAX_LIST} entries", value)
        parsed = [parse(entry) for entry in entries]
        return tuple(dict.fromkeys(parsed))

    def finish(self) -> None:
        for key in self._values:
            if key not in self._known:
                known = ", ".join(sorted(set(self._known)))
                raise ArgumentError(f"{self._where}: unknown key {quoted(key)}{nearest(str(key), self._known)}; expected {known}")


def number_in(value: object, low: float, high: float) -> float | None:
    """The value if it is a number from low to high."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high:
        return float(value)
    return None


def _boolean_hint(value: object) -> str:
    return "; YAML reads no, off, yes and on as booleans: quote them" if isinstance(value, bool) else ""


def read_settings(path: str, where: str = "lab") -> dict[str, Any]:
    """The mapping in a .json, .yaml or .yml file. ArgumentError if it cannot be read, FormatError for something else in it."""
    file = expand_home(where, path)
    kind = file.suffix.lower()
    if kind not in (".json", ".yaml", ".yml"):
        raise ArgumentError(f"{where}: {path} must end in .yaml, .yml or .json")
    try:
        data = read_bounded(file, MAX_FILE)
    except OSError as error:
        raise ArgumentError(f"{where}: cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise FormatError(f"{where}: {path}: {error}") from error
    value = _from_json(path, data, where) if kind == ".json" else _from_yaml(path, data, where)
    if not isinstance(value, dict):
        raise FormatError(f"{where}: {path} must be a mapping, got {quoted(value)}")
    return value


def _from_json(path: str, data: bytes, where: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"the key {quoted(twice)} is there twice")
        return dict(pairs)

    try:
        return parse_json(data, unique)
    except ValueError as error:
        raise FormatError(f"{where}: {path} is not JSON: {error}") from error


def _from_yaml(path: str, data: bytes, where: str) -> Any:
    try:
        node = parse_yaml(data)
        return None if node is None else node.value()
    except ImportError as error:
        raise ArgumentError(f"{where}: {path}: YAML needs PyYAML: pip install 'tinyvllm[yaml]'; JSON needs nothing") from error
    except YamlError as error:
        raise FormatError(f"{where}: {path} is not YAML: {error}") from error


def digest_text(value: Any) -> str:
    """A value of JSON types as text whose equality is the value's."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def folder_of(path: str | None) -> Path:
    """The folder that file names in a sweep are relative to."""
    return Path.cwd() if path is None else expand_home("lab", path).resolve().parent
