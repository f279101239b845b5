"""The one table of weight formats: block size, fields, memory layouts with kernels, and how products round activations.

Everything that lists formats is derived from this table: the formats that a loader keeps packed, the choices of `--quantization`, what
a backend accepts. A new format is a row here, a header per backend and a test case; one that no file had before also needs a reader
(quant/codecs.py), and one that `--quantization` offers a writer.

A row says which layouts have kernels, not which device runs them: each backend declares the layout that it reads. This file knows no
files, shapes, tensors or devices.
"""

from __future__ import annotations

import functools
from enum import StrEnum
from typing import Any

from tinyvllm.lazy_dataclass import dataclass


class Layout(StrEnum):
    """Where the bytes of a weight matrix are (quant/layouts)."""

    ROWS = "rows"  # as in files
    PANELS = "panels"  # 16 rows interleaved by 32-bit words, for CPU vectors
    TILES = "tiles"  # 16 rows as operands of GPU matrix instructions


class Activations(StrEnum):
    """How a product rounds its activations before it multiplies; sums are float32 (int32 within a block of INT8)."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"  # blocks of 32 with a float32 scale each: absolute maximum / 127, rounded to nearest


class Scales(StrEnum):
    """How the scales of a block's parts are stored in its field `scales`: integers that multiply the block's own scale."""

    INT8 = "int8"
    NIBBLES = "nibbles"  # a byte each: the scale low, the minimum high
    SIX_BITS = "six bits"  # sixteen, 32 added: low nibbles in bytes 0 to 7, two high bits in bytes 8 to 11
    SIX_BIT_PAIRS = "pairs of six bits"  # eight scales and eight minimums in 12 bytes
    FOUR_AND_TWO = "four bits and two bits"  # eight, 32 added: nibbles in `scales`, two high bits in `scales_high`
    E4M3 = "e4m3"  # small floats, as E4M3 says


@dataclass(frozen=True)
class Field:
    """A part of a block, which panels and tiles move as one unit.

    A field of integers packs 8 / `bits` of them into a byte. The lowest bits of a run of `run` bytes come first: number j of byte w of
    a run is element j * run + w of that run. `flip` is XORed with every byte in panels and before decoding: 128 turns int8 into
    uint8 with zero point 128.
    """

    name: str
    nbytes: int
    bits: int = 8
    run: int = 1
    flip: int = 0

    @property
    def word(self) -> int:
        """Bytes of a row that stay together in a panel."""
        return 4 if self.nbytes % 4 == 0 else self.nbytes


@dataclass(frozen=True)
class BlockFormat:
    """One way of storing weights: `elements` weights take `nbytes` bytes.

    type_id       ggml's number of the type; None for a format that no GGUF file has
    fields        the parts of a block in file order; BF16 has a pair of numbers for one, because processors multiply pairs, and panels
                  keep a pair together; () where no layout needs them yet
    zero          what is subtracted from the unsigned quants: weight = scale * (quant - zero) [+ offset] [- minimum]
    values        what the quants stand for, instead of quant - zero: small integers, or float32 numbers
    e4m3          whether the quants are floats: sign, four bits of exponent, three of mantissa, bias 7. All 256 are numbers, also the two
                  that others read as NaN (+-480): what has a NaN gets a scale that is one
    scales        how the scales of the block's parts are stored, if it has parts
    layouts       layouts in which kernels compute products with it; () means it is unpacked at load
    activations   how products with panels or tiles round x; products with rows multiply float32
    quantization  whether `--quantization` offers to pack matrices so at load
    dtype         of a float format: its name in tinygrad
    tolerance     the relative error of a layer up to which `verify` accepts its kernels: products with packed weights round activations
                  to int8 or bfloat16, and two orders of a norm's sum now and then round a number to different sides; float32 has only
                  the order of sums. Measured on the test models: docs/verify.md
    """

    name: str
    type_id: int | None
    elements: int
    nbytes: int
    fields: tuple[Field, ...] = ()
    zero: int = 0
    values: tuple[int, ...] | tuple[float, ...] = ()
    e4m3: bool = False
    scales: Scales | None = None
    layouts: frozenset[Layout] = frozenset()
    activations: Activations = Activations.FLOAT32
    quantization: bool = False
    dtype: str | None = None
    tolerance: float = 1e-2

    @property
    def is_float(self) -> bool:
        return self.dtype is not None

    @property
    def float_values(self) -> bool:
        """Whether the quants stand for float32 numbers."""
        return any(isinstance(value, float) for value in self.values)

    @property
    def is_rounded_quickly(self) -> bool:
        """Whether a writer rounds its numbers at once: floats, and one scale a block that the largest number gives. Others search."""
        return self.is_float or (self.quantization and self.zero > 0 and self.scales is None)

    def field(self, name: str) -> Field:
        return next(field for field in self.fields if field.name == name)


_UNROUNDED = 2e-3  # `tolerance` of packed weights where x is not rounded
_ROWS = frozenset({Layout.ROWS})
_PANELS = frozenset({Layout.PANELS})
_ROWS_PANELS = _ROWS | _PANELS
_ALL = frozenset(Layout)
_BF16, _INT8 = Activations.BFLOAT16, Activations.INT8

_SCALE = Field("scale", 2)  # float16; float32 where it has four bytes
_OFFSET = Field("offset", 2)  # float16, added to scale * quant
_MINIMUM = Field("minimum", 2)  # float16; times a part's minimum, subtracted
_FIFTH = Field("high", 4, bits=1)  # fifth bits of 32 quants
_EIGHTS = Field("quants", 32, flip=128)
_NIBBLES = Field("quants", 16, bits=4, run=16)
_PAIRS = Field("scales", 12)
_K_BITS = Field("high", 32, bits=1, run=32)
_K_TWOS = Field("quants", 64, bits=2, run=32)
_K_NIBBLES = Field("quants", 128, bits=4, run=32)
_Q6_FIELDS = (Field("quants", 128, bits=4, run=64), Field("high", 64, bits=2, run=32), Field("scales", 16), _SCALE)
_IQ4_XS_FIELDS = (_SCALE, Field("scales_high", 2), Field("scales", 4), Field("quants", 128, bits=4, run=16))
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice e2m1's numbers


_FLOAT_SCALE = Field("scale", 4)  # float32
_NVFP4_FIELDS = (_FLOAT_SCALE, Field("scales", 8), Field("quants", 64, bits=4, run=16))
# bitsandbytes' numbers of four bits: quantiles of the normal distribution (arXiv:2305.14314, appendix E), and a float with subnormals.
_NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_BNB_FP4 = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)
_BNB_FP4_VALUES = (*_BNB_FP4, *(-value for value in _BNB_FP4))
_FP8 = {"e4m3": True, "activations": _BF16, "tolerance": 1e-2}
_BNB: dict[str, Any] = {"activations": Activations.FLOAT32, "tolerance": 2e-3}


def _packed(name: str, type_id: int | None, elements: int, nbytes: int, *fields: Field, **more: Any) -> BlockFormat:
    """A format of integers in every layout; products with panels and tiles round x to int8."""
    usual: dict[str, Any] = {"layouts": _ALL, "activations": _INT8, "tolerance": 3e-2, "quantization": type_id is not None}
    return BlockFormat(name, type_id, elements, nbytes, fields, **usual | more)


# Of integers in groups: 32 of them, one after the other, are a part of a product, so runs are within 32.
_GROUPED_BITS = (2, 3, 4, 5, 6, 8)
_GROUP_SIZES = (128, 64, 32)
_LOW_BITS = {2: (2, 8), 3: (2, 8), 4: (4, 16), 5: (4, 16), 6: (4, 16), 8: (8, 1)}  # bits and run of `quants`; `high` has the other bits
_HIGH_RUNS = {1: 4, 2: 8}


def _grouped(bits: int, group: int) -> BlockFormat:
    """Unsigned integers of `bits` bits, `group` of them with one scale and one offset: the internal form of checkpoints (decision 32)."""
    low, run = _LOW_BITS[bits]
    scale, offset, quants = Field("scale", 4), Field("offset", 4), Field("quants", group * low // 8, low, run)
    high = () if bits == low else (Field("high", group * (bits - low) // 8, bits - low, _HIGH_RUNS[bits - low]),)
    return _packed(grouped_name(bits, group), None, group, 8 + group * bits // 8, scale, offset, *high, quants)


def grouped_name(bits: int, group: int) -> str:
    return f"INT{bits}_G{group}"


_TABLE = (
    #           name   id   elements, bytes
    BlockFormat("F32", 0, 1, 4, (Field("numbers", 4),), layouts=_ROWS_PANELS, dtype="float32", tolerance=1e-4),
    BlockFormat("F16", 1, 1, 2, (Field("numbers", 2),), layouts=_ALL, dtype="float16", tolerance=2e-3),
    BlockFormat("BF16", 30, 1, 2, (Field("numbers", 4),), layouts=_ALL, activations=_BF16, dtype="bfloat16", tolerance=1e-2),
    _packed("Q8_0", 8, 32, 34, _SCALE, _EIGHTS, zero=128),
    _packed("Q4_0", 2, 32, 18, _SCALE, _NIBBLES, zero=8),
    _packed("Q5_0", 6, 32, 22, _SCALE, _FIFTH, _NIBBLES, zero=16),
    _packed("Q4_1", 3, 32, 20, _SCALE, _OFFSET, _NIBBLES),
    _packed("Q5_1", 7, 32, 24, _SCALE, _OFFSET, _FIFTH, _NIBBLES),
    _packed("Q2_K", 10, 256, 84, Field("scales", 16), _K_TWOS, _SCALE, _MINIMUM, scales=Scales.NIBBLES),
    _packed("Q3_K", 11, 256, 110, _K_BITS, _K_TWOS, _PAIRS, _SCALE, zero=4, scales=Scales.SIX_BITS),
    _packed("Q4_K", 12, 256, 144, _SCALE, _MINIMUM, _PAIRS, _K_NIBBLES, scales=Scales.SIX_BIT_PAIRS),
    _packed("Q5_K", 13, 256, 176, _SCALE, _MINIMUM, _PAIRS, _K_BITS, _K_NIBBLES, scales=Scales.SIX_BIT_PAIRS),
    _packed("Q6_K", 14, 256, 210, *_Q6_FIELDS, zero=32, scales=Scales.INT8),
    _packed("IQ4_NL", 20, 32, 18, _SCALE, _NIBBLES, values=_IQ4_VALUES),
    _packed("IQ4_XS", 23, 256, 136, *_IQ4_XS_FIELDS, values=_IQ4_VALUES, scales=Scales.FOUR_AND_TWO),
    _packed("MXFP4", 39, 32, 17, Field("exponent", 1), _NIBBLES, values=_FP4_VALUES),
    *(_grouped(bits, group) for bits in _GROUPED_BITS for group in _GROUP_SIZES),
    # Of checkpoints other than GGUF: a group's float32 scale with its numbers.
    _packed("FP8_G128", None, 128, 132, _FLOAT_SCALE, Field("quants", 128), **_FP8),
    _packed("MXFP8", None, 32, 33, Field("e8m0", 1), Field("quants", 32), **_FP8),
    _packed("NVFP4_G128", None, 128, 76, *_NVFP4_FIELDS, values=_FP4_VALUES, scales=Scales.E4M3),
    _packed("NF4", None, 64, 36, _FLOAT_SCALE, Field("quants", 32, bits=4), values=_NF4_VALUES, **_BNB),
    _packed("BNB_FP4", None, 64, 36, _FLOAT_SCALE, Field("quants", 32, bits=4), values=_BNB_FP4_VALUES, **_BNB),
    # Unpacked at load: no layout has kernels for them.
    BlockFormat("IQ1_S", 19, 256, 50),
    BlockFormat("IQ1_M", 29, 256, 56),
    BlockFormat("IQ2_XXS", 16, 256, 66),
    BlockFormat("IQ2_XS", 17, 256, 74),
    BlockFormat("IQ2_S", 22, 256, 82),
    BlockFormat("IQ3_XXS", 18, 256, 98),
    BlockFormat("IQ3_S", 21, 256, 110),
    BlockFormat("TQ1_0", 34, 256, 54),
    BlockFormat("TQ2_0", 35, 256, 66),
    BlockFormat("NVFP4", 40, 64, 36, values=_FP4_VALUES),
    BlockFormat("Q1_0", 41, 128, 18),
    # Known by size alone: a file may hold such tensors, but no model can be loaded from them.
    BlockFormat("Q8_1", 9, 32, 40),
    BlockFormat("Q8_K", 15, 256, 292),
    BlockFormat("I8", 24, 1, 1),
    BlockFormat("I16", 25, 1, 2),
    BlockFormat("I32", 26, 1, 4),
    BlockFormat("I64", 27, 1, 8),
    BlockFormat("F64", 28, 1, 8),
)

FORMATS: dict[str, BlockFormat] = {format.name: format for format in _TABLE}
FORMATS_BY_TYPE_ID: dict[int, BlockFormat] = {format.type_id: format for format in _TABLE if format.type_id is not None}
FLOATS = tuple(format.name for format in _TABLE if format.is_float)
QUANTIZATIONS = tuple(format.name for format in _TABLE if format.quantization)


def grouped_format(bits: int, group: int, columns: int) -> str | None:
    """The format that holds integers of `bits` bits, 1 to 8, in groups of `group` columns, without a change; None if there is none.

    Its groups divide those of the checkpoint and the columns: a scale of more columns is repeated.
    """
    width = next((known for known in _GROUPED_BITS if known >= bits), None)
    size = next((known for known in _GROUP_SIZES if columns % known == 0 and group % known == 0), None)
    return None if width is None or size is None else grouped_name(width, size)


GROUPED = tuple(grouped_name(bits, group) for bits in _GROUPED_BITS for group in _GROUP_SIZES)


@functools.cache
def formats_in(layout: Layout) -> tuple[str, ...]:
    """Names of the formats that kernels multiply in this layout, floats first."""
    return tuple(format.name for format in _TABLE if layout in format.layouts)


def packed_in(layout: Layout) -> tuple[str, ...]:
    """`formats_in` without the floats: those that a loader keeps as a file stores them."""
    return tuple(name for name in formats_in(layout) if not FORMATS[name].is_float)


def activations_of(format: str, layout: Layout) -> Activations:
    """How a product with a matrix of this format and layout rounds its activations."""
    return Activations.FLOAT32 if layout is Layout.ROWS else FORMATS[format].activations


def tolerance_of(format: str, layout: Layout) -> float:
    """The relative error of a layer up to which `verify` accepts kernels that read a matrix of this format in this layout."""
    known = FORMATS[format]
    return known.tolerance if known.is_float or layout is not Layout.ROWS else _UNROUNDED
