"""What a model takes in memory, before anything is loaded: the size of the KV pool, scratch, and how many sequences of which length fit."""

from __future__ import annotations

from dataclasses import dataclass

from tinyvllm.config import EngineConfig
from tinyvllm.errors import ArgumentError
from tinyvllm.integers import round_up
from tinyvllm.models.config import ModelConfig
from tinyvllm.runner.adapters import adapter_bytes
from tinyvllm.runner.groups import LayerGroups, layer_groups
from tinyvllm.runner.memory import NO_DRAFTER, DrafterMemory, check_room, free_memory, pool_blocks
from tinyvllm.runner.opened import OpenedModel
from tinyvllm.runner.states import state_bytes, state_slots

# If no length is given. Scores of a chunk are laid out for the longest context: 32 heads by 512 queries by 131072 keys are 8 GiB.
DEFAULT_CONTEXT = 8192
SCRATCH_BLOCKS = 1  # of the KV pool, for padded rows


@dataclass(frozen=True)
class PoolSize:
    """Blocks of the KV pool that sequences may use, and the longest sequence in tokens."""

    num_blocks: int
    max_model_len: int


def wanted_context(config: EngineConfig, model: ModelConfig) -> int:
    """The longest sequence that is wanted: as given, else the model's own context up to DEFAULT_CONTEXT. ArgumentError beyond it."""
    longest = model.max_context
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ArgumentError(f"max_model_len={config.max_model_len} is beyond the {longest} tokens that the model was made for")
    return config.max_model_len or min(longest, DEFAULT_CONTEXT)


def groups_of(config: EngineConfig, model: ModelConfig) -> LayerGroups:
    """The groups of layers of an engine. ArgumentError for a length beyond the model's."""
    return layer_groups(config, model, wanted_context(config, model))


def block_bytes(config: EngineConfig, opened: OpenedModel) -> int:
    """Bytes of a block of the pool, in all ranks: of all layers, or of a group's."""
    return opened.block_bytes // opened.config.kv_layers * groups_of(config, opened.config).size


def pool_size(config: EngineConfig, opened: OpenedModel, drafter: DrafterMemory = NO_DRAFTER, free: int | None = None) -> PoolSize:
    """The KV pool, with the weights loaded. `free` is the free memory of a plan; None asks the device.

    Without a length in `config` the longest sequence is limited by the pool. Errors of `pool_blocks` and `check_room`.
    """
    device, size, one = opened.plan.placement.device, config.block_size, block_bytes(config, opened)
    rows = groups_of(config, opened.config).blocks.count
    if held := adapter_bytes(config, opened) + state_bytes(opened.config, state_slots(config, opened.config)):
        free = (free_memory(device) if free is None else free) - held
    longest, blocks = wanted_context(config, opened.config), config.num_blocks
    if blocks is None:
        wanted = config.max_num_seqs * round_up(longest, size) * rows
        blocks = pool_blocks(device, one, size, wanted, config.kv_memory, drafter, free)
    if opened.leads:  # the others have what it has divided
        check_room(device, blocks * one, drafter.total(blocks), free)
    return PoolSize(blocks, longest if config.max_model_len is not None else _longest(blocks, longest, config, opened))


def scratch_bytes(config: EngineConfig, opened: OpenedModel, max_model_len: int) -> int:
    """Bytes of what steps read and write next to weights and KV pool, all in float32.

    The tables of positions, the room for adapters and recurrent states, exactly, and the results of the largest step: those of one
    layer, which the next layer uses again, and the logits.
    """
    c = opened.config
    constants = opened.model.constants(max_model_len, config.max_model_len or c.max_context)
    heads = (2 * c.n_heads + 2 * c.n_kv_heads) * c.head_dim
    row = 2 * c.dim + heads + 2 * c.hidden_dim
    results = 4 * (config.max_num_batched_tokens * row + config.max_num_seqs * c.vocab_size)
    held = adapter_bytes(config, opened) + state_bytes(c, state_slots(config, c))
    return int(sum(array.nbytes for array in constants.values())) + held + results


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
