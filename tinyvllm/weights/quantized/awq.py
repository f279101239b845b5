"""AWQ checkpoints in the layout "gemm" (AutoAWQ): weight = scale * (quant - zero), four bits, packed along the rows.

X.qweight   int32 [I, O / 8]   of eight rows, nibble i holds row (0, 2, 4, 6, 1, 3, 5, 7)[i]
X.qzeros    int32 [groups, O / 8]   the same
X.scales    float16 [groups, O]
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.weights.mapping import Record, TensorRecord
from tinyvllm.weights.quantized.checks import group_size, own_tensors, part, refuse, require_rank, require_shape
from tinyvllm.weights.quantized.integers import Integers, Rows, equal_groups, float32_of, floats_of, integers_of, words_of

_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # that hold rows 0 to 7
_SUFFIXES = ("qweight", "qzeros", "scales")


def tensors(settings: Fields, stored: Mapping[str, TensorRecord]) -> dict[str, Record]:
    """The tensors of a model: each `X.weight` in place of `X.qweight` and what belongs to it."""
    version = settings.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise ModelError(f"{settings.where}: version {quoted(version)} of AWQ is not supported; supported is gemm")
    bits = settings.integer("bits", settings.integer("w_bit", 4))
    if bits != 4:
        raise ModelError(f"{settings.where}: AWQ with {bits} bits is not supported; supported are 4")
    if not settings.boolean("zero_point", True):
        raise ModelError(
            f"{settings.where}: AWQ without zero points (zero_point false) is not supported; quantize the model again with them"
        )
    group = group_size(settings, settings.get("q_group_size", 128))
    modules, rest = own_tensors(settings, stored, _SUFFIXES)
    return rest | {f"{stem}.weight": _matrix(stem, stored, group).record() for stem in modules}


def _matrix(stem: str, stored: Mapping[str, TensorRecord], group: int) -> Integers:
    qweight, qzeros, scales = (part(stored, stem, suffix) for suffix in _SUFFIXES)
    for record in (qweight, qzeros, scales):
        require_rank(record, 2)
    I, O = qweight.shape[0], qweight.shape[1] * 8
    groups = equal_groups(I, group)
    G = int(groups[-1]) + 1
    why = f"groups of {group} of the {I} columns of {quoted(qweight.name)}"
    require_shape(scales, (G, O), why)
    require_shape(qzeros, (G, O // 8), why)
    packed, zeros, factors = words_of(qweight), words_of(qzeros), floats_of(scales)

    def read(first: int, end: int) -> Rows:
        quants = _rows(packed, first, end)
        scale = float32_of(scales, factors[:, first:end].T)
        return quants, scale, -scale * _rows(zeros, first, end).astype(np.float32)

    return Integers(f"{stem}.weight", (O, I), 4, groups, (qweight, qzeros, scales), read)


def _rows(packed: np.ndarray, first: int, end: int) -> np.ndarray:
    """uint8 [end - first, I] of words [I, O / 8]."""
    if end % 8:
        refuse("rows of AWQ matrices come in eights")
    nibbles = integers_of(packed[:, first // 8 : end // 8], 4, end - first)
    return nibbles.reshape(len(packed), -1, 8)[:, :, _NIBBLES].reshape(len(packed), -1).T
