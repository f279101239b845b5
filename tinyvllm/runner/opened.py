"""A checkpoint as it is understood before anything is loaded: the model's configuration, the recipes of its weights, and what they take."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from tinygrad.dtype import DType

from tinyvllm.config.engine import EngineConfig
from tinyvllm.config.switches import cache_folder, environment
from tinyvllm.config.values import expand_home
from tinyvllm.distributed.memory import SharedMemory
from tinyvllm.errors import ModelError
from tinyvllm.integers import ceil_div
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import ModelConfig, WeightRecipe
from tinyvllm.models.families import check_layers, find_family, read_config, recipes_of, refuse_unused
from tinyvllm.placement import Placement, RankGroup
from tinyvllm.runner.grid import context_ranks, rank_environments, shared_layout, tensor_ranks
from tinyvllm.runner.kv import BlockShape, KVPool, Layers
from tinyvllm.runner.memory import free_memory, run_bytes
from tinyvllm.runner.outlined import AllWeights, WeightOutline
from tinyvllm.runner.pipeline import PipelineStage, RankStart, divide_layers, require_layers, sizes_by_layer
from tinyvllm.runner.scratch import step_bytes, wanted_context
from tinyvllm.runner.source import CheckpointSource, matrix_format, require_quantization, weight_dtype
from tinyvllm.runner.split import Split
from tinyvllm.runner.states import state_bytes, state_slots
from tinyvllm.runner.weight_plan import WeightPlan
from tinyvllm.runner.weights import WeightLoader
from tinyvllm.sampling.parameters import SamplingFlags
from tinyvllm.weights.checkpoint import Checkpoint, open_checkpoint, open_description
from tinyvllm.weights.hub import resolve_model
from tinyvllm.weights.imatrix import read_imatrix
from tinyvllm.weights.quantized.notes import without_zero_biases

if TYPE_CHECKING:
    from tinyvllm.runner.division import Division, MemoryUse


@dataclass(frozen=True)
class OpenedModel:
    """`stored` is the checkpoint that weights come from, None for random ones; `block` the shape of a layer's cache block. Where they
    differ, `block` is the largest of `shapes`, those of all layers with keys and values.
    """

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
    stage: PipelineStage | None = None
    memory: SharedMemory | None = None  # of rank 0, which starts the others
    whole: WeightOutline | AllWeights | None = None  # the weights of the model, where several ranks divide them
    division: Division | None = None  # of rank 0, where ranks are on several devices
    shapes: tuple[BlockShape, ...] = ()
    blocks: tuple[Any, ...] = ()  # all layers of the model, whichever ranks have them
    copies: int = 0  # bytes of the weights that other ranks hold once more, if they do not find them in the cache folder
    gpu_uses: tuple[MemoryUse, ...] = ()  # of rank 0, where each rank has a GPU of its own: what each takes
    likely_draw: SamplingFlags = SamplingFlags()  # what most requests will need, so that it is compiled with what precedes it

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, or the only one."""
        return self.memory is not None or (self.split is None and self.stage is None)

    @property
    def takes_stream(self) -> bool:
        """Whether the residual stream comes from another stage, and not from the embedding."""
        return self.stage is not None and not self.stage.is_first

    @property
    def memory_uses(self) -> tuple[MemoryUse, ...]:
        """What the memory of each of several devices holds; nothing for one device."""
        return self.gpu_uses if self.division is None or self.stage is None else self.division.uses(len(self.stage.layers))

    @property
    def part(self) -> ModelConfig:
        """The configuration with the heads of this process."""
        return self.split.local if self.split else self.config

    @property
    def layers(self) -> range:
        """The layers of this process."""
        return self.stage.layers if self.stage else range(self.config.num_blocks)

    @property
    def shares(self) -> int:
        """How many ranks have a part of each layer's cache."""
        groups = (self.split.group if self.split else None, self.block.ranks)
        return prod(group.world_size for group in groups if group)

    @property
    def block_bytes(self) -> int:
        """Bytes of a cache block in all layers, and in all ranks."""
        return sum(map(self.layer_block_bytes, range(self.config.num_blocks))) * self.shares

    def group_bytes(self, size: int) -> int:
        """Bytes of a block of a group that has `size` of the largest places."""
        return self.block_bytes // self.config.kv_layers * size if not self.shapes else self.block.nbytes * size

    @property
    def own_kv_layers(self) -> int:
        """The layers of this process that have keys and values of their own."""
        return len([layer for layer in self.layers if self.config.stores_keys(layer)])

    @property
    def own_shapes(self) -> tuple[BlockShape, ...]:
        """Their shapes, where layers differ."""
        return self.shapes[self.layers.start : self.layers.stop]

    @property
    def own_block_bytes(self) -> int:
        """Bytes of a cache block in this process."""
        return sum(map(self.layer_block_bytes, self.layers))

    def layer_block_bytes(self, layer: int) -> int:
        """Bytes of a cache block in one layer, in this process; 0 for a layer without keys and values of its own."""
        if not self.config.stores_keys(layer):
            return 0
        return self.shapes[layer].nbytes if self.shapes else self.block.nbytes

    @property
    def weight_bytes(self) -> int:
        """How much the weights take, in all ranks together."""
        return (self.whole or self.outline()).bytes + self.copies

    @property
    def keeps_steps(self) -> bool:
        """Whether captured steps may be kept on disk for a later engine."""
        return True

    def on_device(self, device: str) -> OpenedModel:
        """The same on another device."""
        return replace(self, plan=replace(self.plan, placement=Placement(device)))

    def outline(self, quantization: str | None = None) -> WeightOutline:
        """This rank's weights without loading: the model gets empty tensors. `quantization` is another than the configuration's."""
        plan = self.plan if quantization is None else replace(self.plan, format=quantization.upper(), imatrix=None)
        outline = WeightOutline(self.stored, plan, self.split, self.stage)
        outline.load(self.model, self.recipes)
        return outline

    def loader(self, progress: Callable[[int, int, str], None] | None = None) -> WeightLoader:
        kept = cache_folder() if environment(os.environ).get("TINYVLLM_KEEP_PANELS", True) else None
        return WeightLoader(self.stored, self.plan, progress, kept, self.split, self.stage)

    def pool(self, layers: int, num_blocks: int, groups: Layers | None = None) -> KVPool:
        """Keys and values of `layers` layers, in these groups."""
        device = self.plan.placement.device
        return KVPool(layers, num_blocks, self.block_size, self.block, device, groups, shapes=self.own_shapes)


def open_model(config: EngineConfig, device: str, start: RankStart | None = None) -> OpenedModel:
    """Read and check the description of a configuration's model. ModelError and FormatError say what does not fit.

    `start` is that of a rank above 0; rank 0 makes its own.
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
    block, shapes = _block_shapes(config, model_config, dtype)
    opened = OpenedModel(checkpoint, stored, model_config, dtype, model, recipes, plan, block, config.block_size)
    opened = replace(opened, shapes=shapes, blocks=tuple(model.blk))
    return opened if config.num_ranks == 1 else _part_of_rank(config, opened, start)


def _block_shapes(
    config: EngineConfig, model: ModelConfig, dtype: DType, ranks: RankGroup | None = None
) -> tuple[BlockShape, tuple[BlockShape, ...]]:
    """The largest block of a layer that has keys and values; those of all of them, where they differ."""
    layers = [model.of_layer(layer) for layer in range(model.kv_layers)] if model.window_heads else [model]
    shapes = tuple(BlockShape.of(layer, config.block_size, config.kv_cache_dtype, dtype, ranks) for layer in layers)
    block = max(shapes, key=lambda shape: shape.nbytes)
    return block, () if all(shape == block for shape in shapes) else shapes


def _part_of_rank(config: EngineConfig, opened: OpenedModel, start: RankStart | None) -> OpenedModel:
    """What a rank has of a model that was opened whole."""
    c, model, split, stage, whole, copies = opened.config, opened.model, None, None, None, 0
    _refuse_undivided(config, c)
    if config.on_gpus and start is None:
        rank_environments(config)  # raises where there are too few
    memory, rank, ends = (start.memory, start.rank, start.stage_ends) if start else (SharedMemory(shared_layout(config, c)), 0, [])
    if config.more_devices and start is None:
        return _part_of_devices(config, opened, memory)
    placement = opened.plan.placement
    tensor, context = tensor_ranks(memory, rank, placement), context_ranks(memory, rank, placement)
    if tensor is not None:
        split = Split(c, tensor)
        for layer in model.blk:
            layer.take_heads(split.local)
    if start is None:
        copies, whole = _copied_bytes(config, opened), opened.outline()
        ends = _stage_ends(config, opened, whole)
    is_copy = context is not None and context.rank > 0
    if config.pipeline_parallel_size > 1 or is_copy:
        stage = PipelineStage(memory.layout.stage(rank), ends or [c.num_blocks], c.tied, model.in_every_stage(), is_copy)
        model.blk = [model.blk[layer] for layer in stage.layers]
    block, shapes = _block_shapes(config, split.local if split else c, opened.dtype, context)
    own = replace(opened, block=block, split=split, stage=stage, shapes=shapes)
    uses = _gpu_uses(config, own) if config.on_gpus and start is None else ()
    return replace(own, memory=None if start else memory, whole=whole, copies=copies, gpu_uses=uses)


def _gpu_uses(config: EngineConfig, own: OpenedModel) -> tuple[MemoryUse, ...]:
    """What the GPU of each rank holds, by the sizes of rank 0's part of each stage; GPUs are taken to have as much free as rank 0's."""
    from tinyvllm.runner.division import MemoryUse

    c, device, model, uses = own.config, config.device, own.model, list[MemoryUse]()
    free, run = free_memory(device), step_bytes(config, c, model, wanted_context(config, c))
    slots, layers = state_slots(config, c), model.blk
    copied = (config.context_parallel_size - 1) * own.block.nbytes  # of a layer of the others, for rows of prompts
    for number in reversed(range(config.pipeline_parallel_size)):
        part = own if own.stage is None else replace(own, stage=replace(own.stage, number=number))
        model.blk = [own.blocks[layer] for layer in part.layers]
        states = len([layer for layer in part.layers if layer in c.delta_layers]) * state_bytes(part.part, slots)
        use = MemoryUse(device, part.outline().bytes, part.own_block_bytes + copied, run + states, free)
        uses += [use] * (config.tensor_parallel_size * config.context_parallel_size)
    model.blk = layers
    return tuple(uses)


def _copied_bytes(config: EngineConfig, opened: OpenedModel) -> int:
    """Bytes of the weights that ranks which divide contexts hold once more."""
    copy = replace(opened, stage=PipelineStage(0, [opened.config.num_blocks], opened.config.tied, is_copy=True))
    return (config.context_parallel_size - 1) * copy.outline().own_bytes if config.context_parallel_size > 1 else 0


def _refuse_undivided(config: EngineConfig, c: ModelConfig) -> None:
    """ModelError for layers that cannot be on several devices yet, or whose caches contexts cannot divide."""
    if not config.more_devices and config.context_parallel_size == 1:
        return
    given = f"device={config.device_names}" if config.more_devices else f"context_parallel_size={config.context_parallel_size}"
    if c.delta is not None:
        raise ModelError(f"{given}: models with recurrent states (gated DeltaNet) are not divided yet; leave it out")
    if c.window_heads is not None or c.shared_kv_layers or c.layer_input_dim:
        raise ModelError(f"{given}: layers with other heads, or inputs of their own, are not divided yet; leave it out")


def _part_of_devices(config: EngineConfig, opened: OpenedModel, memory: SharedMemory) -> OpenedModel:
    """What rank 0 has where the layers are on several devices: the last ones. The others' part is that of a stage."""
    c, model = opened.config, opened.model
    require_layers(c.num_blocks, len(config.devices))
    gpu, cpu = outlines = [opened.on_device(device).outline() for device in config.devices]
    division = _division(config, opened, outlines)
    count = division.choose(config.gpu_layers, *wanted_blocks(config, opened))
    ends = [c.num_blocks - count, c.num_blocks]
    first, last = (PipelineStage(number, ends, c.tied) for number in range(2))
    model.blk = [model.blk[layer] for layer in last.layers]
    return replace(opened, stage=last, memory=memory, whole=AllWeights.of([(cpu, first), (gpu, last)]), division=division)


def _division(config: EngineConfig, opened: OpenedModel, outlines: list[WeightOutline]) -> Division:
    """The ways of dividing layers between the devices; `outlines` are those of the whole model on each."""
    from tinyvllm.runner.division import DeviceLayers, Division, gpu_reserve  # a start on one device does without

    c = opened.config
    steps = step_bytes(config, c, opened.model, wanted_context(config, c))
    free, largest = free_memory(config.device), max(held.nbytes for held in outlines[0].held)
    gpu = DeviceLayers(config.device, layer_weights(c, outlines[0]), steps + gpu_reserve(free, largest), free)
    host, *_ = config.more_devices
    cpu = DeviceLayers(host, layer_weights(c, outlines[1]), steps + run_bytes(host), free_memory(host))
    return Division(gpu, cpu, opened.block.nbytes, Placement(gpu.device).is_metal)


def layer_weights(c: ModelConfig, outline: WeightOutline) -> tuple[int, ...]:
    """Bytes of the weights of each layer, the first with the embedding table, the last with final norm and head."""
    return tuple(sizes_by_layer(((held.name, held.nbytes) for held in outline.held), c.num_blocks, c.tied))


def wanted_blocks(config: EngineConfig, opened: OpenedModel) -> tuple[int, bool]:
    """The blocks of the KV cache that layers are divided for, and whether its size is given; else those of one sequence of the longest."""
    if config.num_blocks is not None:
        return config.num_blocks, True
    if config.kv_memory is not None:
        return config.kv_memory // opened.block_bytes, True
    return ceil_div(wanted_context(config, opened.config), config.block_size), False


def _stage_ends(config: EngineConfig, opened: OpenedModel, whole: WeightOutline) -> list[int]:
    """The layers of each stage, by bytes of weights, of states, and of keys and values: without a size, those of the longest sequences, but
    at most as much as the weights. Ranks that divide contexts have weights of their own, but parts of the cache.
    """
    c = opened.config
    if config.num_blocks is not None:
        blocks = config.num_blocks
    elif config.kv_memory is not None:
        blocks = config.kv_memory // opened.block_bytes
    else:
        tokens = config.max_num_seqs * (config.max_model_len or c.max_context)
        blocks = min(tokens // config.block_size, whole.bytes // opened.block_bytes)
    everywhere = {f"{name}.weight" for name in opened.model.in_every_stage()} - {"token_embd.weight"}  # makes no stage larger than another
    sizes = [(held.name, held.nbytes) for held in whole.held if held.name not in everywhere]
    state = state_bytes(c, state_slots(config, c))
    kv = [blocks * opened.layer_block_bytes(layer) // config.context_parallel_size for layer in range(c.num_blocks)]
    caches = [state if layer in c.delta_layers else nbytes for layer, nbytes in enumerate(kv)]
    return divide_layers(sizes, caches, config.pipeline_parallel_size, c.tied, len(c.undivided))
