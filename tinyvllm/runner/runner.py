"""Runs schedules: owns the model, the KV pool and the captured steps. Knows sequences and blocks, no text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, TinyJit, UOp, Variable, dtypes
from tinygrad.dtype import DType

from tinyvllm.models.config import ModelConfig
from tinyvllm.models.families import find_family, read_config, weights_of
from tinyvllm.quant.formats import FORMATS, unpack
from tinyvllm.ops.launch import capture, download, synchronize
from tinyvllm.runner.kv import KVPool, block_bytes, kv_dtype
from tinyvllm.runner.memory import pool_blocks
from tinyvllm.runner.prepare import Shape, StepInputs, shape_of, split
from tinyvllm.scheduler import Schedule, Scheduled
from tinyvllm.weights.checkpoint import Checkpoint, open_checkpoint
from tinyvllm.weights.load import dummy_tensors, load_tensors

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


def weight_dtype(choice: str, checkpoint: Checkpoint, device: str) -> DType:
    """`auto` keeps the dtype that most of the checkpoint's bytes have; packed formats are unpacked to float16 (float32 sources stay)."""
    if choice != "auto":
        return DTYPES[choice]
    sizes: dict[str, int] = {}
    for record in checkpoint.tensors.values():
        sizes[record.format] = sizes.get(record.format, 0) + record.data.nbytes
    common = max(sizes, key=lambda name: sizes[name], default="BF16")
    return {"F32": dtypes.float32, "BF16": dtypes.bfloat16}.get(common, dtypes.float16)


class Runner:
    """The model on its device. `run` takes a schedule, returns logits on the device; `prompt_logits` serves evaluation."""

    def __init__(
        self,
        path: Path,
        *,
        device: str,
        dtype: str = "auto",
        load_format: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int,
        block_size: int,
        num_blocks: int | None = None,
        kv_memory: int | None = None,
        progress: Callable[[int, int, str], None] | None = None,
    ):
        checkpoint = open_checkpoint(path)
        source = CheckpointSource(checkpoint)
        family = find_family(source)
        self.device = device
        self.config: ModelConfig = read_config(family, source)
        self.max_model_len = min(max_model_len or self.config.max_context, self.config.max_context)
        self.dtype = weight_dtype(dtype, checkpoint, device)
        self.model = family.model(self.config, self.max_model_len)
        recipes = weights_of(family, self.config, self.model, checkpoint.kind)
        if load_format == "dummy":
            tensors = dummy_tensors(recipes, device, self.dtype)
        else:
            tensors = load_tensors(checkpoint, recipes, device, self.dtype, progress)
        place(self.model, tensors)
        self.weight_bytes = sum(int(np.prod(t.shape)) * t.dtype.itemsize for t in tensors.values())
        self._constants = {name: Tensor(array, device=device).realize() for name, array in self.model.constants().items()}
        cache_dtype = kv_dtype(self.dtype)
        if num_blocks is None:
            one = block_bytes(self.config, block_size, cache_dtype)
            num_blocks = pool_blocks(device, one, block_size, max_num_seqs * self.max_model_len, kv_memory)
        self.pool = KVPool(self.config, num_blocks, block_size, cache_dtype, device)
        self._table_width = -(-self.max_model_len // block_size)
        self._steps: dict[tuple[Shape, bool], tuple[StepInputs, TinyJit]] = {}

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes that one decode step streams: all of them but the input embedding, of which it gathers rows."""
        return self.weight_bytes - (0 if self.config.tied else self.config.vocab_size * self.config.dim * self.dtype.itemsize)

    def run(self, schedule: Schedule) -> tuple[Tensor, list[Scheduled]]:
        """Launch one step. Returns logits [B, V] float32, padded, and the entries whose logits are its first rows, in order."""
        singles, chunks = split(schedule)
        logits = self._launch(singles, chunks, all_rows=False)
        return logits, [entry for entry in singles + chunks if entry.samples]

    def prompt_logits(self, entry: Scheduled) -> np.ndarray:
        """Logits float32 [T, V] of every token of one chunk."""
        logits = self._launch([], [entry], all_rows=True)
        return download(logits)[: entry.num_tokens]

    def _launch(self, singles: list[Scheduled], chunks: list[Scheduled], all_rows: bool) -> Tensor:
        shape = shape_of(singles, chunks)
        inputs, step = self._steps.get((shape, all_rows)) or self._new_step(shape, all_rows)
        blocks = inputs.fill(singles, chunks, self.pool.block_size)
        width = self._table_width
        return step(blocks_variable(width).bind(blocks)) if width > 1 else step()

    def _new_step(self, shape: Shape, all_rows: bool) -> tuple[StepInputs, TinyJit]:
        inputs = StepInputs(shape, self._table_width, self.pool.scratch_slot, self.device)

        def forward(num_blocks: int | UOp = 1) -> Tensor:
            rows = None if all_rows else inputs.row_tensor
            return self.model.forward(inputs.batch(num_blocks), self.pool.layers, rows=rows, **self._constants).contiguous().realize()

        self._steps[shape, all_rows] = inputs, capture(forward)
        return self._steps[shape, all_rows]

    def synchronize(self) -> None:
        synchronize(self.device)


def blocks_variable(width: int) -> UOp:
    """Blocks of the longest context: a variable of the captured step, so that contexts grow without a new capture."""
    return Variable("num_blocks", 1, width)


def place(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors where their dotted names say."""
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        owner = model
        for part in path:
            owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
        setattr(owner, last, tensor)


def pick_device(choice: str) -> str:
    """`auto` is tinygrad's own choice: Metal, then CUDA, then the CPU; anything else is a device name of tinygrad's."""
    return Device.DEFAULT if choice == "auto" else Device.canonicalize(choice.upper())
