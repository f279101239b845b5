"""compressed-tensors' checkpoints with small floats.

float-quantized (naive-quantized):

    X.weight        float8 e4m3 [O, I]
    X.weight_scale  [O, 1], one number, [O, I / group_size], or one for each block of `block_structure`

nvfp4-pack-quantized, mxfp4-pack-quantized and mxfp8-quantized:

    X.weight_packed        uint8 [O, I / 2]   floats of four bits, even columns in the low halves (mxfp8: X.weight, float8 e4m3 [O, I])
    X.weight_scale         float8 e4m3 [O, I / 16], or uint8 [O, I / 32]: powers of two
    X.weight_global_scale  float32 [1]        nvfp4: a divisor of all scales

Scales of activations and caches are not used: activations are not rounded to floats of a few bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tinyvllm.errors import ModelError
from tinyvllm.foreign import quoted
from tinyvllm.weights.mapping import BuiltRecord, TensorRecord
from tinyvllm.weights.quantized.checks import part, refuse, require_rank
from tinyvllm.weights.quantized.compressed_scheme import Scheme, unsupported
from tinyvllm.weights.quantized.floats import codes_of, mxfp4_matrix, mxfp8_matrix, number_of, nvfp4_matrix
from tinyvllm.weights.quantized.fp8 import matrix, require_e4m3

FLOAT8 = ("weight", "weight_scale", "weight_zero_point")
NVFP4 = ("weight_packed", "weight_scale", "weight_global_scale")
MXFP4 = ("weight_packed", "weight_scale")
Stored = Mapping[str, TensorRecord]


def float8_matrix(stem: str, stored: Stored, schemes: Sequence[Scheme]) -> BuiltRecord:
    _require(stem, schemes, bits=8)
    weight, scale = (part(stored, stem, suffix) for suffix in FLOAT8[:2])
    if f"{stem}.weight_zero_point" in stored and any(stored[f"{stem}.weight_zero_point"].data):
        refuse(f"{quoted(stem)} has float weights and a zero point other than 0")
    require_rank(weight, 2)
    O, I = weight.shape
    blocks = [_block(scheme, O, I, stem) for scheme in schemes]
    fitting = [block for block in blocks if (-(-O // block[0]), -(-I // block[1])) == _two(scale.shape)]
    return matrix(weight, scale, (fitting or blocks)[0])


def _two(shape: tuple[int, ...]) -> tuple[int, int]:
    return (1, 1) if not shape else (shape[0], 1) if len(shape) == 1 else (shape[0], shape[1])


def _block(scheme: Scheme, O: int, I: int, stem: str) -> tuple[int, int]:
    """Rows and columns of a scale."""
    if scheme.strategy == "block":
        if scheme.block is None:
            refuse(f"config.json: the strategy block needs block_structure, two sizes ({quoted(stem)})")
        return scheme.block
    blocks = {"tensor": (O, I), "channel": (1, I), "group": (1, scheme.group_size or I)}
    if scheme.strategy not in blocks:
        known = ", ".join((*blocks, "block"))
        raise ModelError(f"compressed-tensors: scales by {quoted(scheme.strategy)} are not supported, only by {known} ({quoted(stem)})")
    return blocks[scheme.strategy]


def nvfp4(stem: str, stored: Stored, schemes: Sequence[Scheme]) -> BuiltRecord:
    _require(stem, schemes, bits=4, group=16)
    packed, scale, whole = (part(stored, stem, suffix) for suffix in NVFP4)
    require_rank(packed, 2)
    divisor = number_of(whole)
    if not np.isfinite(divisor) or divisor <= 0:
        refuse(f"tensor {quoted(whole.name)} must be a number above 0, got {divisor}")
    factor = np.float32(1) / divisor
    return nvfp4_matrix(f"{stem}.weight", packed, codes_of(packed, ("U8",)), scale, factor, (whole,))


def mxfp4(stem: str, stored: Stored, schemes: Sequence[Scheme]) -> BuiltRecord:
    _require(stem, schemes, bits=4, group=32)
    packed, scale = (part(stored, stem, suffix) for suffix in MXFP4)
    require_rank(packed, 2)
    return mxfp4_matrix(f"{stem}.weight", packed, codes_of(packed, ("U8",)), scale)


def mxfp8(stem: str, stored: Stored, schemes: Sequence[Scheme]) -> BuiltRecord:
    _require(stem, schemes, bits=8, group=32)
    weight, scale = (part(stored, stem, suffix) for suffix in FLOAT8[:2])
    require_rank(weight, 2)
    require_e4m3(weight)
    return mxfp8_matrix(weight.name, weight, codes_of(weight, ("F8_E4M3",)), scale)


def _require(stem: str, schemes: Sequence[Scheme], bits: int, group: int | None = None) -> None:
    for scheme in schemes:
        if scheme.type != "float" or scheme.bits != bits:
            raise unsupported(scheme, stem)
        if group is not None and scheme.group_size not in (None, group):
            refuse(f"config.json: {scheme.format} has groups of {group}, got {scheme.group_size} ({quoted(stem)})")
