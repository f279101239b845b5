"""HQQ checkpoints (hqq, transformers): weight = scale * (quant - zero), the zero point a float.

X.W_q     uint8 or int32   groups [N, group] (axis 1) or [group, N] (axis 0) of the flattened matrix, packed along their first dimension:
          it is cut into equal runs, and a byte holds one number of each run, the first run highest; 3 bits: ten runs in an int32
X.scale   [N, 1] or [1, N]
X.zero    the same
X.nbits, X.group_size, X.axis, X.shape, ...   the settings of the module; missing ones are those of config.json
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.weights.mapping import BuiltRecord, Record, TensorRecord
from tinyvllm.weights.quantized.checks import MAX_GROUP, own_tensors, part, refuse, require_rank
from tinyvllm.weights.quantized.integers import Integers, Rows, equal_groups, float32_of, floats_of

_RUNS = {8: 1, 6: 1, 5: 1, 4: 2, 3: 10, 2: 4, 1: 8}  # of numbers that share a byte, or a word of 32 bits
SETTINGS = (  # small tensors
    "nbits", "group_size", "axis", "shape", "packing", "quant_scale", "quant_zero", "view_as_float", "unpack_view_dtype", "compute_dtype",
    "channel_wise", "optimize", "round_zero", "offload_meta", "encoded_state_dict", "stores_quant_config",
)  # fmt: skip
_MAX_DIMENSION = 1 << 31


@dataclass(frozen=True)
class _Packing:
    """How a matrix of this shape is packed: `runs` runs of `length` rows of [N, width]."""

    shape: tuple[int, int]
    bits: int
    group: int
    axis: int

    @property
    def runs(self) -> int:
        return _RUNS[self.bits]

    @property
    def width(self) -> int:
        """Numbers in a row of what is packed."""
        return self.group if self.axis == 1 else self.shape[0] * self.shape[1] // self.group

    @property
    def length(self) -> int:
        """Rows of a run."""
        return -(-self.shape[0] * self.shape[1] // self.width // self.runs)

    @property
    def shifts(self) -> np.ndarray:
        """Of each run the place of its bits."""
        return np.arange(self.runs - 1, -1, -1) * (self.bits if self.runs > 1 else 0)


def tensors(settings: Fields, stored: Mapping[str, TensorRecord]) -> dict[str, Record]:
    """The tensors of a model: each `X.weight` in place of `X.W_q` and what belongs to it."""
    usual = _usual(settings)
    modules, rest = own_tensors(settings, stored, ("W_q", "scale", "zero", *SETTINGS))
    return rest | {f"{stem}.weight": _matrix(stem, stored, usual) for stem in modules}


def _usual(settings: Fields) -> Fields:
    """The settings of every module in config.json; empty where modules have their own."""
    usual = settings.get("quant_config", {})
    usual = usual.get("weight_quant_params", {}) if isinstance(usual, Mapping) else usual
    if not isinstance(usual, Mapping):
        refuse(f"{settings.where}: weight_quant_params must be an object, got {quoted(usual)}")
    return Fields(usual, where=f"{settings.where}, weight_quant_params")


def _matrix(stem: str, stored: Mapping[str, TensorRecord], usual: Fields) -> BuiltRecord:
    own = {name: _integers(stored[f"{stem}.{name}"]) for name in SETTINGS if f"{stem}.{name}" in stored}
    values = Fields(dict(usual.values) | {name: value[0] for name, value in own.items() if len(value) == 1}, where=f"hqq: {quoted(stem)}")
    for name in ("quant_scale", "quant_zero"):
        if values.get(name):
            raise ModelError(f"{values.where}: {name}, scales or zero points that are quantized, is not supported; use a GGUF file")
    bits, axis = values.get("nbits"), values.integer("axis", 1, high=1)
    if not isinstance(bits, int) or bits not in _RUNS:
        raise ModelError(f"{values.where}: {quoted(bits)} bits are not supported; supported are {', '.join(map(str, sorted(_RUNS)))}")
    shape = own.get("shape", [])
    if len(shape) != 2 or not all(0 < size < _MAX_DIMENSION for size in shape):
        refuse(f"{values.where}: the tensor 'shape' must hold two sizes, got {shape[:4]}")
    O, I = shape
    group = values.integer("group_size", I, low=1, high=MAX_GROUP)
    if (I if axis == 1 else O * I) % group:
        raise ModelError(f"{values.where}: groups of {group} do not divide rows of {I} columns, which is not supported")
    W_q, scale, zero = (part(stored, stem, suffix) for suffix in ("W_q", "scale", "zero"))
    packing = _Packing((O, I), bits, group, axis)
    _check(packing, W_q, scale, zero)
    if axis == 1:
        return _by_rows(stem, packing, W_q, scale, zero)
    return _by_columns(stem, packing, W_q, scale, zero)


def _integers(record: TensorRecord) -> list[int]:
    """A small tensor of integers; empty if it holds something else, such as the name of a dtype."""
    kinds = {"U8": "u1", "BOOL": "u1", "I32": "<i4", "I64": "<i8"}
    return record.data.view(kinds[record.format]).tolist() if record.format in kinds and record.nbytes <= 256 else []


def _check(packing: _Packing, W_q: TensorRecord, scale: TensorRecord, zero: TensorRecord) -> None:
    N = packing.shape[0] * packing.shape[1] // packing.group
    size = 4 if packing.bits == 3 else 1
    if W_q.nbytes != packing.length * packing.width * size:
        expected = f"{packing.length * packing.width * size} bytes ({packing.bits} bits, groups of {packing.group}, axis {packing.axis})"
        refuse(f"tensor {quoted(W_q.name)} must have {expected} for a matrix {quoted(list(packing.shape))}, got {W_q.nbytes}")
    for record in (scale, zero):
        require_rank(record, 2)
        if record.shape != ((N, 1) if packing.axis == 1 else (1, N)):
            refuse(f"tensor {quoted(record.name)} must hold a number for each of {N} groups, got the shape {quoted(list(record.shape))}")


def _unpacked(packing: _Packing, packed: np.ndarray, first: int, end: int) -> np.ndarray:
    """The rows of what was packed, uint8 [end - first, width]."""
    rows = np.arange(first, end)
    words = packed[rows % packing.length]
    quants: np.ndarray = words >> packing.shifts[rows // packing.length, None].astype(packed.dtype)
    quants &= packed.dtype.type((1 << packing.bits) - 1)
    return quants.astype(np.uint8)


def _packed(packing: _Packing, W_q: TensorRecord) -> np.ndarray:
    return W_q.data.view(np.uint32 if packing.bits == 3 else np.uint8).reshape(packing.length, packing.width)


def _by_rows(stem: str, packing: _Packing, W_q: TensorRecord, scale: TensorRecord, zero: TensorRecord) -> BuiltRecord:
    (O, I), packed = packing.shape, _packed(packing, W_q)
    G = I // packing.group
    scales, zeros = floats_of(scale).reshape(O, G), floats_of(zero).reshape(O, G)

    def read(first: int, end: int) -> Rows:
        quants = _unpacked(packing, packed, first * G, end * G).reshape(end - first, I)
        factors = float32_of(scale, scales[first:end])
        return quants, factors, -factors * float32_of(zero, zeros[first:end])

    width = packing.bits if packing.runs > 1 else 8
    return Integers(f"{stem}.weight", (O, I), width, equal_groups(I, packing.group), (W_q, scale, zero), read).record()


def _by_columns(stem: str, packing: _Packing, W_q: TensorRecord, scale: TensorRecord, zero: TensorRecord) -> BuiltRecord:
    """With axis 0 a group is spread over the rows, which no format of ours has."""
    (O, I), packed, M = packing.shape, _packed(packing, W_q), packing.width

    def build(first: int, end: int) -> np.ndarray:
        scales, zeros = (float32_of(record, floats_of(record)) for record in (scale, zero))
        low, high = first * I // M, -(-end * I // M)
        values = _unpacked(packing, packed, low, high).astype(np.float32)
        values *= scales
        values -= scales * zeros
        return np.ascontiguousarray(values.reshape(-1)[first * I - low * M : end * I - low * M].reshape(end - first, I)).view(np.uint8)

    return BuiltRecord(f"{stem}.weight", "F32", (O, I), (W_q, scale, zero), build, "groups across rows (axis 0)")
