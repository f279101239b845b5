"""What comes from outside: files are read within a size, JSON within a depth, and values are quoted within a few characters.

Limits are several times what published models need; the error names the limit.
"""

from __future__ import annotations

import json
import reprlib
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinyvllm.errors import one_line

MAX_JSON_BYTES = 16 << 20  # config.json and its neighbours; the largest published index of shards is 9 MB
MAX_JSON_VALUES = 1 << 20  # lists, objects and what is in them: a header of MAX_TENSORS tensors has 600,000; empty lists take 60 bytes each
MAX_VOCABULARY_BYTES = 128 << 20  # tokenizer.json, tokenizer.model; the largest published one is 35 MB
MAX_TENSORS = 65_536  # in one file; 235 billion parameters in 94 layers of 128 experts are 37,000
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
