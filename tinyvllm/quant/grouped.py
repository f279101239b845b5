"""Blocks of integers in groups with one float32 scale and one float32 offset: weight = scale * quant + offset (decision 32).

The internal form of quantized checkpoints (GPTQ, AWQ, compressed-tensors, MLX, HQQ). With a scale of 11 bits and a zero point of 8 all
products and sums are exact in float32.
"""

from __future__ import annotations

import numpy as np

from tinyvllm.quant.formats import FORMATS, BlockFormat, Field

_FLOAT_BYTES = 8  # the scale and the offset


def unpack_groups(known: BlockFormat, data: np.ndarray) -> np.ndarray:
    """uint8 [N, bytes of a block] -> float32 [N, weights of a block]."""
    scale, offset = _floats(data, 0), _floats(data, 4)
    out: np.ndarray = scale * group_quants(known, data).astype(np.float32)
    out += offset
    return out


def group_quants(known: BlockFormat, data: np.ndarray) -> np.ndarray:
    """uint8 [N, bytes of a block] -> uint8 [N, weights of a block]: the unsigned integers."""
    low, start = known.field("quants"), _FLOAT_BYTES
    out = None
    for field in known.fields[2:]:
        part = _spread(field, data[:, start : start + field.nbytes])
        start += field.nbytes
        if field is not low:
            part <<= low.bits
        out = part if out is None else out | part
    assert out is not None
    return out


def pack_groups(format: str, quants: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Rows of a grouped format, uint8 [R, bytes of a row]: `quants` uint8 [R, I], `scales` and `offsets` float32 [R, groups].

    A scale of the arguments may be of several blocks: it is repeated.
    """
    known, (R, I) = FORMATS[format], quants.shape
    blocks = I // known.elements
    out = np.empty((R, blocks, known.nbytes), np.uint8)
    for start, numbers in ((0, scales), (4, offsets)):
        repeated = np.repeat(numbers, blocks // numbers.shape[1], axis=1)
        out[:, :, start : start + 4] = np.ascontiguousarray(repeated, np.float32).view(np.uint8).reshape(R, blocks, 4)
    low, at = known.field("quants"), _FLOAT_BYTES
    for field in known.fields[2:]:
        part = quants & np.uint8((1 << low.bits) - 1) if field is low else quants >> low.bits
        out[:, :, at : at + field.nbytes] = _gather(field, part).reshape(R, blocks, field.nbytes)
        at += field.nbytes
    return out.reshape(R, -1)


def _floats(data: np.ndarray, start: int) -> np.ndarray:
    return np.ascontiguousarray(data[:, start : start + 4]).view(np.float32)


def _spread(field: Field, data: np.ndarray) -> np.ndarray:
    """The integers of a field, uint8 [N, bytes] -> uint8 [N, integers]."""
    if field.bits == 8:
        return data.copy()
    shifts = np.arange(0, 8, field.bits, dtype=np.uint8)[:, None]
    planes = data.reshape(-1, 1, field.run) >> shifts & np.uint8((1 << field.bits) - 1)
    return planes.reshape(len(data), data.shape[1] * 8 // field.bits)


def _gather(field: Field, integers: np.ndarray) -> np.ndarray:
    """The inverse of `_spread`."""
    if field.bits == 8:
        return integers
    planes = integers.reshape(-1, 8 // field.bits, field.run)
    out = planes[:, 0].copy()
    for place in range(1, 8 // field.bits):
        out |= planes[:, place] << np.uint8(place * field.bits)
    return out.reshape(len(integers), integers.shape[1] * field.bits // 8)
