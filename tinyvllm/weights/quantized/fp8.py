"""Checkpoints with quant_method fp8: e4m3 weights, as DeepSeek and Qwen publish them (fine-grained), or with one scale a matrix.

X.weight             float8 e4m3 [O, I]
X.weight_scale_inv   float32, bfloat16 or powers of two [ceil(O / 128), ceil(I / 128)]: a factor, in spite of its name
X.weight_scale       one number or [O, 1], where the settings have no weight_block_size

Activations are not rounded to 8 bits, so their scales are not used.
"""

from __future__ import annotations

from collections.abc import Mapping

from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.weights.mapping import BuiltRecord, Record, TensorRecord
from tinyvllm.weights.quantized.checks import MAX_GROUP, part, refuse, require_rank, stems
from tinyvllm.weights.quantized.floats import block_scales, codes_of, fp8_matrix
from tinyvllm.weights.quantized.notes import RUN_TIME

_SCALES = ("weight_scale_inv", "weight_scale")
SMALL = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


def tensors(settings: Fields, stored: Mapping[str, TensorRecord]) -> dict[str, Record]:
    """The tensors of a model: each `X.weight` in place of the codes and their scales."""
    kind = settings.get("fmt", "e4m3")
    if kind != "e4m3":
        raise ModelError(f"{settings.where}: fmt {quoted(kind)} is not supported; supported is e4m3")
    block = _block(settings)
    suffix = _SCALES[0] if block or not stems(stored, _SCALES[1]) else _SCALES[1]
    out: dict[str, Record] = {name: record for name, record in stored.items() if name.rsplit(".", 1)[-1] not in (*RUN_TIME, *_SCALES)}
    modules = [stem for stem in stems(stored, "weight") if stored[f"{stem}.weight"].format in SMALL]
    if not modules:
        refuse(f"no file has a 'X.weight' in float8, which {settings.where} needs; is it the configuration of another model?")
    for stem in modules:
        out[f"{stem}.weight"] = matrix(part(stored, stem, "weight"), part(stored, stem, suffix), block)
    if orphans := [name for name in stored if name.endswith(_SCALES) and name.rpartition(".")[0] not in modules]:
        refuse(f"tensor {quoted(orphans[0])} is a scale, but its weights are not float8; download the files again")
    return out


def _block(settings: Fields) -> tuple[int, int] | None:
    block = settings.integers("weight_block_size")
    if not block:
        return None
    if len(block) != 2 or not all(0 < size <= MAX_GROUP for size in block):
        refuse(f"{settings.where}: weight_block_size must be two numbers from 1 to {MAX_GROUP}, got {quoted(list(block))}")
    return block[0], block[1]


def matrix(weight: TensorRecord, scale: TensorRecord, block: tuple[int, int] | None) -> BuiltRecord:
    """The matrix of e4m3 codes with a scale for each block of rows and columns; without `block` one for the matrix or one a row."""
    require_e4m3(weight)
    require_rank(weight, 2)
    O, I = weight.shape
    if block is None:
        block = (1, I) if scale.shape in ((O,), (O, 1)) and O > 1 else (O, I)
    scales = block_scales(scale, (O, I), block)
    return fp8_matrix(weight.name, (O, I), codes_of(weight, ("F8_E4M3",)), scales, block[1], (weight, scale))


def require_e4m3(weight: TensorRecord) -> None:
    if weight.format in SMALL and weight.format != "F8_E4M3":
        raise ModelError(f"quantized checkpoint: {quoted(weight.name)} is {weight.format}, which is not supported; of float8, e4m3 is")
