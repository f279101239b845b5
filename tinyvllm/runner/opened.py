"""A checkpoint as it is understood before anything is loaded: the model's configuration, the recipes of its weights, and what they take."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tinygrad.dtype import DType

from tinyvllm.config import EngineConfig, cache_folder, environment, expand_home
from tinyvllm.distributed.memory import SharedMemory
from tinyvllm.models.config import ModelConfig, WeightRecipe
from tinyvllm.models.families import check_layers, find_family, read_config, recipes_of, refuse_unused
from tinyvllm.placement import Placement, RankGroup
from tinyvllm.runner.kv import BlockShape
from tinyvllm.runner.outlined import WeightOutline
from tinyvllm.runner.source import CheckpointSource, matrix_format, require_quantization, weight_dtype
from tinyvllm.runner.split import Split, rank_group, shared_layout
from tinyvllm.runner.weight_plan import WeightPlan
from tinyvllm.runner.weights import WeightLoader
from tinyvllm.weights.checkpoint import Checkpoint, open_checkpoint, open_description
from tinyvllm.weights.hub import resolve_model
from tinyvllm.weights.imatrix import read_imatrix
from tinyvllm.weights.quantized.notes import without_zero_biases


@dataclass(frozen=True)
class OpenedModel:
    """`stored` is the checkpoint that weights come from, None for random ones; `block` the shape of a layer's cache block."""

    checkpoint: Checkpoint
    stored: Checkpoint | None
    config: ModelConfig
    dtype: DType
    model: Any
    recipes: list[WeightRecipe]
    plan: WeightPlan
    block: BlockShape
    block_size: int
    split: Split | None = None
    memory: SharedMemory | None = None  # of rank 0, which starts the others

    @property
    def block_bytes(self) -> int:
        """Bytes of a cache block in all layers."""
        return self.config.num_blocks * self.block.nbytes

    @property
    def weight_bytes(self) -> int:
        """How much the weights take."""
        return self.outline().bytes

    def outline(self, quantization: str | None = None) -> WeightOutline:
        """The weights without loading: the model gets empty tensors. `quantization` is another than the configuration's."""
        plan = self.plan if quantization is None else replace(self.plan, format=quantization.upper(), imatrix=None)
        outline = WeightOutline(self.stored, plan)
        outline.load(self.model, self.recipes)
        return outline

    def loader(self, progress: Callable[[int, int, str], None] | None = None) -> WeightLoader:
        kept = cache_folder() if environment(os.environ).get("TINYVLLM_KEEP_PANELS", True) else None
        return WeightLoader(self.stored, self.plan, progress, kept, self.split)


def open_model(config: EngineConfig, device: str, group: RankGroup | None = None) -> OpenedModel:
    """Read and check the description of a configuration's model. ModelError and FormatError say what does not fit.

    `group` is that of a rank above 0; rank 0 makes its own.
    """
    path, dummy = resolve_model(config.model, config.revision), config.load_format == "dummy"
    checkpoint = open_description(path) if dummy and path.is_dir() else open_checkpoint(path)
    stored = None if dummy else checkpoint
    require_quantization(config, stored)
    source = CheckpointSource(checkpoint)
    family = find_family(source)
    model_config, dtype = read_config(family, source), weight_dtype(config.dtype, checkpoint)
    if stored is not None:
        check_layers(family, model_config, source)
    model = family.model(model_config)
    recipes = recipes_of(family, model_config, model, checkpoint.kind)
    if stored is not None:
        refuse_unused(model_config, recipes, without_zero_biases(stored.tensors))
    imatrix = None if config.imatrix is None else read_imatrix(expand_home("imatrix", config.imatrix))
    plan = WeightPlan(Placement(device), dtype, matrix_format(config), imatrix)
    memory = None
    if config.tensor_parallel_size > 1 and group is None:
        memory = SharedMemory(shared_layout(config, model_config))
        group = rank_group(memory, 0)
    split = None if group is None else Split(model_config, group)
    block = BlockShape.of(split.local if split else model_config, config.block_size, config.kv_cache_dtype, dtype)
    return OpenedModel(checkpoint, stored, model_config, dtype, model, recipes, plan, block, config.block_size, split, memory)
