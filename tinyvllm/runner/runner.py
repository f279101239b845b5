"""Runs schedules: owns the model, the KV pool and the captured steps. Knows sequences and blocks, no text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType

from tinyvllm.config import EngineConfig
from tinyvllm.errors import ArgumentError
from tinyvllm.models.config import ModelConfig
from tinyvllm.models.families import check_layers, find_family, read_config, refuse_unused, weights_of
from tinyvllm.ops.launch import Captured, download
from tinyvllm.quant.formats import FORMATS, unpack
from tinyvllm.runner.kv import KVPool, block_bytes, kv_dtype
from tinyvllm.runner.memory import check_room, pool_blocks
from tinyvllm.runner.prepare import Shape, StepInputs, shape_of, split
from tinyvllm.scheduler import Schedule, Scheduled
from tinyvllm.weights.checkpoint import Checkpoint, open_checkpoint, open_description
from tinyvllm.weights.hub import resolve_model
from tinyvllm.weights.load import dummy_tensors, load_tensors

# Where nobody asks for a length. Scores of a chunk are laid out for the longest context: 32 heads by 512 queries by 131072 keys are 8 GiB.
DEFAULT_CONTEXT = 8192
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
    """`auto` keeps the dtype that most of the checkpoint's bytes have; packed formats are unpacked to float16.

    A description without tensors has its own word for it, bfloat16 where it is silent.
    """
    if choice != "auto":
        return DTYPES[choice]
    if not checkpoint.tensors:
        return DTYPES.get(str(checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype"))), dtypes.bfloat16)
    sizes: dict[str, int] = {}
    for record in checkpoint.tensors.values():
        sizes[record.format] = sizes.get(record.format, 0) + record.data.nbytes
    common = max(sizes, key=lambda name: sizes[name], default="BF16")
    return {"F32": dtypes.float32, "BF16": dtypes.bfloat16}.get(common, dtypes.float16)


@dataclass(frozen=True)
class PreparedStep:
    """A step whose inputs lie on the device. The first logits of its B rows are those of `sampling`, in this order."""

    sampling: list[Scheduled]
    B: int
    num_blocks: int
    captured: Captured


class Runner:
    """The model on its device. `prepare` and `launch` run a schedule; `prompt_logits` serves evaluation."""

    def __init__(self, config: EngineConfig, device: str, progress: Callable[[int, int, str], None] | None = None):
        self.device = device
        path, dummy = resolve_model(config.model, config.revision), config.load_format == "dummy"
        self.checkpoint = open_description(path) if dummy and path.is_dir() else open_checkpoint(path)
        source = CheckpointSource(self.checkpoint)
        family = find_family(source)
        self.config: ModelConfig = read_config(family, source)
        self.dtype = weight_dtype(config.dtype, self.checkpoint)
        if not dummy:
            check_layers(family, self.config, source)
        self.model = family.model(self.config)
        recipes = weights_of(family, self.config, self.model, self.checkpoint.kind)
        if dummy:
            tensors = dummy_tensors(recipes, device, self.dtype)
        else:
            refuse_unused(self.config, recipes, self.checkpoint.tensors)
            tensors = load_tensors(self.checkpoint, recipes, device, self.dtype, progress)
        place(self.model, tensors)
        self.weight_bytes = sum(prod(recipe.shape) for recipe in recipes) * self.dtype.itemsize
        self.pool, self.max_model_len = self._size_pool(config)
        # a pool too small for the model's context shortens sequences, but must not change what the positions mean
        constants = self.model.constants(self.max_model_len, config.max_model_len or self.config.max_context)
        self._constants = {name: Tensor(a, device=device).realize() for name, a in constants.items()}
        self._table_width = -(-self.max_model_len // config.block_size)
        self._steps: dict[tuple[Shape, bool], tuple[StepInputs, Captured]] = {}

    def _size_pool(self, config: EngineConfig) -> tuple[KVPool, int]:
        """The KV pool and the longest sequence: the model's own context where none was asked for, as far as the pool and reason reach."""
        longest, dtype, size = self.config.max_context, kv_dtype(self.dtype), config.block_size
        if config.max_model_len is not None and config.max_model_len > longest:
            raise ArgumentError(f"max_model_len={config.max_model_len} is beyond the {longest} tokens that the model was made for")
        longest = config.max_model_len or min(longest, DEFAULT_CONTEXT)
        blocks, one = config.num_blocks, block_bytes(self.config, size, dtype)
        if blocks is None:
            blocks = pool_blocks(self.device, one, size, config.max_num_seqs * longest, config.kv_memory)
        check_room(self.device, blocks * one)
        if config.max_model_len is None:
            longest = min(longest, blocks * size)
        return KVPool(self.config, blocks, size, dtype, self.device), longest

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes that one decode step streams: all of them but the input embedding, of which it gathers rows."""
        return self.weight_bytes - (0 if self.config.tied else self.config.vocab_size * self.config.dim * self.dtype.itemsize)

    def prepare(self, schedule: Schedule) -> PreparedStep:
        """Lay a schedule out on the device. The copy waits for the step in flight, so it comes before anything is launched."""
        singles, chunks = split(schedule)
        return self._prepare(singles, chunks, all_rows=False)

    def launch(self, step: PreparedStep) -> Tensor:
        """Start a prepared step; its logits [B, V] float32, in a buffer that the next step of this shape overwrites."""
        return step.captured(num_blocks=step.num_blocks) if self._table_width > 1 else step.captured()

    def prompt_logits(self, entry: Scheduled) -> np.ndarray:
        """Logits float32 [T, V] of every token of one chunk."""
        return download(self.launch(self._prepare([], [entry], all_rows=True)))[: entry.num_tokens]

    def _prepare(self, singles: list[Scheduled], chunks: list[Scheduled], all_rows: bool) -> PreparedStep:
        shape = shape_of(singles, chunks)
        inputs, captured = self._steps.get((shape, all_rows)) or self._new_step(shape, all_rows)
        blocks = inputs.fill(singles, chunks, self.pool.block_size)
        return PreparedStep([e for e in singles + chunks if e.samples], shape.sequences, blocks, captured)

    def _new_step(self, shape: Shape, all_rows: bool) -> tuple[StepInputs, Captured]:
        inputs = StepInputs(shape, self._table_width, self.pool.scratch_slot, self.device)

        def forward(num_blocks: int | UOp = 1) -> Tensor:
            rows = None if all_rows else inputs.row_tensor
            return self.model.forward_batch(inputs.batch(num_blocks), self.pool.layers, rows=rows, **self._constants).contiguous().realize()

        # blocks of the longest context are a variable of the captured step, so that contexts grow without a new capture
        self._steps[shape, all_rows] = inputs, Captured(forward, {"num_blocks": (1, self._table_width)})
        return self._steps[shape, all_rows]

    def tokens(self, sampled: Tensor) -> list[int]:
        """Token ids that a sampler left on the device, once they are there."""
        return download(sampled).tolist()

    @staticmethod
    def gguf_metadata(path: Path) -> dict[str, object]:
        """The metadata of a GGUF file that is not the model's own."""
        return open_checkpoint(path).config


def place(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors where their dotted names say."""
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        owner = model
        for part in path:
            owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
        setattr(owner, last, tensor)
