"""What comes from outside: files within a size, JSON within a depth, settings by type; values are quoted within a few characters.

Limits are several times what published models need; the error names the limit.
"""

from __future__ import annotations

import json
import math
import reprlib
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tinyvllm.errors import ModelError, one_line

MAX_JSON_BYTES = 16 << 20  # config.json and its neighbours; the largest published index of shards is 9 MB
MAX_JSON_VALUES = 1 << 20  # lists, objects and what is in them: a header of MAX_TENSORS tensors has 600,000; empty lists take 60 bytes each
MAX_VOCABULARY_BYTES = 128 << 20  # tokenizer.json, tokenizer.model; the largest published one is 35 MB
MAX_TENSORS = 65_536  # in one file; 235 billion parameters in 94 layers of 128 experts are 37,000
MAX_LAYERS = 1024  # of a model: several times more than any published one has
_QUOTED = 60  # characters

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _QUOTED
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxdict = 3, 4, 4, 3


def quoted(value: object, limit: int = _QUOTED) -> str:
    """A foreign value as an error message shows it: beginning and end, on one line, in time and memory that do not depend on its size."""
    return one_line(_SHORT.repr(value), limit)


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a regular file. OSError if it cannot be read, ValueError beyond `limit` bytes."""
    with path.open("rb") as file:
        if not stat.S_ISREG((status := path.stat()).st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > limit:
            raise ValueError(f"it has {status.st_size} bytes, and at most {limit} are read")
        return file.read(limit)


def parse_json(data: bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """A JSON value; ValueError, with a reason of one line, for anything else, for nesting beyond Python's stack and for lone surrogates.

    `pairs` makes the objects, as in json.loads. Surrogates could be neither encoded, printed nor hashed later on.
    """
    values = sum(data.count(character) for character in (b"[", b"{", b","))  # at least as many as there are
    if values > MAX_JSON_VALUES:
        raise ValueError(f"it has up to {values} values, and at most {MAX_JSON_VALUES} are read")
    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=pairs)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("its values are nested too deep") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"it has a lone surrogate, {error.object[error.start]!a}") from None
    except ValueError as error:  # also UnicodeDecodeError, and integers of thousands of digits
        raise ValueError(one_line(str(error), 120)) from None
    return value


class Fields:
    """A checkpoint's description with typed getters whose errors name the key: config.json, or one architecture's part of GGUF metadata."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "", where: str = "config.json"):
        self.values, self.prefix, self.where = values, prefix, where

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def _need(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"{self.where}: the key {self.prefix + key!r} is missing; the model cannot be built without it")
        return value

    def _refuse(self, key: str, expected: str, value: object) -> NoReturn:
        raise ModelError(f"{self.where}: {self.prefix + key} must be {expected}, got {quoted(value)}")

    def integer(self, key: str, default: int | None = None, low: int = 0, high: int | None = None) -> int:
        value = self._need(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            self._refuse(key, f"an integer of {low} or more" if high is None else f"an integer from {low} to {high}", value)
        return value

    def layers(self, key: str = "num_hidden_layers") -> int:
        """The number of layers, bounded: lists with an entry per layer must not fill the memory before any tensor is checked."""
        return self.integer(key, low=1, high=MAX_LAYERS)

    def number(self, key: str, default: float | None = None, above: float | None = None, high: float = math.inf) -> float:
        value = self._need(key, default)
        if not _is_number(value) or (above is not None and value <= above) or value > high:
            limit = "" if high == math.inf else f" and at most {high:g}"
            self._refuse(key, "a number" if above is None else f"a number above {above:g}{limit}", value)
        return float(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers, () if it is missing."""
        values = self.get(key, [])
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            self._refuse(key, "a list of integers", values)
        return tuple(values)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers, () if it is missing."""
        values = self.get(key, [])
        if not isinstance(values, list) or not all(map(_is_number, values)):
            self._refuse(key, "a list of numbers", values)
        return tuple(map(float, values))

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            self._refuse(key, "true or false", value)
        return value


def _is_number(value: object) -> bool:
    """Finite, and no integer beyond the range of a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
