"""Folders of MLX (mlx-lm): weight = scale * quant + bias, any module with a matrix, embeddings and heads too.

X.weight   uint32 [O, I * bits / 32]   along the columns, the lowest bits first, across the ends of words
X.scales   [O, I / group]
X.biases   [O, I / group]
"""

from __future__ import annotations

from collections.abc import Mapping

from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.weights.mapping import BuiltRecord, Record, TensorRecord
from tinyvllm.weights.quantized.checks import own_tensors, part, refuse, require_rank, require_shape
from tinyvllm.weights.quantized.integers import Integers, Rows, equal_groups, float32_of, floats_of, integers_of, words_of
from tinyvllm.weights.quantized.mlx_floats import MODES, float_matrix

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)


def tensors(settings: Fields, stored: Mapping[str, TensorRecord]) -> dict[str, Record]:
    """The tensors of a model: each `X.weight` that has `X.scales` as a matrix."""
    modules, rest = own_tensors(settings, stored, ("scales", "biases", "weight"))
    return rest | {f"{stem}.weight": _matrix(stem, stored, _settings_of(settings, stem)) for stem in modules}


def _settings_of(settings: Fields, stem: str) -> Fields:
    """The settings of a module: the folder's, changed by an entry of its own path."""
    own = settings.get(stem, {})
    if own is False:
        refuse(f"{settings.where}: {quoted(stem)} is false, but the module has a tensor 'scales'")
    if own is True:
        own = {}
    if not isinstance(own, Mapping):
        refuse(f"{settings.where}: {quoted(stem)} must be an object or false, got {quoted(own)}")
    usual = {key: settings.get(key) for key in ("bits", "group_size", "mode")}
    return Fields(usual | dict(own), where=f"{settings.where}, {quoted(stem)}" if own else settings.where)


def _matrix(stem: str, stored: Mapping[str, TensorRecord], settings: Fields) -> BuiltRecord:
    mode = settings.get("mode", "affine")
    if isinstance(mode, str) and mode in MODES:
        return float_matrix(stem, stored, mode, settings)
    if mode != "affine":
        raise ModelError(f"{settings.where}: mode {quoted(mode)} is not supported; supported are affine, {', '.join(MODES)}")
    bits, group = settings.integer("bits", 4), settings.integer("group_size", 64)
    if bits not in BITS or group not in GROUPS:
        known = f"{', '.join(map(str, BITS))} bits in groups of {', '.join(map(str, GROUPS))}"
        raise ModelError(f"{settings.where}: {bits} bits in groups of {group} are not supported; supported are {known}")
    weight, scales, biases = (part(stored, stem, suffix) for suffix in ("weight", "scales", "biases"))
    if len(weight.shape) == 3:
        raise ModelError(f"mlx: {quoted(weight.name)} has the experts of a layer in one tensor, which is not supported; use a GGUF file")
    require_rank(weight, 2)
    O, I = weight.shape[0], weight.shape[1] * 32 // bits
    if weight.shape[1] * 32 % bits or I % group:
        refuse(f"tensor {quoted(weight.name)} {quoted(list(weight.shape))} does not hold whole groups of {group} integers of {bits} bits")
    why = f"{bits} bits in groups of {group}, as config.json says, of {quoted(weight.name)} {quoted(list(weight.shape))}"
    for record in (scales, biases):
        require_shape(record, (O, I // group), why)
    words, factors, added = words_of(weight), floats_of(scales), floats_of(biases)

    def read(first: int, end: int) -> Rows:
        return integers_of(words[first:end], bits, I), float32_of(scales, factors[first:end]), float32_of(biases, added[first:end])

    return Integers(f"{stem}.weight", (O, I), bits, equal_groups(I, group), (weight, scales, biases), read).record()
