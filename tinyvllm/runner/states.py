"""The recurrent states on the device: one tensor a layer that has them (`StateCache`), a row for each slot.

A running sequence has the slot of its row; its state is that after its computed tokens, and begins with zeros at position 0, so that
nothing is cleared. After a step with drafts it is that before the first draft, next to what it needs of those that may be accepted. Two
slots are for sequences outside the schedule, some for the prefix cache's copies, and the last one is scratch.
"""

from __future__ import annotations

from typing import Any

from tinygrad import Tensor, dtypes

from tinyvllm.batch import LayerCache, StateCache
from tinyvllm.config.engine import EngineConfig
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import ModelConfig
from tinyvllm.ops.delta import check_step_tokens, has_kernel
from tinyvllm.placement import Placement
from tinyvllm.runner.kv import KVPool
from tinyvllm.weights.mapping import allocate
from tinyvllm.weights.memory import adopt

_OUTSIDE = 2  # rows below 0: SCORED_ROW and ONE_OFF_ROW of tinyvllm/request/sequence.py
_FEWEST = 4  # copies for the prefix cache


@dataclass(frozen=True)
class StateSlots:
    """Slots in their order: of `rows` running sequences, two outside the schedule, `copies` of the prefix cache, and scratch. Each keeps up
    to `drafts` drafts of a step.
    """

    rows: int
    copies: int
    drafts: int = 0

    def of_row(self, row: int) -> int:
        return row if row >= 0 else self.rows - 1 - row

    def of_copy(self, number: int) -> int:
        return self.rows + _OUTSIDE + number

    @property
    def scratch(self) -> int:
        return self.rows + _OUTSIDE + self.copies

    @property
    def count(self) -> int:
        return self.scratch + 1


def state_slots(config: EngineConfig, model: ModelConfig) -> StateSlots | None:
    """The slots of an engine's states, None for a model without: a quarter as many copies as sequences, and a few at least."""
    if model.delta is None:
        return None
    rows, chosen = config.max_num_seqs, config.speculative_config
    drafts = 0 if chosen is None else chosen.state_drafts
    return StateSlots(rows, max(_FEWEST, rows // 4) if config.enable_prefix_caching else 0, drafts)


def drafts_by_kernel(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether a kernel of the engine's device computes states next to the drafts of the configuration."""
    slots = state_slots(config, model)
    return slots is None or model.delta is None or has_kernel(model.delta, config.device, slots.drafts)


def checked_slots(config: EngineConfig, model: ModelConfig, device: str) -> StateSlots | None:
    """`state_slots`. ArgumentError for steps that are too large for the reference, where no kernel computes the states."""
    slots = state_slots(config, model)
    if model.delta is not None and slots is not None:
        check_step_tokens(config.max_num_batched_tokens, model.delta, device, slots.drafts)
    return slots


def state_bytes(model: ModelConfig, slots: StateSlots | None) -> int:
    """Bytes of the states of a layer."""
    return 0 if model.delta is None or slots is None else 4 * model.delta.slot(slots.drafts) * slots.count


def new_states(model: ModelConfig, layers: range, slots: StateSlots | None, device: str, outline: bool = False) -> list[StateCache]:
    """The states of each of these layers that has some; with `outline` in tensors that take no memory."""
    if model.delta is None or slots is None:
        return []
    shape, count = (slots.count, model.delta.slot(slots.drafts)), len(model.delta_layers.intersection(layers))
    tensors = (Tensor.empty(*shape, device=device) if outline else _zeros(shape, device) for _ in range(count))
    return [StateCache(states, slots.drafts) for states in tensors]


def _zeros(shape: tuple[int, int], device: str) -> Tensor:
    if not Placement(device).is_cpu:
        return Tensor.zeros(*shape, device=device).contiguous().realize()
    # pages take memory once a sequence has the slot
    return adopt(allocate(4 * shape[0] * shape[1]).view("float32").reshape(shape), device, dtypes.float32)


def all_caches(model: ModelConfig, layers: range, pool: KVPool, states: list[StateCache]) -> list[Any]:
    """The cache of each of these layers, in their order: `LayerCache` or `StateCache`."""
    with_kv, with_states = iter(pool.layers), iter(states)
    stored: dict[int, LayerCache] = {}
    found: list[Any] = []
    for layer in layers:
        if layer in model.delta_layers:
            found.append(next(with_states))
        elif model.stores_keys(layer):
            stored[layer] = next(with_kv)
            found.append(stored[layer])
        else:
            found.append(pool.reader(stored[model.kv_source(layer)]))
    return found
