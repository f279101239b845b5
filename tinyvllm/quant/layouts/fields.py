"""From the fields of blocks to weights, in plain tinygrad: moves, bitcasts and arithmetic alone, so that any device computes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tinygrad import Tensor, dtypes

from tinyvllm.quant.formats import FORMATS, BlockFormat, Field


def unit_bytes(format: str) -> int:
    """Bytes of one run of the format's fields: a block, or for BF16 a pair of numbers."""
    return sum(field.nbytes for field in FORMATS[format].fields)


def spans(format: str) -> Iterator[tuple[Field, int, int]]:
    """Each field with the first byte of its own and the one after its last, in a run of fields."""
    start = 0
    for field in FORMATS[format].fields:
        yield field, start, start + field.nbytes
        start += field.nbytes


def weights(format: str, fields: Sequence[Tensor]) -> Tensor:
    """The bytes of each field of N rows, uint8 [N, blocks * field.nbytes], flipped where the field says so -> float32 [N, I]."""
    known = FORMATS[format]
    if known.is_float:
        return _floats(known, fields[0])
    part = {field.name: data for field, data in zip(known.fields, fields, strict=True)}
    scale = _half(part["scale"])  # [N, blocks]
    N, blocks = (int(d) for d in scale.shape)
    quants = _quants(known, part, N, blocks)  # [N, blocks, elements]
    if "scales" in part:
        scales, minimums = _six_bits(part["scales"].reshape(N, blocks, -1))  # [N, blocks, sub-blocks]
        scaled = (scale.unsqueeze(2) * scales).unsqueeze(3) * quants.reshape(N, blocks, int(scales.shape[2]), -1)
        return (scaled - (_half(part["minimum"]).unsqueeze(2) * minimums).unsqueeze(3)).reshape(N, -1)
    scaled = scale.unsqueeze(2) * quants
    return (scaled + _half(part["offset"]).unsqueeze(2) if "offset" in part else scaled).reshape(N, -1)


def _floats(known: BlockFormat, data: Tensor) -> Tensor:
    if known.dtype == "float32":
        return _little_endian(data, 4).bitcast(dtypes.float32)
    if known.dtype == "bfloat16":
        return (_little_endian(data, 2) << 16).bitcast(dtypes.float32)  # not by the dtype: some devices lack bfloat16
    return _half(data)


def _quants(known: BlockFormat, part: dict[str, Tensor], N: int, blocks: int) -> Tensor:
    """The whole numbers of all blocks, zero point subtracted, float32 [N, blocks, elements]."""
    low = known.field("quants")
    quants = _integers(low, part["quants"], N, blocks)
    if "high" in part:
        quants = quants + _integers(known.field("high"), part["high"], N, blocks) * (1 << low.bits)
    return (quants - known.zero).cast(dtypes.float32)


def _integers(field: Field, data: Tensor, N: int, blocks: int) -> Tensor:
    """The unsigned integers of a field, int32 [N, blocks, elements] (`Field` gives their order)."""
    if field.bits == 8:
        return data.reshape(N, blocks, -1).cast(dtypes.int32)
    runs = data.reshape(N, blocks, -1, field.run)
    planes = [(runs if shift == 0 else runs // (1 << shift)) & ((1 << field.bits) - 1) for shift in range(0, 8, field.bits)]
    return Tensor.stack(*planes, dim=3).reshape(N, blocks, -1).cast(dtypes.int32)


def _six_bits(data: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [N, blocks, 12] -> eight scales and eight minimums, float32 [N, blocks, 8] (`codecs.unpack_q4_k`)."""
    six = data.cast(dtypes.int32)
    low, high = six[:, :, :8], six[:, :, 8:]
    scales = (low[:, :, :4] & 63).cat((high & 15) | ((low[:, :, :4] // 64) * 16), dim=2)
    minimums = (low[:, :, 4:] & 63).cat((high // 16) | ((low[:, :, 4:] // 64) * 16), dim=2)
    return scales.cast(dtypes.float32), minimums.cast(dtypes.float32)


def _half(data: Tensor) -> Tensor:
    """uint8 [N, numbers * 2] -> float32 [N, numbers]"""
    return _little_endian(data, 2).cast(dtypes.uint16).bitcast(dtypes.float16).cast(dtypes.float32)


def _little_endian(data: Tensor, size: int) -> Tensor:
    """uint8 [N, numbers * size] -> uint32 [N, numbers]"""
    each = data.reshape(int(data.shape[0]), -1, size).cast(dtypes.uint32)
    out = each[:, :, 0]
    for place in range(1, size):
        out = out | (each[:, :, place] << (8 * place))
    return out
