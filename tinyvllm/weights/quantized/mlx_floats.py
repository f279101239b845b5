"""MLX's modes of small floats: the bytes of X.weight, uint32, are codes in order; X.scales are uint8, and there are no biases.

mxfp4   floats of four bits, even columns in the low halves; powers of two for 32 columns
nvfp4   the same floats; e4m3 for 16 columns
mxfp8   e4m3; powers of two for 32 columns
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tinyvllm.foreign import Fields, quoted
from tinyvllm.weights.mapping import BuiltRecord, TensorRecord
from tinyvllm.weights.quantized.checks import part, refuse, require_rank
from tinyvllm.weights.quantized.floats import mxfp4_matrix, mxfp8_matrix, nvfp4_matrix
from tinyvllm.weights.quantized.integers import words_of

Matrix = Callable[[str, TensorRecord, np.ndarray, TensorRecord], BuiltRecord]


def _nvfp4(name: str, weight: TensorRecord, codes: np.ndarray, scale: TensorRecord) -> BuiltRecord:
    return nvfp4_matrix(name, weight, codes, scale, np.float32(1))


MODES: dict[str, tuple[int, int, Matrix]] = {  # bits, columns of a scale
    "mxfp4": (4, 32, mxfp4_matrix),
    "nvfp4": (4, 16, _nvfp4),
    "mxfp8": (8, 32, mxfp8_matrix),
}


def float_matrix(stem: str, stored: Mapping[str, TensorRecord], mode: str, settings: Fields) -> BuiltRecord:
    """The matrix of a module in one of MODES."""
    bits, group, build = MODES[mode]
    sizes = settings.integer("bits", bits), settings.integer("group_size", group)
    if sizes != (bits, group):
        refuse(f"{settings.where}: mode {mode} has {bits} bits in groups of {group}, got {sizes[0]} in groups of {sizes[1]}")
    if f"{stem}.biases" in stored:
        refuse(f"{settings.where}: mode {mode} has no biases, but there is a tensor {quoted(stem + '.biases')}")
    weight, scales = part(stored, stem, "weight"), part(stored, stem, "scales")
    require_rank(weight, 2)
    words = words_of(weight)
    return build(f"{stem}.weight", weight, words.view(np.uint8).reshape(weight.shape[0], -1), scales)
