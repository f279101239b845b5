"""Values as users write them: paths from a home, sizes with units, adapters by name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinyvllm.errors import ArgumentError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)


def expand_home(name: str, text: str | os.PathLike[str]) -> Path:
    """The path with ~ and ~USER replaced; ArgumentError, with the name of the option, if there is no such home."""
    path = os.path.expanduser(text)  # unlike Path.expanduser, without a RuntimeError where there is no home
    if path.startswith("~") and not os.path.exists(path):
        raise ArgumentError(f"{name}: got {os.fspath(text)!r}, and there is no such home; give the whole path")
    return Path(path)


def parse_size(name: str, text: str) -> int:
    """Bytes of "2GiB", "500MB", "1.5G" or "1048576". K, M, G, T are powers of 1024 with "iB" or alone, and powers of 1000 with "B"."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ArgumentError(f"{name} must be a size such as 2GiB or 500MB, got {text!r}")
    number, unit, binary = match.groups()
    decimal = unit and not binary and text.strip()[-1] in "bB"
    size = int(float(number) * (1000 if decimal else 1024) ** ("KMGT".index(unit.upper()) + 1 if unit else 0))
    if size < 1:
        raise ArgumentError(f"{name} must be at least one byte, got {text!r}")
    return size


def parse_lora_modules(given: object) -> tuple[tuple[str, str], ...]:
    """Pairs of an adapter's name and folder, from a dict, or from a list of pairs, of "NAME=FOLDER", or of vLLM's {"name", "path"}."""
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, (Mapping, list, tuple)):
        raise ArgumentError(f"lora_modules must be names and folders of adapters, such as NAME=FOLDER, got {given!r:.80}")
    pairs = list(given.items()) if isinstance(given, Mapping) else [_lora_module(entry) for entry in given]
    if not all(isinstance(part, str) and part for pair in pairs for part in pair):
        raise ArgumentError(f"lora_modules must be names and folders of adapters, such as NAME=FOLDER, got {given!r:.80}")
    if len({name for name, _ in pairs}) < len(pairs):
        raise ArgumentError(f"lora_modules has two adapters of one name, got {given!r:.80}")
    return tuple(pairs)


def _lora_module(entry: object) -> tuple[Any, Any]:
    """The name and the folder of one adapter; ("", "") for what has none."""
    if isinstance(entry, str):
        name, _, path = entry.partition("=")
        return name, path
    if isinstance(entry, Mapping) and entry.keys() <= {"name", "path", "base_model_name"}:
        return entry.get("name"), entry.get("path")
    return tuple(entry) if isinstance(entry, (list, tuple)) and len(entry) == 2 else ("", "")  # type: ignore[return-value]
