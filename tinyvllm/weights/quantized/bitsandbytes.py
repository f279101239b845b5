"""Checkpoints of bitsandbytes: floats of four bits from a table, NF4 and FP4, and integers of eight (LLM.int8).

Four bits, W being X.weight:

    W                     uint8 [O * I / 2, 1]   the high half of a byte first, through all rows
    W.absmax              float32 for each `blocksize` weights; nested: uint8, which stand for
                          nested_quant_map[absmax] * nested_absmax[block / nested_blocksize] + nested_offset
    W.quant_map           float32 [16]
    W.nested_absmax, W.nested_quant_map
    W.quant_state.bitsandbytes__nf4 (or fp4)     uint8: JSON with quant_type, blocksize, shape and the nested sizes

Eight bits: X.weight int8 [O, I] and X.SCB float32 [O]: weight = quant * SCB / 127. bitsandbytes multiplies some columns of x in 16 bits;
here all of x has 8 bits, in blocks of 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields, parse_json, quoted
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.quant.formats import FORMATS
from tinyvllm.weights.mapping import BuiltRecord, Record, TensorRecord
from tinyvllm.weights.quantized.checks import MAX_GROUP, part, refuse, require_rank, require_shape, stems
from tinyvllm.weights.quantized.floats import nibbles
from tinyvllm.weights.quantized.integers import Integers, Rows, equal_groups, float32_of, floats_of

_STATE = "weight.quant_state.bitsandbytes__"
_MAX_STATE = 1 << 16  # bytes of JSON; published ones have 200
_FORMATS = {"nf4": "NF4", "fp4": "BNB_FP4"}
_PARTS = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")
_GROUP = 64
READ_AT_OPENING = ("quant_map", "weight_format", *(f"bitsandbytes__{kind}" for kind in _FORMATS))  # see kinds.py


def tensors(settings: Fields, stored: Mapping[str, TensorRecord]) -> dict[str, Record]:
    """The tensors of a model: each `X.weight` in place of the codes and what belongs to them."""
    out: dict[str, Record] = dict(stored)
    small = {name[: name.index(_STATE) - 1]: name for name in stored if f".{_STATE}" in name}
    large = stems(stored, "SCB")
    if not small and not large:
        refuse(f"no file has a quant_state or an SCB, which {settings.where} needs; is it the configuration of another model?")
    if orphans := [name for name in stored if name.endswith((".absmax", ".quant_map")) and name.rsplit(".weight", 1)[0] not in small]:
        refuse(f"tensor {quoted(orphans[0])} has no {_STATE}nf4 next to it; download the files again")
    for stem, state in small.items():
        for name in (state, *(f"{stem}.{suffix}" for suffix in _PARTS)):
            out.pop(name, None)
        out[f"{stem}.weight"] = _four_bits(stem, stored, stored[state])
    for stem in large:
        for suffix in ("SCB", "weight_format"):
            out.pop(f"{stem}.{suffix}", None)
        out[f"{stem}.weight"] = _eight_bits(stem, stored)
    return out


# --- four bits


@dataclass(frozen=True)
class _State:
    """What the JSON next to the codes says."""

    kind: str
    blocksize: int
    shape: tuple[int, int]
    nested_blocksize: int
    nested_offset: float


def _state(record: TensorRecord, stem: str) -> _State:
    kind = record.name.rsplit("__", 1)[1]
    if kind not in _FORMATS:
        raise ModelError(f"bitsandbytes: quant_type {quoted(kind)} is not supported; supported are {', '.join(_FORMATS)} ({quoted(stem)})")
    if record.format != "U8" or record.nbytes > _MAX_STATE:
        refuse(f"tensor {quoted(record.name)} must be at most {_MAX_STATE} bytes, uint8, got {record.nbytes} of {record.format}")
    try:
        values = parse_json(record.data.tobytes())
    except ValueError as error:
        refuse(f"tensor {quoted(record.name)} cannot be read as JSON: {error}")
    if not isinstance(values, Mapping):
        refuse(f"tensor {quoted(record.name)} must hold a JSON object, got {type(values).__name__}")
    fields = Fields(values, where=record.name)
    shape = fields.integers("shape")
    if len(shape) != 2 or min(shape) < 1 or fields.get("quant_type", kind) != kind:
        got = f"{quoted(fields.get('quant_type'))} of shape {quoted(list(shape))}"
        refuse(f"tensor {quoted(record.name)} must describe a matrix of {kind}, got {got}")
    sizes = [fields.integer(key, default, low=1, high=MAX_GROUP) for key, default in (("blocksize", None), ("nested_blocksize", 256))]
    return _State(kind, sizes[0], (shape[0], shape[1]), sizes[1], fields.number("nested_offset", 0.0))


def _four_bits(stem: str, stored: Mapping[str, TensorRecord], described: TensorRecord) -> BuiltRecord:
    state = _state(described, stem)
    O, I = state.shape
    codes, absmax, table = (part(stored, stem, suffix) for suffix in _PARTS[:3])
    size = -(-O * I // 2)
    if codes.format != "U8" or prod(codes.shape) != size:
        got = f"{codes.format} {quoted(list(codes.shape))}"
        refuse(f"tensor {quoted(codes.name)} must have the {size} bytes of [{O}, {I}], got {got}")
    require_shape(absmax, (-(-O * I // state.blocksize),), f"a scale for {state.blocksize} weights")
    require_shape(table, (16,), "the numbers of four bits")
    scales, more = _scales(stem, stored, state, absmax)
    values = float32_of(table, floats_of(table))
    sources = (codes, absmax, table, *more, described)
    usual = FORMATS[_FORMATS[state.kind]]
    same = np.array_equal(values, np.array(usual.values, np.float32))
    reason = "" if same else f"a quant_map that is not that of {state.kind}"
    if state.blocksize % _GROUP or I % _GROUP:
        reason = f"a scale for {state.blocksize} weights, {I} columns: not multiples of {_GROUP}"
    quants = codes.data.reshape(-1)

    def build(first: int, end: int) -> np.ndarray:
        groups = np.arange(first * I // _GROUP, end * I // _GROUP)
        factors = scales[groups * _GROUP // state.blocksize][:, None].astype("<f4").view(np.uint8)
        numbers = quants[first * I // 2 : end * I // 2].reshape(-1, _GROUP // 2)
        blocks = np.concatenate([factors, numbers << 4 | numbers >> 4], axis=1)  # our formats have the low half first
        return blocks.reshape(end - first, -1)

    def floats(first: int, end: int) -> np.ndarray:
        low, high = first * I, end * I
        swapped = quants[low // 2 : -(-high // 2), None]
        numbers = values[nibbles(swapped << 4 | swapped >> 4).reshape(-1)[low % 2 :][: high - low]]
        numbers *= scales[np.arange(low, high) // state.blocksize]
        return np.ascontiguousarray(numbers.reshape(end - first, I), "<f4").view(np.uint8)

    if reason:
        return BuiltRecord(codes.name, "F32", (O, I), sources, floats, reason)
    return BuiltRecord(codes.name, usual.name, (O, I), sources, build)


def _scales(
    stem: str, stored: Mapping[str, TensorRecord], state: _State, absmax: TensorRecord
) -> tuple[np.ndarray, tuple[TensorRecord, ...]]:
    """The scale of each block, float32, and the tensors that it comes from in addition."""
    if absmax.format != "U8":
        return float32_of(absmax, floats_of(absmax)), ()
    outer, table = part(stored, stem, _PARTS[3]), part(stored, stem, _PARTS[4])
    require_shape(outer, (-(-absmax.shape[0] // state.nested_blocksize),), f"a scale for {state.nested_blocksize} scales")
    require_shape(table, (256,), "the numbers of eight bits")
    factors, values = float32_of(outer, floats_of(outer)), float32_of(table, floats_of(table))
    blocks = np.arange(absmax.shape[0]) // state.nested_blocksize
    scales: np.ndarray = values[absmax.data] * factors[blocks] + np.float32(state.nested_offset)
    return scales, (outer, table)


# --- eight bits


def _eight_bits(stem: str, stored: Mapping[str, TensorRecord]) -> BuiltRecord:
    weight, scale = part(stored, stem, "weight"), part(stored, stem, "SCB")
    require_rank(weight, 2)
    O, I = weight.shape
    require_shape(scale, (O,), "a scale for each row")
    if weight.format != "I8":
        refuse(f"tensor {quoted(weight.name)} must be I8, got {weight.format}")
    order = stored.get(f"{stem}.weight_format")
    if order is not None and order.data.any():
        raise ModelError(
            f"bitsandbytes: {quoted(order.name)} is {quoted(order.data[:8].tolist())}, rows in a GPU's order, which is not supported"
        )
    quants, factors = weight.data.reshape(O, I), floats_of(scale)

    def read(first: int, end: int) -> Rows:
        step = float32_of(scale, factors[first:end])[:, None] / np.float32(127)
        return quants[first:end] ^ np.uint8(128), step, step * np.float32(-128)

    return Integers(weight.name, (O, I), 8, equal_groups(I, -1), (weight, scale), read).record()
