"""From the fields of blocks to weights, in plain tinygrad: moves, bitcasts and arithmetic alone, so that any device computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tinygrad import Tensor, dtypes

from tinyvllm.quant.formats import FORMATS, BlockFormat, Field, Scales


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
    scale = _block_scale(known, part)  # [N, blocks]
    N, blocks = (int(d) for d in scale.shape)
    quants = _quants(known, part, N, blocks)  # [N, blocks, elements]
    if known.scales is not None:
        scales, minimums = _DECODERS[known.scales]({name: data.reshape(N, blocks, -1).cast(dtypes.int32) for name, data in part.items()})
        scaled = (scale.unsqueeze(2) * scales).unsqueeze(3) * quants.reshape(N, blocks, int(scales.shape[2]), -1)
        return (scaled if minimums is None else scaled - (_half(part["minimum"]).unsqueeze(2) * minimums).unsqueeze(3)).reshape(N, -1)
    scaled = scale.unsqueeze(2) * quants
    return (scaled + _number(known, part, "offset").unsqueeze(2) if "offset" in part else scaled).reshape(N, -1)


def _block_scale(known: BlockFormat, part: dict[str, Tensor]) -> Tensor:
    if "exponent" in part:
        return _power(part["exponent"])
    if "e8m0" in part:
        return _e8m0(part["e8m0"])
    return _number(known, part, "scale")


def _floats(known: BlockFormat, data: Tensor) -> Tensor:
    if known.dtype == "float32":
        return _little_endian(data, 4).bitcast(dtypes.float32)
    if known.dtype == "bfloat16":
        return (_little_endian(data, 2) << 16).bitcast(dtypes.float32)  # not by the dtype: some devices lack bfloat16
    return _half(data)


def _quants(known: BlockFormat, part: dict[str, Tensor], N: int, blocks: int) -> Tensor:
    """The numbers that the quants of all blocks stand for, zero point subtracted, float32 [N, blocks, elements]."""
    low = known.field("quants")
    if known.e4m3:
        return _e4m3(part["quants"]).reshape(N, blocks, -1)
    quants = _integers(low, part["quants"], N, blocks)
    if "high" in part:
        quants = quants + _integers(known.field("high"), part["high"], N, blocks) * (1 << low.bits)
    if not known.values:
        return (quants - known.zero).cast(dtypes.float32)
    if known.float_values:
        return _float_looked_up(quants, known.values)
    return _looked_up(quants, tuple(int(value) for value in known.values)).cast(dtypes.float32)


def _float_looked_up(quants: Tensor, values: tuple[float, ...]) -> Tensor:
    """values[quants] for sixteen float32: a tree of choices, bit by bit (`_looked_up` says why not a table)."""
    choices = [Tensor(value, dtype=dtypes.float32) for value in values]
    for bit in range(4):
        high = (quants & (1 << bit)) != 0
        choices = [high.where(b, a) for a, b in zip(choices[::2], choices[1::2], strict=True)]
    return choices[0]


def _looked_up(quants: Tensor, values: tuple[int, ...]) -> Tensor:
    """values[quants] for sixteen signed bytes, int32. They are shifted out of four words: a table would be a buffer of its own, and of a
    chain of sixteen choices tinygrad's rewriting does not find an end."""
    words = [sum((value & 255) << (8 * i) for i, value in enumerate(values[at : at + 4])) for at in (0, 4, 8, 12)]
    part, word = quants // 4, Tensor(words[3], dtype=dtypes.uint32)
    for i in (2, 1, 0):
        word = (part == i).where(Tensor(words[i], dtype=dtypes.uint32), word)
    byte = word // (Tensor(1, dtype=dtypes.uint32) << (quants & 3).cast(dtypes.uint32) * 8)
    return ((byte & 255) ^ 128).cast(dtypes.int32) - 128


def _integers(field: Field, data: Tensor, N: int, blocks: int) -> Tensor:
    """The unsigned integers of a field, int32 [N, blocks, elements] (`Field` gives their order)."""
    if field.bits == 8:
        return data.reshape(N, blocks, -1).cast(dtypes.int32)
    runs = data.reshape(N, blocks, -1, field.run)
    planes = [(runs if shift == 0 else runs // (1 << shift)) & ((1 << field.bits) - 1) for shift in range(0, 8, field.bits)]
    return Tensor.stack(*planes, dim=3).reshape(N, blocks, -1).cast(dtypes.int32)


# --- scales of a block's parts: int32 [N, blocks, bytes] of each field -> scales and minimums, float32 [N, blocks, parts]


def _six_bit_pairs(part: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """(`codecs.unpack_q4_k`)"""
    low, high = part["scales"][:, :, :8], part["scales"][:, :, 8:]
    scales = (low[:, :, :4] & 63).cat((high & 15) | ((low[:, :, :4] // 64) * 16), dim=2)
    minimums = (low[:, :, 4:] & 63).cat((high // 16) | ((low[:, :, 4:] // 64) * 16), dim=2)
    return scales.cast(dtypes.float32), minimums.cast(dtypes.float32)


def _six_bits(part: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    low, high = part["scales"][:, :, :8], part["scales"][:, :, 8:]
    nibbles = (low & 15).cat(low // 16, dim=2)
    twos = (high & 3).cat(*((high // (1 << shift)) & 3 for shift in (2, 4, 6)), dim=2)
    return (nibbles + twos * 16 - 32).cast(dtypes.float32), None


def _signed_bytes(part: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    return ((part["scales"] ^ 128) - 128).cast(dtypes.float32), None


def _pairs_of_nibbles(part: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    return (part["scales"] & 15).cast(dtypes.float32), (part["scales"] // 16).cast(dtypes.float32)


def _four_and_two(part: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    low, high = part["scales"], part["scales_high"]
    N, blocks = (int(d) for d in low.shape[:2])
    nibbles = Tensor.stack(low & 15, low // 16, dim=3).reshape(N, blocks, 8)
    twos = Tensor.stack(*((high // (1 << shift)) & 3 for shift in (0, 2, 4, 6)), dim=3).reshape(N, blocks, 8)
    return (nibbles + twos * 16 - 32).cast(dtypes.float32), None


def _e4m3_scales(part: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    return _e4m3(part["scales"]), None


_DECODERS: dict[Scales, Callable[[dict[str, Tensor]], tuple[Tensor, Tensor | None]]] = {
    Scales.SIX_BIT_PAIRS: _six_bit_pairs,
    Scales.SIX_BITS: _six_bits,
    Scales.INT8: _signed_bytes,
    Scales.NIBBLES: _pairs_of_nibbles,
    Scales.FOUR_AND_TWO: _four_and_two,
    Scales.E4M3: _e4m3_scales,
}


def _power(data: Tensor) -> Tensor:
    """uint8 exponents [N, blocks] -> 2^(e - 128), float32; below 2 that is subnormal."""
    e = data.cast(dtypes.uint32)
    return (e < 2).where((e + 1) << 21, (e - (e >= 2).cast(dtypes.uint32)) << 23).bitcast(dtypes.float32)


def _e8m0(data: Tensor) -> Tensor:
    """uint8 exponents [N, blocks] -> 2^(e - 127), float32, 255 a NaN; 0 is subnormal."""
    e = data.cast(dtypes.uint32)
    return (e == 0).where(0x400000, (e << 23) | ((e == 255).cast(dtypes.uint32) << 22)).bitcast(dtypes.float32)


def _e4m3(codes: Tensor) -> Tensor:
    """Unsigned integers below 256, any shape -> the float32 numbers; what files mean as NaN is +-480.

    Subnormals are computed from their integers: a device may take the bits of a subnormal float32 for 0.
    """
    code = codes.cast(dtypes.uint32)
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).bitcast(dtypes.float32)
    size = (magnitude < 8).where(magnitude.cast(dtypes.float32) * 2.0**-9, normal)
    return (code < 128).where(size, -size)


def _number(known: BlockFormat, part: dict[str, Tensor], name: str) -> Tensor:
    """The float16 or float32 of each block, by the field's bytes -> float32 [N, blocks]."""
    if known.field(name).nbytes == 2:
        return _half(part[name])
    return _little_endian(part[name], 4).bitcast(dtypes.float32)


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
