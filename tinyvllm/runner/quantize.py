"""Rounds a matrix to a packed format while a model is loaded: the CPU kernel `quantize` on all threads, numpy where nothing compiles it."""

from __future__ import annotations

import functools

import numpy as np

from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.launch import run_now
from tinyvllm.backends.registry import usable_variants
from tinyvllm.errors import ToolchainError
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import FLOATS
from tinyvllm.quant.layouts import quantize_rows, row_bytes, unpack_rows
from tinyvllm.quant.mixes import UNWEIGHTED
from tinyvllm.storage.folders import warn_once
from tinyvllm.weights.mapping import drop_pages

_PIECE = 1 << 22  # numbers rounded at a time: their float32 are 16 MiB where they have to be unpacked first
_MAX_NUMBER = np.float32(65504)  # float16's largest: scales and offsets are stored as float16


def quantized(source: str, rows: np.ndarray, format: str, importance: np.ndarray | None = None) -> np.ndarray:
    """Rows uint8 [O, bytes] in the format `source` -> uint8 [O, bytes] in `format`. Mapped pages of `rows` are dropped on the way.

    `importance`, float32 [I], weighs the columns; formats without a search ignore it. FloatingPointError where a number is not finite or
    beyond float16's range.
    """
    pieces = []
    step = max(1, _PIECE // max(1, _width(source, rows)))
    for start in range(0, len(rows), step):
        piece = rows[start : start + step]
        kind, floats = (source, piece) if source in FLOATS else ("F32", unpack_rows(source, piece).view(np.uint8))
        pieces.append(_rounded(kind, np.ascontiguousarray(floats), format, None if format in UNWEIGHTED else importance))
        drop_pages(piece)
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _width(format: str, rows: np.ndarray) -> int:
    per_number = row_bytes(format, 256) / 256
    return int(rows.shape[1] / per_number)


def _rounded(source: str, rows: np.ndarray, format: str, importance: np.ndarray | None) -> np.ndarray:
    I = _width(source, rows)
    out, fault = np.empty((len(rows), row_bytes(format, I)), np.uint8), np.zeros(1, np.int32)
    columns = np.zeros(1, np.float32) if importance is None else np.ascontiguousarray(importance, np.float32)
    kernel = Kernel.cpu("quantize", _variant(), 2, 3, SOURCE=source, FORMAT=format, I=I, WEIGHTED=int(importance is not None))
    try:
        run_now(kernel, out, fault, rows, columns, np.array([len(rows)], np.int32))
    except ToolchainError as error:
        warn_once("quantize", f"weights: matrices are quantized by numpy, many times slower than by the kernel: {error}")
        return _rounded_by_numpy(source, rows, format, importance)
    if fault[0]:
        raise FloatingPointError("not finite, or beyond float16")
    return out


def _rounded_by_numpy(source: str, rows: np.ndarray, format: str, importance: np.ndarray | None) -> np.ndarray:
    values = unpack_rows(source, rows)
    if not (np.abs(values) <= _MAX_NUMBER).all():
        raise FloatingPointError("not finite, or beyond float16")
    return quantize_rows(format, values, importance)


@functools.cache
def _variant() -> str:
    return usable_variants(Placement("CPU"))[0]  # also for a device without kernels of its own
