"""Weights in tiles, prepared x, and the expected product of the two, in numpy: the layouts of kernels/cuda/include/product.cuh."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.formats import sampled_formats
from tests.kernels.calling import aligned
from tinyvllm.quant.codecs import bf16_to_f32, f32_to_bf16, pack, unpack
from tinyvllm.quant.formats import FORMATS, Activations, Layout
from tinyvllm.quant.layouts import pack_tiles
from tinyvllm.quant.random_rows import random_blocks

FLOATS = ("BF16", "F16")
QUANTS = tuple(name for name in sampled_formats(Layout.TILES) if name not in FLOATS)
TILED = (*FLOATS, *QUANTS)
USUAL = ("BF16", "F16", "Q8_0", "Q4_0")  # run through every shape; the others through those that their headers depend on
KINDS = (*USUAL, "Q5_1", "Q2_K", "Q4_K", "Q6_K", "MXFP4", "FP8_G128", "NF4")  # one for each way through the headers of products
HALF_SUMS = ("Q2_K",)  # has minimums of 16 weights: the sums of x are those of both halves of a group
TOLERANCE = 2e-6  # of the sum of the absolute products: float32 sums of at largest a few thousand


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal float32 numbers, the same for the same shape and seed."""
    return laid(np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32))


def laid(array: np.ndarray) -> np.ndarray:
    """A copy aligned to a cache line."""
    return aligned(array.shape, array.dtype, array)


# --- weights


@dataclass(frozen=True, eq=False)
class Tiled:
    """A weight matrix: `rows` uint8 [O, bytes] as in a file, `tiles` uint8 as kernels read them, `values` float64 [O, I]."""

    format: str
    rows: np.ndarray
    tiles: np.ndarray
    values: np.ndarray


def tiled(weight: np.ndarray, format: str) -> Tiled:
    """float32 [O, I] in one of the usual formats; random blocks of the others, whose packers search."""
    (O, I), known = weight.shape, FORMATS[format]
    if format in USUAL:
        rows = pack(format, np.ascontiguousarray(weight.reshape(-1, known.elements))).reshape(O, -1)
    else:
        rows = random_blocks(format, O * I // known.elements, seed=int(abs(weight[0, 0]) * 1000)).reshape(O, -1)
    values = unpack(format, rows.reshape(-1, known.nbytes)).reshape(O, I)
    return Tiled(format, rows, laid(pack_tiles(format, rows)), values.astype(np.float64))


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


# --- x


def quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [T, I] -> (int8 [T, I / 32, 32], their float32 scales [T, I / 32])."""
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(-1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(largest > 1e-36, np.float32(127) / largest, np.float32(0)).astype(np.float32)
    return np.rint(blocks * inverse[..., None]).astype(np.int8), largest / np.float32(127)


def as_rounded(x: np.ndarray, format: str) -> np.ndarray:
    """float32 [T, I] -> float64 [T, I]: x rounded as for a product with weights of this format."""
    if FORMATS[format].activations is Activations.BFLOAT16:
        return bf16_to_f32(f32_to_bf16(x)).astype(np.float64)
    if format == "F16":
        return x.astype(np.float16).astype(np.float64)
    if FORMATS[format].activations is Activations.FLOAT32:
        return x.astype(np.float64)
    quants, scales = quantized(x)
    return (quants * scales[..., None].astype(np.float64)).reshape(x.shape)


def row_bytes_of_32(format: str) -> int:
    """Bytes of 32 columns of a row of x."""
    known = FORMATS[format]
    return 40 if known.activations is Activations.INT8 else 136 if known.float_values else 64


def has_scales(format: str) -> bool:
    """Whether x has scales."""
    return FORMATS[format].activations is Activations.INT8 or FORMATS[format].float_values


def prepared_bytes(format: str, T: int, I: int) -> int:
    """Bytes of T prepared rows of x, T rounded up to a multiple of 8."""
    return -(-T // 8) * (I // 32) * 8 * row_bytes_of_32(format)


def prepared(x: np.ndarray, format: str) -> np.ndarray:
    """float32 [T, I], T padded to a multiple of 8 with zeros -> uint8 [prepared_bytes]."""
    padded = np.zeros((-(-len(x) // 8) * 8, x.shape[1]), np.float32)
    padded[: len(x)] = x
    if format in FLOATS:
        halves = f32_to_bf16(padded) if format == "BF16" else padded.astype(np.float16)
        return _bytes(halves.reshape(-1, 8, x.shape[1] // 32, 2, 2, 4, 2).transpose(0, 2, 1, 5, 3, 4, 6))
    if FORMATS[format].e4m3:  # columns in the order 0 2 1 3
        halves = f32_to_bf16(padded).reshape(-1, 8, x.shape[1] // 32, 2, 4, 2, 2)
        return _bytes(halves.transpose(0, 2, 1, 4, 3, 6, 5))
    if FORMATS[format].float_values:  # high and low halves of x times a power of two; TABLE_EXPONENT is 8
        blocks = padded.reshape(len(padded), -1, 32)
        exponents = np.maximum((np.abs(blocks).max(-1).view(np.int32) >> 23), 23)
        scaled = blocks * np.ldexp(np.float32(1), 141 - exponents)[..., None]
        planes = np.stack([scaled.astype(np.float16), (scaled - scaled.astype(np.float16).astype(np.float32)).astype(np.float16)], axis=2)
        ordered = planes.reshape(-1, 8, x.shape[1] // 32, 2, 4, 8).transpose(0, 2, 1, 4, 3, 5)
        return _with_scales(ordered, np.ldexp(np.float32(1), exponents - 149).astype(np.float32), np.zeros(exponents.shape, np.int32))
    quants, scales = quantized(padded)
    ordered = quants.reshape(-1, 8, x.shape[1] // 32, 2, 4, 4).transpose(0, 2, 1, 4, 3, 5)
    first, second = quants[..., :16].sum(-1, dtype=np.int32), quants[..., 16:].sum(-1, dtype=np.int32)
    sums = (first & 0xFFFF) | second << 16 if format in HALF_SUMS else first + second
    return _with_scales(ordered, scales, sums)


def _with_scales(numbers: np.ndarray, scales: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """The bytes of numbers, then of the scales and sums [T, I / 32] of their groups."""
    words = [words.reshape(-1, 8, words.shape[1]).transpose(0, 2, 1) for words in (scales.view(np.int32), sums)]
    return np.concatenate([_bytes(numbers), _bytes(np.stack(words, axis=2))])


# --- expected results


def product(x: np.ndarray, weight: Tiled) -> tuple[np.ndarray, np.ndarray]:
    """x float32 [T, I] times weight transposed, and the sums of the absolute products, both float64 [T, O]."""
    rounded = as_rounded(x, weight.format)
    return rounded @ weight.values.T, np.abs(rounded) @ np.abs(weight.values).T


def rms_normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """float32 [T, E] in the order of include/norm.cuh, so that what is rounded afterwards is rounded to the same numbers."""
    T, E = x.shape
    wide = np.zeros((T, -(-E // 1024) * 1024), np.float64)
    wide[:, :E] = x
    sums = np.zeros((T, 256), np.float32)
    for four in wide.reshape(T, -1, 256, 4).transpose(1, 3, 0, 2).reshape(-1, T, 256):
        sums = (four * four + sums).astype(np.float32)
    for apart in (16, 8, 4, 2, 1):
        sums = sums + sums[:, np.arange(256) ^ apart]
    total = sums[:, 0]
    for part in range(1, 8):
        total = total + sums[:, 32 * part]
    inverse = np.float32(1) / np.sqrt(total / np.float32(E) + np.float32(eps))
    return x * inverse[:, None] * weight


def close(got: np.ndarray, want: np.ndarray, size: np.ndarray, tolerance: float = TOLERANCE) -> None:
    """Off by at largest `tolerance` of `size`, the sums of absolute products."""
    off = np.abs(got - want) / (size + 1e-30)
    assert off.max(initial=0) < tolerance, f"off by {off.max():.2e} at {np.unravel_index(off.argmax(), off.shape)}"


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    """float32 arrays of one shape with the same bits everywhere."""
    differ = np.argwhere(a.view(np.uint32) != b.view(np.uint32))
    assert not len(differ), f"{len(differ)} of {a.size} differ, the first at {tuple(differ[0])}"


def untouched(array: np.ndarray) -> bool:
    """Whether every byte is still the poison of `aligned`."""
    return bool((np.ascontiguousarray(array).view(np.uint8) == 0xFF).all())


def one(value: int) -> np.ndarray:
    return np.array([value], np.int32)
