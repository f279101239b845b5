"""The numbers of the cases, by integer arithmetic: the same bits on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from tinyvllm.integers import round_up
from tinyvllm.quant.codecs import pack
from tinyvllm.quant.formats import FORMATS, GROUPED
from tinyvllm.quant.grouped import pack_groups

_WIDEST_GROUP = 128  # columns: the grouped formats hold the same numbers
PERIOD = 5  # distinct rows; no power of two, so that rows that changed places by one are noticed
FEW, MANY = (4, 3), (24, 19)  # rows of a batch, and how many of them count
MOST = (80, 75)  # of variants whose kernels begin at more rows than MANY
S = 16  # tokens of a KV block
EPS = 1603.5 / 4096  # makes the mean square of `activations` 1
MIXED_COLUMNS = 768  # of a product in several formats: whole blocks of each
OUTPUTS, GATED, VOCABULARY = 50, 48, 70  # neither 50 nor 70 fills panels or tiles
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 32  # of norm_qkv_rope_store
QKV_OUTPUTS = tuple(heads * HEAD_DIM for heads in (HEADS, KV_HEADS, KV_HEADS))
QUERY_HEADS, GROUPS = 4, 2  # of attention
DRAWN = 300  # vocabulary of the draw
ROUTED, ROUTES = 20, 3  # experts that are chosen from, and how many a row has: in norm_route
EXPERTS, EXPERT_OUTPUTS = 3, 16  # whose weights are multiplied
CHOSEN = np.array([[2, 0], [0, 2], [1, 2], [2, 1], [0, 1]], np.int32)  # of each of PERIOD rows
SHARES = np.array([[0.75, 0.25], [0.5, 0.5], [1.0, 0.125], [0.625, 0.375], [0.875, -0.25]], np.float32)

Arrays = dict[str, np.ndarray]
OTHER_BITS = (
    "other bits"  # a result that has no recorded answer: how many numbers differ from those of another kernel that must have the same
)


def integers(seed: int, low: int, high: int, *shape: int) -> np.ndarray:
    """int64 from low to high - 1, by splitmix64 (Steele, Lea and Flood 2014) of the seed and the index."""
    z = np.arange(1, prod(shape) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed << 40)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return np.asarray((z % np.uint64(high - low)).astype(np.int64).reshape(shape) + low)


def numbers(seed: int, *shape: int) -> np.ndarray:
    """float32 k / 64 with |k| <= 127: exact in every float format."""
    return np.asarray(integers(seed, -127, 128, *shape) / 64, np.float32)


def columns(format: str) -> int:
    """Inputs of a product: more than the 512 that GPUs sum in one piece, and not a multiple of 64 where the format allows it."""
    if "+" in format:
        return MIXED_COLUMNS
    return round_up(544, _WIDEST_GROUP if format in GROUPED else FORMATS[format].elements)


def repeated(rows: np.ndarray, T: int) -> np.ndarray:
    """T rows: row t is row t modulo PERIOD."""
    return rows[np.arange(T) % len(rows)]


def activations(I: int) -> np.ndarray:
    """float32 [PERIOD, I], k / 64: pairs on circles, so that each block of 32 has one sum of squares; its first pair has the largest k."""
    circle = np.array([(16, 63), (33, 56), (25, 60), (39, 52)])  # the sums of squares are 65 squared
    pairs = circle[integers(1, 0, 4, PERIOD, I // 2)]
    pairs[:, ::16] = 127, 16
    signs = integers(2, 0, 2, PERIOD, I // 2, 2) * 2 - 1
    swapped: np.ndarray = np.where(integers(3, 0, 2, PERIOD, I // 2, 1) == 1, pairs[..., ::-1], pairs)
    return np.asarray(swapped * signs / 64).astype(np.float32).reshape(PERIOD, I)


def expert_inputs(I: int) -> np.ndarray:
    """float32 [PERIOD, 2, I]: of each of a row's two experts another row of `activations`."""
    rows = activations(I)
    return np.stack([rows, rows[(np.arange(PERIOD) + 2) % PERIOD]], axis=1)


def norm_weight(I: int) -> np.ndarray:
    """float32 [I]: a power of two for each block of 32, and a sign for each number."""
    blocks = 2.0 ** (np.arange(I) // 32 % 3 - 1)
    return np.asarray(blocks * (integers(4, 0, 2, I) * 2 - 1), np.float32)


def table_columns(format: str) -> int:
    """Columns of the embedding table."""
    return round_up(96, _WIDEST_GROUP if format in GROUPED else FORMATS[format].elements)


def token_ids(T: int) -> list[int]:
    """Of T rows of the embedding."""
    return [(VOCABULARY - 1 + 13 * t) % VOCABULARY for t in range(T)]


def parts_of(names: str, sizes: Sequence[int], seed: int, inputs: int = 0) -> list[tuple[str, np.ndarray]]:
    """The projections of a product, each with its format and rows, uint8 [O, bytes], of `inputs` columns if they are not the usual ones.

    `names` as ShapeFacts.format has them: where there are fewer than projections, the first ones share the first.
    """
    formats = names.split("+")
    formats = formats[:1] * (len(sizes) - len(formats)) + formats
    I, ends = inputs or columns(names), np.cumsum(sizes).tolist()
    return [(format, weight_rows(format, ends[-1], I, seed)[end - O : end]) for format, O, end in zip(formats, sizes, ends, strict=True)]


def numbers_of(format: str) -> str:
    """Which numbers `weight_rows` has: formats of one name have the same."""
    return "float" if FORMATS[format].is_float else "grouped" if format in GROUPED else format


def weight_rows(format: str, O: int, I: int, seed: int) -> np.ndarray:
    """uint8 [O, bytes of a row]: numbers below 1 in the float formats, else random bits with scales that are powers of two."""
    known = FORMATS[format]
    if format in GROUPED:
        return _grouped_rows(format, O, I, seed)
    if known.is_float:
        return pack(format, (integers(seed, -63, 64, O * I, 1) / 64).astype(np.float32)).reshape(O, -1)
    blocks = integers(seed, 0, 255, O * I // known.elements, known.nbytes).astype(np.uint8)
    start, scale = 0, 1 / known.zero if known.zero and known.scales is None else 0.5 if known.float_values else 2.0**-9
    for field in known.fields:
        if field.name == "exponent":
            blocks[:, start] = 122 + np.arange(len(blocks)) % 2
        elif field.name in ("scale", "offset", "minimum"):
            value = np.float16(scale if field.name == "scale" else 2.0**-6) * (np.arange(len(blocks)) % 2 + 1)
            blocks[:, start : start + field.nbytes] = value.astype(f"<f{field.nbytes}").view(np.uint8).reshape(-1, field.nbytes)
        elif field.name == "e8m0":
            blocks[:, start] = 118 + np.arange(len(blocks)) % 2
        elif field.flip == 128:  # int8: files have no -128
            quants = blocks[:, start : start + field.nbytes]
            quants[quants == 128] = 129
        start += field.nbytes
    return blocks.reshape(O, -1)


def _grouped_rows(format: str, O: int, I: int, seed: int) -> np.ndarray:
    """The numbers -3, -1, 1, 3 times 1/8 and 1/4 in turn: in even groups by the lowest two bits, in odd ones by the highest two."""
    quants = integers(seed, 0, 4, O * I, 1).astype(np.uint8).reshape(O, -1, _WIDEST_GROUP)
    groups = np.arange(I // _WIDEST_GROUP)
    shift = np.where(groups % 2, int(format[3]) - 2, 0).astype(np.uint8)
    step = np.ldexp(np.float32(0.25), groups % 2).astype(np.float32)
    scales = np.broadcast_to(np.ldexp(step, -shift.astype(np.int32)), (O, len(groups)))
    offsets = np.broadcast_to(step * np.float32(-1.5), (O, len(groups)))
    return pack_groups(format, (quants << shift[:, None]).reshape(O, I), scales, offsets)
