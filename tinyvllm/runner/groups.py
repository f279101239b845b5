"""Which layers have their keys and values in blocks of their own: those that see everything apart from those with a window."""

from __future__ import annotations

from collections.abc import Iterator

from tinyvllm.config import EngineConfig
from tinyvllm.integers import ceil_div
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import ModelConfig
from tinyvllm.speculative import KV_HEADS
from tinyvllm.windows import BlockGroups, Window

# Each group has block tables, which take the host's time and the device's memory.
MOST_GROUPS = 8
GROUP_COST = 0.02  # one more must save this share of the memory


@dataclass(frozen=True)
class LayerGroups:
    """The groups of a model's layers, and the layers of each. A block has room for `size` layers, so that blocks of all groups have the
    same bytes and one pool serves all; the last group of a kind may have fewer. `kept` is why blocks that have left a window are not
    freed, where the model has windows and the caller has not asked for that; else empty.
    """

    blocks: BlockGroups
    layers: tuple[tuple[int, ...], ...]
    kept: str = ""

    @property
    def size(self) -> int:
        return max(map(len, self.layers))


def layer_groups(config: EngineConfig, model: ModelConfig, context: int) -> LayerGroups:
    """The groups of an engine whose longest sequence has `context` tokens.

    One group where all layers have windows, of which the longest decides, or none has one, or some have recurrent states, or where
    something reads the blocks of all tokens. Otherwise, of the divisions of both kinds into groups of one size, that which holds the
    longest sequence in the least memory: as in vLLM's hybrid KV cache manager, whose groups have as many layers as the smaller kind.
    """
    if model.delta_layers:
        return _one_group(config, model.kv_layers, 0)
    windows, chunk = model.windows or (0,) * model.num_blocks, config.max_num_batched_tokens
    longest, kept = max(windows), _reason_to_keep(config, all(windows))
    if config.disable_hybrid_kv_cache_manager or not longest or kept:
        return _one_group(config, len(windows), 0, kept if longest and not config.disable_hybrid_kv_cache_manager else "")
    if all(windows):
        return _one_group(config, len(windows), longest)
    whole = _one_group(config, len(windows), 0)

    def cost(one: LayerGroups) -> float:
        return one.size * one.blocks.most_blocks(context, chunk) * (1 + GROUP_COST * one.blocks.count)

    return min(whole, *_divisions(config, windows, longest), key=cost)


def _reason_to_keep(config: EngineConfig, all_windows: bool) -> str:
    chosen = config.speculative_config
    if chosen is not None and chosen.method in KV_HEADS:
        return f"the heads of {chosen.method} have an entry for every token"
    if all_windows:
        return ""
    if chosen is not None and chosen.method == "draft_model":
        return "the draft model has as many blocks as the model, of all layers"
    return "several processes divide the layers" if config.num_ranks > 1 else ""


def _one_group(config: EngineConfig, layers: int, window: int, kept: str = "") -> LayerGroups:
    return LayerGroups(BlockGroups(Window(window, config.block_size)), (tuple(range(layers)),), kept)


def _divisions(config: EngineConfig, windows: tuple[int, ...], longest: int) -> Iterator[LayerGroups]:
    """Into groups of every size that gives at most MOST_GROUPS, those of layers without a window first; the largest size first."""
    full = [layer for layer, window in enumerate(windows) if not window]
    windowed = [layer for layer, window in enumerate(windows) if window]
    for size in range(max(len(full), len(windowed)), 0, -1):
        counts = ceil_div(len(full), size), ceil_div(len(windowed), size)
        if sum(counts) <= MOST_GROUPS:
            layers = [each[i * size : (i + 1) * size] for each, count in zip((full, windowed), counts) for i in range(count)]
            yield LayerGroups(BlockGroups(Window(longest, config.block_size), *counts), tuple(map(tuple, layers)))
