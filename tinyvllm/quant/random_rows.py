"""Random weights in any readable format: rounded where that is quick, else blocks of random bits with scales of the wanted size.

For dummy weights, benchmarks and tests.
"""

from __future__ import annotations

import zlib

import numpy as np

from tinyvllm.quant.codecs import pack, unpack
from tinyvllm.quant.formats import FORMATS, BlockFormat

_HALVES = ("scale", "minimum", "offset")


def packable_width(format: str, I: int) -> int:
    """I, rounded up to whole blocks."""
    step = FORMATS[format].elements
    return -(-I // step) * step


def random_rows(format: str, O: int, I: int, size: float = 1.0, seed: int = 0) -> np.ndarray:
    """uint8 [O, bytes of a row] of a matrix [O, I] of about normal numbers times `size`."""
    known, rng = FORMATS[format], np.random.default_rng([seed, O, I])
    if known.is_rounded_quickly:
        values = rng.standard_normal((O, I)).astype(np.float32) * np.float32(size)
        return pack(format, values.reshape(-1, known.elements)).reshape(O, -1)
    return random_blocks(format, O * I // known.elements, size, seed).reshape(O, -1)


def random_blocks(format: str, count: int, size: float = 1.0, seed: int = 0) -> np.ndarray:
    """uint8 [count, bytes of a block] of random bits, whose numbers have a standard deviation of about `size`."""
    known = FORMATS[format]
    rng = np.random.default_rng([seed, count, zlib.crc32(format.encode()) if known.type_id is None else known.type_id])
    data = rng.integers(0, 256, (count, known.nbytes), dtype=np.uint8)
    starts = _starts(known)
    if "exponent" in starts:
        exponent = 128 + round(np.log2(size / 5.4))  # 5.4: the standard deviation of sixteen values of a float of 4 bits, doubled
        data[:, starts["exponent"]] = rng.integers(exponent - 1, exponent + 2, count)
        return data
    if "e8m0" in starts:
        exponent = 127 + round(np.log2(size / 112))  # 112: the standard deviation of all numbers of e4m3
        data[:, starts["e8m0"]] = rng.integers(exponent - 1, exponent + 2, count)
        return data
    _set_halves(known, data, starts, np.ones(count))
    spread = unpack(format, data).std()
    _set_halves(known, data, starts, size / spread * rng.uniform(0.5, 1.5, count))
    return data


def _starts(known: BlockFormat) -> dict[str, int]:
    out, at = {}, 0
    for field in known.fields:
        out[field.name] = at
        at += field.nbytes
    return out


def _set_halves(known: BlockFormat, data: np.ndarray, starts: dict[str, int], scale: np.ndarray) -> None:
    halves = scale.astype(np.float16)[:, None]
    middle = 1 << sum(field.bits for field in known.fields if field.name in ("quants", "high")) - 1
    for field in known.fields:
        if field.name in _HALVES:
            at = starts[field.name]
            numbers = halves if field.nbytes == 2 else halves.astype(np.float32)
            if field.name == "offset":  # numbers around 0
                numbers = numbers * numbers.dtype.type(-middle)
            elif field.name == "minimum":  # not the scale's bits: a kernel that takes one for the other must be noticed
                numbers = numbers * numbers.dtype.type(0.75)
            data[:, at : at + field.nbytes] = numbers.view(np.uint8)
