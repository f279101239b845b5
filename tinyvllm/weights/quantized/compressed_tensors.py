"""Checkpoints of compressed-tensors (llm-compressor): which format they have, and those with integers.

pack-quantized, of 1 to 8 bits, quants and zero points with 2^(bits - 1) added:

    X.weight_packed      int32 [O, ceil(I * bits / 32)]   along the columns, the lowest bits first, across the ends of words
    X.weight_shape       int64 [2]
    X.weight_scale       [O, groups], [O, 1] or [1]
    X.weight_zero_point  int32 [ceil(O * bits / 32), groups]   along the rows; missing: 0
    X.weight_g_idx       int32 [I]   the group of each column; missing, or all -1: columns in order

int-quantized and naive-quantized: `X.weight` int8 [O, I] and `X.weight_zero_point` int8 of the scale's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.weights.mapping import BuiltRecord, Record, TensorRecord
from tinyvllm.weights.quantized.checks import MAX_GROUP, column_groups, part, refuse, require_rank, require_shape, stems
from tinyvllm.weights.quantized.compressed_floats import FLOAT8, MXFP4, NVFP4, float8_matrix, mxfp4, mxfp8, nvfp4
from tinyvllm.weights.quantized.compressed_scheme import Scheme, unsupported
from tinyvllm.weights.quantized.integers import Integers, Rows, equal_groups, float32_of, floats_of, integers_of, words_of
from tinyvllm.weights.quantized.notes import RUN_TIME

_PACKED = ("weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx")
_PLAIN = ("weight", "weight_scale", "weight_zero_point")
_STRATEGIES = ("tensor", "channel", "group")
READ_AT_OPENING = ("weight_shape", "weight_g_idx", "weight_global_scale")  # see kinds.py


Matrix = Callable[[str, Mapping[str, TensorRecord], list[Scheme]], BuiltRecord]


def tensors(settings: Fields, stored: Mapping[str, TensorRecord]) -> dict[str, Record]:
    """The tensors of a model: each `X.weight` in place of what is stored for it. Scales of activations and caches are left out."""
    sparsity = settings.get("sparsity_config", {})
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise ModelError(f"{settings.where}: sparsity_config {quoted(sparsity.get('format'))} is not supported; use the dense model")
    schemes = _schemes(settings)
    out: dict[str, Record] = {name: record for name, record in stored.items() if name.rsplit(".", 1)[-1] not in RUN_TIME}
    count, kinds = 0, list(dict.fromkeys(scheme.format for scheme in schemes))
    for kind in kinds:
        suffixes, matrix = _FORMATS[kind]
        own = [scheme for scheme in schemes if scheme.format == kind]
        for stem in _modules(stored, suffixes):
            if len(kinds) > 1 and stored[f"{stem}.{suffixes[0]}"].format not in _DTYPES[kind]:
                continue
            for suffix in suffixes:
                out.pop(f"{stem}.{suffix}", None)
            out[f"{stem}.weight"] = matrix(stem, stored, own)
            count += 1
    if not count:
        refuse(f"{settings.where} says {schemes[0].format}, but no file has its tensors; is it the configuration of another model?")
    return out


def _modules(stored: Mapping[str, TensorRecord], suffixes: tuple[str, ...]) -> list[str]:
    """The modules whose first tensor of the format is there, and a scale: a `weight` alone is not quantized."""
    return [stem for stem in stems(stored, suffixes[0]) if f"{stem}.weight_scale" in stored]


def _schemes(settings: Fields) -> list[Scheme]:
    usual, groups = settings.get("format", "dense"), settings.get("config_groups", {})
    if not isinstance(groups, Mapping) or not groups:
        refuse(f"{settings.where}: config_groups must be an object with a group of modules at least, got {quoted(groups)}")
    schemes = []
    for name, group in groups.items():
        where = f"{settings.where}, config_groups, {quoted(name)}"
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            refuse(f"{where} must be an object with an object `weights`, got {quoted(group)}")
        schemes.append(_scheme(Fields(group["weights"], where=where), group.get("format") or usual))
    return list(dict.fromkeys(schemes))


def _scheme(weights: Fields, kind: object) -> Scheme:
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise ModelError(f"{weights.where}: format {quoted(kind)} is not supported; supported are {', '.join(_FORMATS)}")
    size, strategy, type = weights.get("group_size"), weights.get("strategy"), weights.get("type", "int")
    strategy = strategy or ("tensor" if size is None else "group" if size != -1 else "channel")
    if not isinstance(type, str) or not isinstance(strategy, str):
        refuse(f"{weights.where}: type and strategy must be strings, got {quoted(type)} and {quoted(strategy)}")
    group = weights.integer("group_size", low=1, high=MAX_GROUP) if strategy in ("group", "tensor_group") else None
    kind = "float-quantized" if (kind, type) == ("naive-quantized", "float") else kind
    bits, symmetric = weights.integer("num_bits", 8, low=1, high=16), weights.boolean("symmetric", True)
    return Scheme(kind, bits, type, symmetric, strategy, group, _block(weights))


def _block(weights: Fields) -> tuple[int, int] | None:
    block = weights.integers("block_structure")
    if block and (len(block) != 2 or not all(0 < size <= MAX_GROUP for size in block)):
        refuse(f"{weights.where}: block_structure must be two numbers from 1 to {MAX_GROUP}, got {quoted(list(block))}")
    return (block[0], block[1]) if block else None


def _require_integers(stem: str, schemes: list[Scheme]) -> None:
    for scheme in schemes:
        if scheme.type != "int" or scheme.bits > 8:
            raise unsupported(scheme, stem)
        if scheme.strategy not in _STRATEGIES:
            known = ", ".join(_STRATEGIES)
            raise ModelError(f"compressed-tensors: scales by {quoted(scheme.strategy)} are not supported, only by {known} ({quoted(stem)})")


def _groups_of_scales(scale: TensorRecord, O: int, I: int, group: int | None) -> int | None:
    """How many groups the scale has if it fits the scheme: 0 is one scale for the whole matrix."""
    if group is None:
        return 1 if scale.shape in ((O, 1), (O,)) else 0 if scale.shape in ((1,), (), (1, 1)) else None
    G = -(-I // group)
    return G if scale.shape == (O, G) else None


# --- pack-quantized


def _packed_matrix(stem: str, stored: Mapping[str, TensorRecord], schemes: list[Scheme]) -> BuiltRecord:
    _require_integers(stem, schemes)
    packed, shape, scale = (part(stored, stem, suffix) for suffix in _PACKED[:3])
    zero, index = (stored.get(f"{stem}.{suffix}") for suffix in _PACKED[3:])
    require_rank(packed, 2)
    require_shape(shape, (2,), "rows and columns")
    if shape.format not in ("I64", "I32"):
        refuse(f"tensor {quoted(shape.name)} must hold integers, got {shape.format}")
    O, I = (int(size) for size in shape.data.view("<i8" if shape.format == "I64" else "<i4"))
    if packed.shape[0] != O or I < 1:
        refuse(f"tensor {quoted(shape.name)} says {[O, I]}, but {quoted(packed.name)} has the shape {quoted(list(packed.shape))}")
    scheme, G = _fitting(stem, schemes, (O, I), packed, scale, zero)
    groups = _column_groups(index, I, G, scheme.group_size)
    words, read_scale = words_of(packed), _scales(scale, O)
    middle = 1 << scheme.bits - 1
    zeros = None if zero is None else words_of(zero)

    def read(first: int, end: int) -> Rows:
        bits, factors = scheme.bits, read_scale(first, end)
        if zeros is None:
            offsets = factors * np.float32(-middle)
        else:
            words_of_rows = zeros[first * bits // 32 : -(-end * bits // 32)]
            offsets = -factors * integers_of(words_of_rows.T, bits, end - first).T.astype(np.float32)
        return integers_of(words[first:end], bits, I), factors, offsets

    sources = tuple(record for record in (packed, scale, zero, index, shape) if record is not None)
    return Integers(f"{stem}.weight", (O, I), scheme.bits, groups, sources, read).record()


def _fitting(
    stem: str, schemes: list[Scheme], shape: tuple[int, int], packed: TensorRecord, scale: TensorRecord, zero: TensorRecord | None
) -> tuple[Scheme, int]:
    """The scheme that the tensors' shapes have, and the groups of a row."""
    O, I = shape
    for scheme in schemes:
        G = _groups_of_scales(scale, O, I, scheme.group_size)
        zeros = None if scheme.symmetric else (-(-O * scheme.bits // 32), max(1, G or 0))
        if packed.shape[1] == -(-I * scheme.bits // 32) and G is not None and (zero.shape if zero is not None else None) == zeros:
            return scheme, max(1, G)
    shapes = f"weight_packed {quoted(list(packed.shape))}, weight_scale {quoted(list(scale.shape))}"
    shapes += ", no weight_zero_point" if zero is None else f", weight_zero_point {quoted(list(zero.shape))}"
    expected = " or ".join(
        f"{s.bits} bits by {s.strategy}{'' if s.group_size is None else f' of {s.group_size}'}{'' if s.symmetric else ' with zero points'}"
        for s in schemes[:4]
    )
    refuse(f"{quoted(stem)} [{O}, {I}] does not have {expected}, as config.json says: its tensors are {shapes}")


def _column_groups(index: TensorRecord | None, I: int, G: int, group: int | None) -> np.ndarray:
    if index is not None:
        require_shape(index, (I,), "a group for each column")
        if index.format == "I32" and (index.data.view(np.int32) == -1).all():
            index = None
    return equal_groups(I, -1 if group is None else group) if index is None else column_groups(index, I, G)


def _scales(scale: TensorRecord, O: int) -> Callable[[int, int], np.ndarray]:
    """(first, end) -> float32 [end - first, groups]."""
    stored = floats_of(scale)
    matrix = np.broadcast_to(stored.reshape(1, 1), (O, 1)) if stored.size == 1 else stored.reshape(O, -1)
    return lambda first, end: float32_of(scale, matrix[first:end])


# --- int-quantized


def _plain_matrix(stem: str, stored: Mapping[str, TensorRecord], schemes: list[Scheme]) -> BuiltRecord:
    _require_integers(stem, schemes)
    weight, scale = (part(stored, stem, suffix) for suffix in _PLAIN[:2])
    zero = stored.get(f"{stem}.weight_zero_point")
    require_rank(weight, 2)
    O, I = weight.shape
    counts = {scheme: _groups_of_scales(scale, O, I, scheme.group_size) for scheme in schemes if scheme.symmetric == (zero is None)}
    scheme = next((scheme for scheme, G in counts.items() if G is not None), None)
    if weight.format != "I8" or scheme is None or (zero is not None and (zero.format, zero.shape) != ("I8", scale.shape)):
        expected = ", ".join(dict.fromkeys(f"by {scheme.strategy} {scheme.group_size or ''}".strip() for scheme in schemes))
        got = f"{weight.format} with scales {quoted(list(scale.shape))}" + (
            "" if zero is None else f" and zero points {zero.format} {quoted(list(zero.shape))}"
        )
        refuse(f"tensor {quoted(weight.name)} {[O, I]} must be I8 with scales {expected}, as config.json says, got {got}")
    quants, read_scale = weight.data.reshape(O, I), _scales(scale, O)
    zeros = np.zeros((1, 1), np.int8) if zero is None else zero.data.view(np.int8)
    zeros = np.broadcast_to(zeros.reshape(1, 1), (O, 1)) if zeros.size == 1 else zeros.reshape(O, -1)

    def read(first: int, end: int) -> Rows:
        factors = read_scale(first, end)
        return quants[first:end] ^ np.uint8(128), factors, -factors * (zeros[first:end].astype(np.float32) + np.float32(128))

    groups = equal_groups(I, -1 if scheme.group_size is None else scheme.group_size)
    sources = (weight, scale) if zero is None else (weight, scale, zero)
    return Integers(f"{stem}.weight", (O, I), 8, groups, sources, read).record()


# Of each format the tensors of a module, the one that names it first, and the function that makes its matrix.
_FORMATS: dict[str, tuple[tuple[str, ...], Matrix]] = {
    "pack-quantized": (_PACKED, _packed_matrix),
    "int-quantized": (_PLAIN, _plain_matrix),
    "naive-quantized": (_PLAIN, _plain_matrix),
    "float-quantized": (FLOAT8, float8_matrix),
    "nvfp4-pack-quantized": (NVFP4, nvfp4),
    "mxfp4-pack-quantized": (MXFP4, mxfp4),
    "mxfp8-quantized": (FLOAT8, mxfp8),
}
# Which format a module of a checkpoint with several has: by the dtype of its first tensor.
_DTYPES = {"pack-quantized": ("I32",), "int-quantized": ("I8",), "naive-quantized": ("I8",), "float-quantized": ("F8_E4M3", "F8_E5M2"),
           "nvfp4-pack-quantized": ("U8",), "mxfp4-pack-quantized": ("U8",), "mxfp8-quantized": ("F8_E4M3",)}  # fmt: skip
