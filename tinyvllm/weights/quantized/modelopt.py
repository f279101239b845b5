"""Checkpoints of NVIDIA's modelopt (Model Optimizer): e4m3, NVFP4 and MXFP8, several in one checkpoint too.

X.weight          float8 e4m3 [O, I]; NVFP4: uint8 [O, I / 2], even columns in the low halves
X.weight_scale    a factor. FP8: one number; FP8_PER_CHANNEL_PER_TOKEN: [O] or [O, 1]; FP8_PB_WO: [O / 128, 1, I / 128, 1], or without
                  the dimensions of 1; NVFP4: e4m3 [O, I / 16]; MXFP8: powers of two, uint8 [O, I / 32]
X.weight_scale_2  NVFP4: one float32, a factor too (compressed-tensors' weight_global_scale is a divisor)

The settings are `quantization_config` of config.json, with `quant_algo` in it or in its object `quantization`, or hf_quant_config.json,
which has that object. Activations are not rounded to floats of a few bits and a packed KV cache has a scale a token, so `input_scale`,
`k_scale` and `v_scale` are not used. A module's tensors decide how it is stored; `exclude_modules` and `ignore` are patterns, and not
evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.weights.mapping import BuiltRecord, Record, TensorRecord
from tinyvllm.weights.quantized.checks import part, refuse, require_rank, require_shape, stems
from tinyvllm.weights.quantized.floats import codes_of, mxfp8_matrix, number_of, nvfp4_matrix
from tinyvllm.weights.quantized.fp8 import SMALL, matrix, require_e4m3
from tinyvllm.weights.quantized.notes import RUN_TIME

METHODS = ("modelopt", "modelopt_fp4")
FILE = "hf_quant_config.json"
_PARTS = ("weight", "weight_scale", "weight_scale_2")
_MIXED = "MIXED_PRECISION"
_BLOCK, _NV_GROUP, _MX_GROUP = 128, 16, 32

Stored = Mapping[str, TensorRecord]


def tensors(settings: Fields, stored: Stored) -> dict[str, Record]:
    """The tensors of a model: each `X.weight` in place of the codes and their scales. Scales of activations and caches are left out."""
    settings = _inner(settings)
    algorithm, layers = _algorithm(settings), _layers(settings)
    if scaled := next((name for name in stored if name.endswith(".pre_quant_scale")), None):
        raise ModelError(f"{settings.where}: tensor {quoted(scaled)} scales inputs, which is not supported; use NVFP4 or FP8 without AWQ")
    modules = _modules(stored)
    if algorithm is None and modules:
        refuse(f"{settings.where} has no quant_algo, but {quoted(modules[0])} is quantized; is it the configuration of another model?")
    if algorithm is not None and not modules:
        refuse(f"{settings.where} says {algorithm}, but no file has its tensors; is it the configuration of another model?")
    out: dict[str, Record] = {name: record for name, record in stored.items() if name.rsplit(".", 1)[-1] not in (*RUN_TIME, *_PARTS[1:])}
    for stem in modules:
        own, held = layers.get(stem, algorithm), _held(stem, stored)
        if own not in (_MIXED, *_NAMES[held]):
            weight, scale = (part(stored, stem, suffix) for suffix in _PARTS[:2])
            kinds = f"{weight.format} {list(weight.shape)} with scales {scale.format} {list(scale.shape)}"
            refuse(f"{settings.where} says {own} for {quoted(stem)}, but its tensors are {held}: {kinds}")
        out[f"{stem}.weight"] = _MATRICES[held](stem, stored)
    return out


def require_same_algorithm(config: Fields, own: Mapping[str, Any]) -> None:
    """FormatError if config.json and hf_quant_config.json name different algorithms."""
    first, second = _inner(config).get("quant_algo"), _inner(Fields(own, where=FILE)).get("quant_algo")
    if str(first).upper() != str(second).upper():
        refuse(f"{config.where} says quant_algo {quoted(first)} and {FILE} {quoted(second)}; download both files again")


# --- settings


def _inner(settings: Fields) -> Fields:
    """The settings with `quant_algo` among them."""
    inner = settings.get("quantization", settings.values)
    if not isinstance(inner, Mapping):
        refuse(f"{settings.where}: quantization must be an object, got {quoted(inner)}")
    return Fields(inner, where=settings.where)


def _algorithm(settings: Fields) -> str | None:
    """`quant_algo`, checked; None where only the KV cache is quantized."""
    name = settings.get("quant_algo")
    if name is None:
        if settings.get("kv_cache_quant_algo") is None and settings.get("kv_cache_scheme") is None:
            refuse(f"{settings.where} has no quant_algo; download the file again")
        return None
    known = _known(name, settings.where)
    _require_group(settings, known)
    groups = settings.get("config_groups", {})
    if not isinstance(groups, Mapping):
        refuse(f"{settings.where}: config_groups must be an object, got {quoted(groups)}")
    for group in groups.values():
        if known != _MIXED:
            _require_weights(group, known, settings.where)
    return known


def _known(name: object, where: str) -> str:
    known = name.upper() if isinstance(name, str) else ""
    if known not in (_MIXED, *_BITS):
        raise ModelError(f"{where}: quant_algo {quoted(name)} is not supported; supported are {', '.join(_BITS)}, {_MIXED}")
    return known


def _require_weights(group: object, algorithm: str, where: str) -> None:
    """FormatError if a group of `config_groups` describes other weights than the algorithm's."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        refuse(f"{where}: a group of config_groups must be an object with an object `weights`, got {quoted(group)}")
    described = Fields(weights, where=f"{where}, config_groups")
    got = described.get("type", "float"), described.integer("num_bits", _BITS[algorithm])
    if got != ("float", _BITS[algorithm]):
        refuse(f"{described.where}: {algorithm} has weights of type float with {_BITS[algorithm]} bits, got {quoted(got[0])} with {got[1]}")
    _require_group(described, algorithm)


def _require_group(settings: Fields, algorithm: str) -> None:
    expected = _GROUPS.get(algorithm)
    if expected is not None and settings.integer("group_size", expected) != expected:
        refuse(f"{settings.where}: {algorithm} has groups of {expected}, got {quoted(settings.get('group_size'))}")


def _layers(settings: Fields) -> dict[str, str]:
    """The algorithm of each module that `quantized_layers` lists by its own name."""
    listed = settings.get("quantized_layers", {})
    if not isinstance(listed, Mapping):
        refuse(f"{settings.where}: quantized_layers must be an object, got {quoted(listed)}")
    layers = {}
    for stem, layer in listed.items():
        where = f"{settings.where}, quantized_layers, {quoted(stem, 80)}"
        if not isinstance(layer, Mapping):
            refuse(f"{where} must be an object, got {quoted(layer)}")
        layers[stem] = _known(layer.get("quant_algo"), where)
        _require_group(Fields(layer, where=where), layers[stem])
    return layers


# --- modules


def _modules(stored: Stored) -> list[str]:
    """The modules with codes or scales of weights."""
    coded = [stem for stem in stems(stored, "weight") if stored[f"{stem}.weight"].format in (*SMALL, "U8", "I8")]
    return list(dict.fromkeys([*coded, *(stem for suffix in _PARTS[1:] for stem in stems(stored, suffix))]))


def _held(stem: str, stored: Stored) -> str:
    """The algorithm that a module's tensors have, by their types and the shape of the scale."""
    weight, scale = (part(stored, stem, suffix) for suffix in _PARTS[:2])
    require_e4m3(weight)
    require_rank(weight, 2)
    if weight.format == "U8":
        part(stored, stem, "weight_scale_2")
        return "NVFP4"
    if weight.format != "F8_E4M3":
        refuse(f"tensor {quoted(weight.name)} must hold F8_E4M3 or U8, as it has a scale, got {weight.format}")
    if f"{stem}.weight_scale_2" in stored:
        refuse(f"{quoted(stem)} has a tensor 'weight_scale_2', but its weights are not the U8 of NVFP4; download the files again")
    if scale.format in ("U8", "F8_E8M0"):
        return "MXFP8"
    if scale.shape in ((), (1,), (1, 1)):
        return "FP8"
    return "FP8_PER_CHANNEL_PER_TOKEN" if scale.shape in (weight.shape[:1], (weight.shape[0], 1)) else "FP8_PB_WO"


def _whole(stem: str, stored: Stored) -> BuiltRecord:
    return matrix(part(stored, stem, "weight"), part(stored, stem, "weight_scale"), None)


def _blocks(stem: str, stored: Stored) -> BuiltRecord:
    weight, scale = (part(stored, stem, suffix) for suffix in _PARTS[:2])
    counts = tuple(-(-size // _BLOCK) for size in weight.shape)
    if scale.shape != (counts[0], 1, counts[1], 1):
        require_shape(scale, counts, f"a scale for {_BLOCK} x {_BLOCK} weights")
    return matrix(weight, replace(scale, shape=counts), (_BLOCK, _BLOCK))


def _nvfp4(stem: str, stored: Stored) -> BuiltRecord:
    weight, scale, whole = (part(stored, stem, suffix) for suffix in _PARTS)
    factor = number_of(whole)
    if not np.isfinite(factor) or factor < 0:
        refuse(f"tensor {quoted(whole.name)} must be a number of 0 or more, got {factor}")
    return nvfp4_matrix(f"{stem}.weight", weight, codes_of(weight, ("U8",)), scale, factor, (whole,))


def _mxfp8(stem: str, stored: Stored) -> BuiltRecord:
    weight, scale = (part(stored, stem, suffix) for suffix in _PARTS[:2])
    return mxfp8_matrix(weight.name, weight, codes_of(weight, ("F8_E4M3",)), scale)


# Of each algorithm the bits of a weight, and the columns of a group where they are fixed; how tensors of it are read, and its names.
_BITS = {"FP8": 8, "FP8_PER_CHANNEL_PER_TOKEN": 8, "FP8_PB_WO": 8, "NVFP4": 4, "W4A16_NVFP4": 4, "MXFP8": 8}
_GROUPS = {"NVFP4": _NV_GROUP, "W4A16_NVFP4": _NV_GROUP, "MXFP8": _MX_GROUP}
_MATRICES: dict[str, Callable[[str, Stored], BuiltRecord]] = {
    "FP8": _whole,
    "FP8_PER_CHANNEL_PER_TOKEN": _whole,
    "FP8_PB_WO": _blocks,
    "NVFP4": _nvfp4,
    "MXFP8": _mxfp8,
}
_NAMES = {name: (name,) for name in _MATRICES} | {"NVFP4": ("NVFP4", "W4A16_NVFP4")}
