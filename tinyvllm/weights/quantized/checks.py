"""Checks of quantized checkpoints: which tensors a matrix consists of, and what their shapes must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from tinyvllm.errors import FormatError
from tinyvllm.weights.mapping import TensorRecord

_SPEAKER = "quantized checkpoint"


def refuse(what: str) -> NoReturn:
    raise FormatError(f"{_SPEAKER}: {what}")


def stems(tensors: Mapping[str, TensorRecord], suffix: str) -> list[str]:
    """The modules X with a tensor `X.suffix`."""
    return [name[: -len(suffix) - 1] for name in tensors if name.endswith(f".{suffix}")]


def part(tensors: Mapping[str, TensorRecord], stem: str, suffix: str) -> TensorRecord:
    """The tensor `stem.suffix`. FormatError if it is missing."""
    record = tensors.get(f"{stem}.{suffix}")
    if record is None:
        refuse(f"{stem!r} has no tensor {suffix!r}, which its weights need; download the files again")
    return record


def require_shape(record: TensorRecord, expected: Sequence[int], why: str) -> None:
    if record.shape != tuple(expected):
        refuse(f"tensor {record.name!r} must have the shape {list(expected)} ({why}), got {list(record.shape)}")


def require_rank(record: TensorRecord, rank: int) -> None:
    if len(record.shape) != rank or 0 in record.shape:
        refuse(f"tensor {record.name!r} must have {rank} dimensions, none of them 0, got the shape {list(record.shape)}")
