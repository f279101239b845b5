"""Matrices of floats of eight bits and fewer: from a checkpoint's codes and scales to rows of our formats, without a lost bit.

A kind of checkpoint says where codes and scales are; this file chooses the format that holds them and builds its rows. A code that is a
NaN becomes a scale that is one: in a product, both make the row's result a NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tinyvllm.foreign import quoted
from tinyvllm.quant.formats import FORMATS
from tinyvllm.quant.small_floats import E8M0_NAN, e4m3_is_nan, e4m3_to_f32, e8m0_to_f32
from tinyvllm.weights.mapping import BuiltRecord, TensorRecord
from tinyvllm.weights.quantized.checks import refuse, require_shape
from tinyvllm.weights.quantized.integers import float32_of, floats_of

Scales = Callable[[int, int], np.ndarray]  # (first row, end) -> float32 [rows, groups]
_FP8_GROUP, _MX_GROUP, _NV_GROUP, _NV_BLOCK = 128, 32, 16, 128


# --- scales as checkpoints have them


def block_scales(scale: TensorRecord, shape: tuple[int, int], block: tuple[int, int]) -> Scales:
    """A scale for each block of `block` rows and columns of a matrix of this shape, in floats or in powers of two."""
    counts = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
    flat = ((), (1,)) if counts == (1, 1) else (counts[:1],) if counts[1] == 1 else ()  # shapes without dimensions of 1
    if scale.shape not in flat:
        require_shape(scale, counts, f"a scale for {block[0]} x {block[1]} weights")
    powers = scale.format in ("F8_E8M0", "U8")
    stored = (scale.data if powers else floats_of(scale)).reshape(counts)

    def read(first: int, end: int) -> np.ndarray:
        rows = stored[np.arange(first, end) // block[0]]
        return e8m0_to_f32(rows) if powers else float32_of(scale, rows)

    return read


def number_of(record: TensorRecord) -> np.float32:
    """The one number of a tensor of floats."""
    if record.shape not in ((), (1,), (1, 1)):
        refuse(f"tensor {quoted(record.name)} must hold one number, got the shape {quoted(list(record.shape))}")
    return np.float32(float32_of(record, floats_of(record)).reshape(-1)[0])


def codes_of(record: TensorRecord, formats: tuple[str, ...]) -> np.ndarray:
    """The bytes of a tensor [O, N], uint8 [O, bytes]: a view of the file."""
    if record.format not in formats:
        refuse(f"tensor {quoted(record.name)} must hold {' or '.join(formats)}, got {record.format}")
    return record.data.reshape(record.shape[0], -1)


# --- e4m3


def fp8_matrix(
    name: str, shape: tuple[int, int], codes: np.ndarray, scales: Scales, width: int, sources: tuple[TensorRecord, ...]
) -> BuiltRecord:
    """A matrix of e4m3 `codes`, uint8 [O, I], with a scale for every `width` columns of a row."""
    I = shape[1]
    if I % _FP8_GROUP or (width % _FP8_GROUP and width < I):
        reason = f"a scale for {min(width, I)} columns of {I}, not for multiples of {_FP8_GROUP}"
        return BuiltRecord(name, "F32", shape, sources, lambda first, end: _fp8_floats(codes[first:end], scales(first, end), width), reason)
    groups = np.arange(I // _FP8_GROUP) * _FP8_GROUP // width

    def build(first: int, end: int) -> np.ndarray:
        numbers = codes[first:end].reshape(end - first, -1, _FP8_GROUP)
        factors = np.where(e4m3_is_nan(numbers).any(axis=2), np.float32(np.nan), scales(first, end)[:, groups])
        return _joined("FP8_G128", factors[:, :, None].astype("<f4").view(np.uint8), numbers)

    return BuiltRecord(name, "FP8_G128", shape, sources, build)


def _fp8_floats(codes: np.ndarray, scales: np.ndarray, width: int) -> np.ndarray:
    columns = np.arange(codes.shape[1]) // width
    numbers = np.where(e4m3_is_nan(codes), np.float32(np.nan), e4m3_to_f32(codes))
    return np.ascontiguousarray(numbers * scales[:, columns], "<f4").view(np.uint8)


def mxfp8_matrix(name: str, weight: TensorRecord, codes: np.ndarray, scale: TensorRecord) -> BuiltRecord:
    """A matrix of e4m3 `codes`, uint8 [O, I], with a power of two for every 32 columns."""
    O, I = codes.shape
    powers = _powers(scale, O, I)

    def build(first: int, end: int) -> np.ndarray:
        numbers = codes[first:end].reshape(end - first, -1, _MX_GROUP)
        exponents = np.where(e4m3_is_nan(numbers).any(axis=2), np.uint8(E8M0_NAN), powers[first:end])
        return _joined("MXFP8", exponents[:, :, None], numbers)

    return BuiltRecord(name, "MXFP8", (O, I), (weight, scale), build)


# --- floats of four bits


def mxfp4_matrix(name: str, weight: TensorRecord, codes: np.ndarray, scale: TensorRecord) -> BuiltRecord:
    """A matrix of e2m1 `codes`, uint8 [O, I / 2], even columns in the low halves, with a power of two for every 32 columns."""
    O, I = codes.shape[0], 2 * codes.shape[1]
    powers = _powers(scale, O, I)

    def build(first: int, end: int) -> np.ndarray:
        exponents = powers[first:end]
        if (exponents == E8M0_NAN).any():
            refuse(f"tensor {quoted(scale.name)} has a scale that is NaN (255); the file is damaged, or its quantization failed")
        quants = nibbles(codes[first:end]).reshape(end - first, -1, 2, 16)
        return _joined("MXFP4", exponents[:, :, None], quants[:, :, 0] | quants[:, :, 1] << 4)

    return BuiltRecord(name, "MXFP4", (O, I), (weight, scale), build)


def nvfp4_matrix(
    name: str, weight: TensorRecord, codes: np.ndarray, scale: TensorRecord, factor: np.float32, more: tuple[TensorRecord, ...] = ()
) -> BuiltRecord:
    """A matrix of e2m1 `codes`, uint8 [O, I / 2], even columns in the low halves: times an e4m3 scale for 16 columns, times `factor`."""
    O, I = codes.shape[0], 2 * codes.shape[1]
    if I % _NV_GROUP:
        refuse(f"tensor {quoted(weight.name)} must have a multiple of {_NV_GROUP} columns, got {I}")
    require_shape(scale, (O, I // _NV_GROUP), f"a scale for {_NV_GROUP} columns")
    factors, sources = codes_of(scale, ("F8_E4M3", "U8")), (weight, scale, *more)
    if I % _NV_BLOCK:

        def floats(first: int, end: int) -> np.ndarray:
            numbers = _e2m1(codes[first:end]).reshape(end - first, -1, _NV_GROUP)
            part = factors[first:end]
            scales = np.where(e4m3_is_nan(part), np.float32(np.nan), e4m3_to_f32(part)) * factor
            return np.ascontiguousarray(numbers * scales[:, :, None], "<f4").reshape(end - first, -1).view(np.uint8)

        return BuiltRecord(name, "F32", (O, I), sources, floats, f"{I} columns are no multiple of {_NV_BLOCK}")

    def build(first: int, end: int) -> np.ndarray:
        rows, part = end - first, factors[first:end].reshape(end - first, -1, _NV_BLOCK // _NV_GROUP)
        quants = nibbles(codes[first:end]).reshape(rows, I // _NV_BLOCK, -1, 2, 16)
        whole = np.where(e4m3_is_nan(part).any(axis=2), np.float32(np.nan), factor / np.float32(2))  # the format's values are twice e2m1's
        packed = (quants[:, :, :, 0] | quants[:, :, :, 1] << 4).reshape(rows, I // _NV_BLOCK, -1)
        return _joined("NVFP4_G128", whole[:, :, None].astype("<f4").view(np.uint8), part, packed)

    return BuiltRecord(name, "NVFP4_G128", (O, I), sources, build)


def nibbles(codes: np.ndarray) -> np.ndarray:
    """uint8 [R, N] -> uint8 [R, 2 N] of four bits each, the low half of each byte first."""
    return np.stack([codes & 15, codes >> 4], axis=2).reshape(len(codes), 2 * codes.shape[1])


def _e2m1(codes: np.ndarray) -> np.ndarray:
    numbers = np.array(FORMATS["MXFP4"].values, np.float32) / np.float32(2)
    values: np.ndarray = numbers[nibbles(codes)]
    return values


def _powers(scale: TensorRecord, O: int, I: int) -> np.ndarray:
    if I % _MX_GROUP:
        refuse(f"the matrix of {quoted(scale.name)} must have a multiple of {_MX_GROUP} columns, got {I}")
    require_shape(scale, (O, I // _MX_GROUP), f"a scale for {_MX_GROUP} columns")
    return codes_of(scale, ("U8", "F8_E8M0"))


def _joined(format: str, *fields: np.ndarray) -> np.ndarray:
    """Fields uint8 [R, blocks, bytes] as rows of blocks, uint8 [R, bytes]."""
    blocks = np.concatenate(fields, axis=2)
    assert blocks.shape[2] == FORMATS[format].nbytes
    return blocks.reshape(len(blocks), -1)
