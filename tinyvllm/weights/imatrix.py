"""Importance matrices of llama.cpp: how much each column of a matrix matters, for quantization at load. Its .dat files and GGUF files.

An importance is the mean square of the activations that a column was multiplied with on a calibration text. Files are mapped, and only
the entries that a model uses are read. Every length is checked against the file first.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NoReturn

import numpy as np

from tinyvllm.errors import FormatError, ModelError
from tinyvllm.foreign import MAX_TENSORS, quoted
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.storage.digests import content_digest
from tinyvllm.weights.gguf import read_gguf
from tinyvllm.weights.mapping import TensorRecord, map_file
from tinyvllm.weights.recipe import Recipe

_SPEAKER = "imatrix"
_MAX_NAME = 256  # bytes; those of published files have fewer than 64
_SUMS, _COUNTS = ".in_sum2", ".counts"
# Projections that read the same activations: a file of a model that has them in one matrix names that one alone.
_SAME_INPUT = {"attn_q": "attn_qkv", "attn_k": "attn_qkv", "attn_v": "attn_qkv", "ffn_gate": "ffn_up"}


@dataclass(frozen=True)
class _Entry:
    """Sums of squares, float32 [matrices * columns], and how often they were added, float32 [matrices]."""

    sums: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class ImportanceMatrix:
    """The entries of one file by the GGUF names of their matrices; `digest` identifies the file's content."""

    path: Path
    entries: dict[str, _Entry]
    digest: str

    def columns(self, recipe: Recipe) -> np.ndarray | None:
        """The importance of each column of the recipe's matrix [O, I], float32 [I], or of each expert's columns, float32 [experts, I]; None
        if the file has none.

        ModelError if it has another number of columns; FormatError for numbers that cannot be means of squares.
        """
        name = next((name for name in _names(recipe) if name in self.entries), None)
        if name is None:
            return None
        entry, (O, I) = self.entries[name], recipe.shape
        matrices = max(1, entry.sums.size // I) if "_exps." in recipe.name else 1
        if entry.sums.size != matrices * I or entry.counts.size not in (1, matrices) or O % matrices:
            _misfit(self.path, recipe.name, f"{entry.sums.size // entry.counts.size} columns of {entry.counts.size} matrices", I)
        counts = np.broadcast_to(entry.counts, (matrices,))[:, None]
        values = np.where(counts > 0, entry.sums.reshape(matrices, I) / np.where(counts > 0, counts, 1), np.float32(1))
        values = values if "_exps." in recipe.name else values[0]
        if not (np.isfinite(values).all() and (values >= 0).all()):
            _refuse(self.path, f"the importance of {quoted(name)} is negative or not finite; compute the file again")
        return np.ascontiguousarray(values, np.float32)


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Opens a file that llama-imatrix wrote. FormatError if it is damaged or something else, ModelError if it cannot be read."""
    data = map_file(path, _SPEAKER)
    entries = _read_gguf(path) if data[:4].tobytes() == b"GGUF" else _read_dat(path, data)
    if not entries:
        _refuse(path, "it has no entries")
    try:
        return ImportanceMatrix(path, entries, content_digest([path]))
    except OSError as error:
        raise ModelError(f"{_SPEAKER}: cannot read {path}: {error.strerror or error}") from error


def _names(recipe: Recipe) -> list[str]:
    """The names under which a file may have the recipe's matrix: the model's, that of its source, and one with the same input."""
    layer, _, part = recipe.name.removesuffix(".weight").rpartition(".")
    same = [f"{layer}.{_SAME_INPUT[part]}.weight"] if part in _SAME_INPUT else []
    return [recipe.name, *recipe.sources[:1], *same]


def _read_gguf(path: Path) -> dict[str, _Entry]:
    """A tensor of sums [matrices, columns] and one of counts [matrices, 1] for each matrix."""
    metadata, tensors = read_gguf(path)
    if metadata.get("general.type") != "imatrix":
        _refuse(path, f"general.type is {quoted(metadata.get('general.type'))}, expected 'imatrix': is it a model?")
    out = {}
    for name, record in tensors.items():
        if name.endswith(_SUMS):
            matrix = name.removesuffix(_SUMS)
            counts = tensors.get(matrix + _COUNTS)
            if counts is None:
                _refuse(path, f"it has sums of {quoted(matrix)} and no counts")
            out[matrix] = _Entry(_floats(path, record), _floats(path, counts))
    return out


def _floats(path: Path, record: TensorRecord) -> np.ndarray:
    if record.format != "F32" or not record.data.size:
        _refuse(path, f"tensor {quoted(record.name)} is {record.format} {list(record.shape)}, expected F32 numbers")
    return np.frombuffer(record.data, "<f4")


def _read_dat(path: Path, data: np.ndarray) -> dict[str, _Entry]:
    """A count of entries; for each a name, how often its sums were added, and the sums."""
    cursor = _Cursor(path, data)
    total = cursor.integer("the number of entries", 1, MAX_TENSORS)
    out: dict[str, _Entry] = {}
    for i in range(total):
        name = cursor.take(cursor.integer(f"the length of name {i}", 1, _MAX_NAME), f"name {i}").tobytes().decode("utf-8", "replace")
        if name in out:
            _refuse(path, f"{quoted(name)} appears twice")
        added = cursor.integer(f"the count of {quoted(name)}", -(1 << 31), (1 << 31) - 1)
        size = cursor.integer(f"the number of columns of {quoted(name)}", 1, (1 << 31) - 1)
        sums = np.frombuffer(cursor.take(4 * size, f"the sums of {quoted(name)}").tobytes(), "<f4")
        out[name] = _Entry(sums, np.array([max(added, 1)], np.float32))
    cursor.end()
    return out


class _Cursor:
    """Reads values one after another and refuses to read past the end."""

    def __init__(self, path: Path, data: np.ndarray):
        self._path, self._data, self._position = path, data, 0

    def take(self, nbytes: int, what: str) -> np.ndarray:
        start, self._position = self._position, self._position + nbytes
        if self._position > len(self._data):
            left = len(self._data) - start
            _refuse(self._path, f"it is truncated, or no imatrix: {what} at byte {start} needs {nbytes} bytes, and {left} are left")
        return self._data[start : self._position]

    def integer(self, what: str, low: int, high: int) -> int:
        (value,) = struct.unpack("<i", self.take(4, what).tobytes())
        if not low <= value <= high:
            _refuse(self._path, f"{what} is {value}, expected {low} to {high}; it is damaged, or no imatrix")
        return int(value)

    def end(self) -> None:
        """Nothing follows but what files may have: the last step, and the length and the name of the calibration text."""
        if self._position == len(self._data):
            return
        self.take(4, "the last step")
        if self._position < len(self._data):
            self.take(self.integer("the length of the calibration text's name", 0, 1 << 16), "the calibration text's name")
        if self._position != len(self._data):
            _refuse(self._path, f"{len(self._data) - self._position} bytes follow its last entry; it is damaged")


def _refuse(path: Path, what: str) -> NoReturn:
    raise FormatError(f"{_SPEAKER}: {path}: {what}")


def _misfit(path: Path, name: str, got: str, columns: int) -> NoReturn:
    raise ModelError(f"{_SPEAKER}: {path} has {got} for {name}, which has {columns} columns of one matrix; is it of another model?")
