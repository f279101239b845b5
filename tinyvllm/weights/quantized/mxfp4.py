"""Checkpoints with quant_method mxfp4, as gpt-oss is published: the experts of a layer in one tensor.

X_blocks   uint8 [E, O, I / 32, 16]   floats of four bits, even columns in the low halves
X_scales   uint8 [E, O, I / 32]       powers of two

`X` is [E * O, I], the rows in the file's order: of gate_up_proj, rows of gate and up alternate.
"""

from __future__ import annotations

from collections.abc import Mapping

from tinyvllm.foreign import Fields, quoted
from tinyvllm.weights.mapping import BuiltRecord, Record, TensorRecord
from tinyvllm.weights.quantized.checks import refuse, require_shape
from tinyvllm.weights.quantized.floats import codes_of, mxfp4_matrix

_BLOCKS, _SCALES = "_blocks", "_scales"


def tensors(settings: Fields, stored: Mapping[str, TensorRecord]) -> dict[str, Record]:
    names = [name[: -len(_BLOCKS)] for name in stored if name.endswith(_BLOCKS)]
    if not names:
        refuse(f"no file has a tensor 'X{_BLOCKS}', which {settings.where} needs; is it the configuration of another model?")
    parts = {name + suffix for name in names for suffix in (_BLOCKS, _SCALES)}
    return {name: record for name, record in stored.items() if name not in parts} | {name: _matrix(name, stored) for name in names}


def _matrix(name: str, stored: Mapping[str, TensorRecord]) -> BuiltRecord:
    blocks, scales = stored[name + _BLOCKS], stored.get(name + _SCALES)
    if scales is None:
        refuse(f"{quoted(blocks.name)} has no tensor {quoted(name + _SCALES)}; download the files again")
    if len(blocks.shape) != 4 or blocks.shape[3] != 16 or 0 in blocks.shape:
        refuse(f"tensor {quoted(blocks.name)} must have the shape [experts, rows, groups, 16], got {quoted(list(blocks.shape))}")
    require_shape(scales, blocks.shape[:3], "a scale for 32 columns")
    E, O, G, _ = blocks.shape
    rows = TensorRecord(blocks.name, blocks.format, (E * O, G * 16), blocks.data)
    factors = TensorRecord(scales.name, scales.format, (E * O, G), scales.data)
    return mxfp4_matrix(name, rows, codes_of(rows, ("U8",)), factors)
