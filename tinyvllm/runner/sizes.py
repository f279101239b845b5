"""What a model takes in memory, before anything is loaded: the size of the KV pool, scratch, and how many sequences of which length fit."""

from __future__ import annotations

from tinyvllm.config.engine import EngineConfig
from tinyvllm.integers import round_up
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import ModelConfig
from tinyvllm.runner.adapters import adapter_bytes
from tinyvllm.runner.groups import LayerGroups, layer_groups
from tinyvllm.runner.memory import NO_DRAFTER, DrafterMemory, check_room, check_weights, free_memory, pool_blocks
from tinyvllm.runner.opened import OpenedModel
from tinyvllm.runner.scratch import step_bytes, wanted_context
from tinyvllm.runner.states import state_bytes, state_slots

SCRATCH_BLOCKS = 1  # of the KV pool, for padded rows


@dataclass(frozen=True)
class PoolSize:
    """Blocks of the KV pool that sequences may use, and the longest sequence in tokens."""

    num_blocks: int
    max_model_len: int


def groups_of(config: EngineConfig, model: ModelConfig) -> LayerGroups:
    """The groups of layers of an engine. ArgumentError for a length beyond the model's."""
    return layer_groups(config, model, wanted_context(config, model))


def block_bytes(config: EngineConfig, opened: OpenedModel) -> int:
    """Bytes of a block of the pool, in all ranks: of all layers, or of a group's."""
    groups = groups_of(config, opened.config)
    return opened.group_bytes(groups.size) if groups.blocks.count > 1 else opened.block_bytes


def pool_size(config: EngineConfig, opened: OpenedModel, drafter: DrafterMemory = NO_DRAFTER, free: int | None = None) -> PoolSize:
    """The KV pool, with the weights loaded. `free` is the free memory of a plan; None asks the device. Where several devices have layers
    the pool has the same number of blocks on each, so that the least decides; what they have free is known since the layers were divided.

    Without a length in `config` the longest sequence is limited by the pool. Errors of `pool_blocks` and `check_room`.
    """
    device, size, one = opened.plan.placement.device, config.block_size, block_bytes(config, opened)
    rows = groups_of(config, opened.config).blocks.count
    if held := _held_bytes(config, opened):
        free = (free_memory(device) if free is None else free) - held
    together: list[tuple[str, int, int | None]] = [(device, one, free)]
    places = [(use.device, use.block, use.left) for use in opened.memory_uses] or together
    longest, blocks = wanted_context(config, opened.config), config.num_blocks
    if blocks is None:
        wanted = config.max_num_seqs * round_up(longest, size) * rows
        counted = places if config.kv_memory is None else together
        given = size, wanted, config.kv_memory, drafter
        blocks = min(pool_blocks(device, block, *given, free, config.data_parallel_size) for device, block, free in counted)
    if opened.leads:  # the others have what it has divided
        for device, block, free in places:
            check_room(device, blocks * block, drafter.total(blocks), free)
    return PoolSize(blocks, longest if config.max_model_len is not None else _longest(blocks, longest, config, opened))


def check_all_weights(opened: OpenedModel, free: int | None = None) -> None:
    """`check_weights` of the engine's device, with `free` bytes in a plan; of each of several devices."""
    for use in opened.memory_uses:
        check_weights(use.device, use.weights, use.free)
    if not opened.memory_uses:
        check_weights(opened.plan.placement.device, opened.weight_bytes, free)


def scratch_bytes(config: EngineConfig, opened: OpenedModel, max_model_len: int) -> int:
    """Bytes of what steps read and write next to weights and KV pool, with the room for adapters and recurrent states, in all ranks."""
    return config.num_ranks * step_bytes(config, opened.config, opened.model, max_model_len) + _held_bytes(config, opened)


def _held_bytes(config: EngineConfig, opened: OpenedModel) -> int:
    """Bytes of the room for adapters and recurrent states, in all ranks."""
    states = len(opened.config.delta_layers) * state_bytes(opened.part, state_slots(config, opened.config)) * opened.shares
    return adapter_bytes(config, opened) + states


def _most_blocks(context: int, config: EngineConfig, opened: OpenedModel) -> int:
    """Blocks that a sequence of `context` tokens holds at most at a time."""
    return groups_of(config, opened.config).blocks.most_blocks(context, config.max_num_batched_tokens)


def _longest(blocks: int, wanted: int, config: EngineConfig, opened: OpenedModel) -> int:
    """The longest sequence, up to `wanted` tokens, that `blocks` blocks hold."""
    return groups_of(config, opened.config).blocks.longest(blocks, wanted, config.max_num_batched_tokens)


@dataclass(frozen=True)
class Fit:
    """How long the contexts of `sequences` sequences may be at the same time, in tokens."""

    sequences: int
    context: int


def longest_contexts(room: int, config: EngineConfig, opened: OpenedModel, drafter: DrafterMemory = NO_DRAFTER) -> list[Fit]:
    """What `room` bytes hold as keys and values, for 1, 2, 4, ... up to max_num_seqs sequences; none where not a block fits for each."""
    both = block_bytes(config, opened) + drafter.block
    blocks = (room - drafter.weights - drafter.own) // both - SCRATCH_BLOCKS
    counts = sorted({1 << n for n in range(config.max_num_seqs.bit_length())} | {config.max_num_seqs})
    return [Fit(n, _longest(blocks // n, opened.config.max_context, config, opened)) for n in counts if blocks // n > 0]


def room_of(context: int, sequences: int, config: EngineConfig, opened: OpenedModel, drafter: DrafterMemory = NO_DRAFTER) -> int:
    """Bytes of the KV pool, and of a drafter, for `sequences` sequences of `context` tokens."""
    blocks = sequences * _most_blocks(context, config, opened)
    return (blocks + SCRATCH_BLOCKS) * block_bytes(config, opened) + drafter.total(blocks)
