"""A checkpoint as model families read it, and the dtypes that its weights get."""

from __future__ import annotations

import numpy as np
from tinygrad import dtypes
from tinygrad.dtype import DType

from tinyvllm.config.engine import CHECKPOINT_ALIASES, CHECKPOINT_QUANTIZATIONS, QUANTIZATIONS, EngineConfig
from tinyvllm.errors import ModelError
from tinyvllm.quant.codecs import unpack
from tinyvllm.quant.formats import FLOATS, FORMATS
from tinyvllm.weights.checkpoint import Checkpoint
from tinyvllm.weights.convert import DTYPE_FORMATS
from tinyvllm.weights.mapping import BuiltRecord

DTYPES = {"float32": dtypes.float32, "float16": dtypes.float16, "bfloat16": dtypes.bfloat16}


class CheckpointSource:
    """A checkpoint as model families want to see it."""

    def __init__(self, checkpoint: Checkpoint):
        self.kind, self.config, self._tensors = checkpoint.kind, checkpoint.config, checkpoint.tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        record = self._tensors.get(name)
        return None if record is None else record.shape

    def array(self, name: str) -> np.ndarray:
        record = self._tensors[name]
        blocks = record.data.reshape(-1, FORMATS[record.format].nbytes)
        return unpack(record.format, blocks).reshape(record.shape)


def weight_dtype(choice: str, checkpoint: Checkpoint) -> DType:
    """`auto` keeps the dtype of most of the checkpoint's bytes; if most are packed it is float16, or as the rest of a quantized checkpoint.

    A description without tensors names it, or it is bfloat16.
    """
    if choice != "auto":
        return DTYPES[choice]
    if not checkpoint.tensors:
        return DTYPES.get(str(checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype"))), dtypes.bfloat16)
    sizes: dict[str, int] = {}
    built = any(isinstance(record, BuiltRecord) for record in checkpoint.tensors.values())
    for record in checkpoint.tensors.values():
        if built and (isinstance(record, BuiltRecord) or record.format not in FLOATS):
            continue
        sizes[record.format] = sizes.get(record.format, 0) + record.nbytes
    common = max(sizes, key=lambda name: sizes[name], default="BF16")
    return {"F32": dtypes.float32, "BF16": dtypes.bfloat16}.get(common, dtypes.float16)


def require_quantization(config: EngineConfig, checkpoint: Checkpoint | None) -> None:
    """ModelError if `quantization` names a kind of checkpoints that this is not; None means random weights."""
    kind = None if checkpoint is None else checkpoint.quantization
    wanted = config.quantization
    if wanted not in CHECKPOINT_QUANTIZATIONS or (
        kind is not None and CHECKPOINT_ALIASES.get(wanted, wanted) == CHECKPOINT_ALIASES.get(kind, kind)
    ):
        return
    held = "random weights have none" if checkpoint is None else f"this one is {kind or 'not quantized'}"
    raise ModelError(
        f"weights: quantization={wanted} expects a checkpoint of that kind, and {held}; leave quantization out, or choose a "
        "format that the matrices are packed to, such as q4_k_m"
    )


def matrix_format(config: EngineConfig) -> str | None:
    """The format that all matrices get: that of `quantization`, or of an explicit dtype; None keeps what is stored."""
    if config.quantization is not None and config.quantization in QUANTIZATIONS:
        return config.quantization.upper()
    return None if config.dtype == "auto" else DTYPE_FORMATS[DTYPES[config.dtype]]
