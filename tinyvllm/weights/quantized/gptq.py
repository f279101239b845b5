"""GPTQ checkpoints (AutoGPTQ, GPTQModel): weight = scale * (quant - zero), quants packed along the columns.

X.qweight   int32 [I * bits / 32, O]   the lowest bits first, across the ends of words with 3 bits
X.qzeros    int32 [groups, O * bits / 32]   along the rows; in the first version of the format 1 less than the zero point
X.scales    float16 [groups, O]
X.g_idx     int32 [I]   the group of each column; missing: columns in order
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.weights.mapping import Record, TensorRecord
from tinyvllm.weights.quantized.checks import column_groups, group_size, own_tensors, part, refuse, require_rank, require_shape
from tinyvllm.weights.quantized.integers import Integers, Rows, equal_groups, float32_of, floats_of, integers_of, words_of

BITS = (2, 3, 4, 8)
_VERSIONS = {"gptq": 1, "gptq_v2": 0}  # what is added to the stored zero points
_SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
READ_AT_OPENING = ("g_idx",)  # see kinds.py


def tensors(settings: Fields, stored: Mapping[str, TensorRecord]) -> dict[str, Record]:
    """The tensors of a model: each `X.weight` in place of `X.qweight` and what belongs to it."""
    version = settings.get("checkpoint_format", "gptq")
    if not isinstance(version, str) or version not in _VERSIONS:
        known = ", ".join(_VERSIONS)
        raise ModelError(f"{settings.where}: checkpoint_format {quoted(version)} is not supported; supported are {known}")
    schemes = _schemes(settings)
    modules, rest = own_tensors(settings, stored, _SUFFIXES)
    return rest | {f"{stem}.weight": _matrix(stem, stored, schemes, _VERSIONS[version]).record() for stem in modules}


Scheme = tuple[int, int]  # bits, columns of a group or -1


def _schemes(settings: Fields) -> list[Scheme]:
    """The scheme of the model, then those of the rules for some modules."""
    usual = _scheme(settings, None)
    rules = settings.get("dynamic", {})
    if not isinstance(rules, Mapping):
        refuse(f"{settings.where}: dynamic must be an object, got {quoted(rules)}")
    schemes = [usual]
    for pattern, rule in rules.items():
        if not isinstance(rule, Mapping):
            refuse(f"{settings.where}: dynamic {quoted(pattern)} must be an object, got {quoted(rule)}")
        schemes.append(_scheme(Fields(rule, where=f"{settings.where}, dynamic"), usual))
    return list(dict.fromkeys(schemes))


def _scheme(settings: Fields, usual: Scheme | None) -> Scheme:
    bits, group = usual or (None, -1)
    bits = settings.integer("bits", bits, low=1)
    if bits not in BITS:
        raise ModelError(f"{settings.where}: {bits} bits are not supported; supported are {', '.join(map(str, BITS))}")
    return bits, group_size(settings, group)


def _matrix(stem: str, stored: Mapping[str, TensorRecord], schemes: list[Scheme], added: int) -> Integers:
    qweight, qzeros, scales = (part(stored, stem, suffix) for suffix in _SUFFIXES[:3])
    for record in (qweight, qzeros, scales):
        require_rank(record, 2)
    words, O = qweight.shape
    index = stored.get(f"{stem}.g_idx")
    bits, group = _fitting(stem, schemes, qweight, qzeros, scales)
    I, G = words * 32 // bits, scales.shape[0]
    require_shape(scales, (G, O), f"groups by the columns of {quoted(qweight.name)}")
    if words * 32 % bits or O * bits % 32:
        refuse(f"tensor {quoted(qweight.name)} {quoted(list(qweight.shape))} is not a whole number of integers of {bits} bits")
    groups = equal_groups(I, group) if index is None else column_groups(index, I, G)
    packed, zeros, factors = words_of(qweight), words_of(qzeros), floats_of(scales)

    def read(first: int, end: int) -> Rows:
        quants = integers_of(packed[:, first:end].T, bits, I)
        zero = integers_of(zeros[:, first * bits // 32 : -(-end * bits // 32)], bits, end - first) + np.uint8(added)
        zero &= np.uint8((1 << bits) - 1)
        scale = float32_of(scales, factors[:, first:end].T)
        return quants, scale, -scale * zero.T.astype(np.float32)

    sources = tuple(record for record in (qweight, qzeros, scales, index) if record is not None)
    return Integers(f"{stem}.weight", (O, I), bits, groups, sources, read)


def _fitting(stem: str, schemes: list[Scheme], qweight: TensorRecord, qzeros: TensorRecord, scales: TensorRecord) -> Scheme:
    """The one of the schemes that the tensors' shapes have: those of the zero points say the bits, those of the scales the groups."""
    for bits, group in schemes:
        I = qweight.shape[0] * 32 // bits
        G = 1 if group == -1 else -(-I // group)
        if scales.shape[0] == G and qzeros.shape == (G, -(-scales.shape[1] * bits // 32)):
            return bits, group
    expected = " or ".join(f"{bits} bits in groups of {group}" for bits, group in schemes[:4])
    shapes = ", ".join(f"{record.name.rsplit('.', 1)[1]} {quoted(list(record.shape))}" for record in (qweight, qzeros, scales))
    refuse(f"{quoted(stem)} does not have {expected}, as config.json says: its tensors are {shapes}")
