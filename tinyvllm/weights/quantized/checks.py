"""Checks of quantized checkpoints: which tensors a matrix consists of, and what their shapes must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np

from tinyvllm.errors import FormatError, one_line
from tinyvllm.foreign import Fields, quoted
from tinyvllm.weights.mapping import TensorRecord

MAX_GROUP = 1 << 20  # columns
_SPEAKER = "quantized checkpoint"
_MAX_MESSAGE = 290  # characters


def refuse(what: str) -> NoReturn:
    raise FormatError(one_line(f"{_SPEAKER}: {what}", _MAX_MESSAGE))


def stems(tensors: Mapping[str, TensorRecord], suffix: str) -> list[str]:
    """The modules X with a tensor `X.suffix`."""
    return [name[: -len(suffix) - 1] for name in tensors if name.endswith(f".{suffix}")]


def own_tensors(
    settings: Fields, tensors: Mapping[str, TensorRecord], suffixes: Sequence[str]
) -> tuple[list[str], dict[str, TensorRecord]]:
    """The modules X with a tensor of the first suffix, and all tensors but theirs. FormatError if there is no such module."""
    modules = stems(tensors, suffixes[0])
    if not modules:
        refuse(f"no file has a tensor 'X.{suffixes[0]}', which {settings.where} needs; is it the configuration of another model?")
    parts = {f"{stem}.{suffix}" for stem in modules for suffix in suffixes}
    return modules, {name: record for name, record in tensors.items() if name not in parts}


def group_size(settings: Fields, default: int | None) -> int:
    """Columns of a group, or -1 for all of a row."""
    size = settings.integer("group_size", default, low=-1, high=MAX_GROUP)
    if size == 0:
        refuse(f"{settings.where}: group_size must be -1 (all columns) or above 0, got 0")
    return size


def column_groups(record: TensorRecord, I: int, G: int) -> np.ndarray:
    """The group of each of I columns, int [I]."""
    require_shape(record, (I,), "a group for each column")
    if record.format not in ("I32", "I64"):
        refuse(f"tensor {quoted(record.name)} must hold integers, got {record.format}")
    groups = record.data.view("<i4" if record.format == "I32" else "<i8").astype(np.int64)
    if groups.min() < 0 or groups.max() >= G:
        refuse(f"tensor {quoted(record.name)} must hold numbers of groups from 0 to {G - 1}, got {groups.min()} to {groups.max()}")
    return groups


def part(tensors: Mapping[str, TensorRecord], stem: str, suffix: str) -> TensorRecord:
    """The tensor `stem.suffix`. FormatError if it is missing."""
    record = tensors.get(f"{stem}.{suffix}")
    if record is None:
        refuse(f"{quoted(stem)} has no tensor {suffix!r}, which its weights need; download the files again")
    return record


def require_shape(record: TensorRecord, expected: Sequence[int], why: str) -> None:
    if record.shape != tuple(expected):
        refuse(f"tensor {quoted(record.name)} must have the shape {list(expected)} ({why}), got {quoted(list(record.shape))}")


def require_rank(record: TensorRecord, rank: int) -> None:
    if len(record.shape) != rank or 0 in record.shape:
        refuse(f"tensor {quoted(record.name)} must have {rank} dimensions, none of them 0, got the shape {quoted(list(record.shape))}")
