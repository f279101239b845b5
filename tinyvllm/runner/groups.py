"""Which layers have their keys and values in blocks of their own: those that see everything apart from those with a window."""

from __future__ import annotations

from collections.abc import Iterator

from tinyvllm.config.engine import EngineConfig
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
    same bytes and one pool serves all; the last group of a kind may have fewer. Where the layers of one kind have less to hold, `parts` of
    them share a place, the number of each group. `kept` is why blocks that have left a window are not
    freed, where the model has windows and the caller has not asked for that; else empty.
    """

    blocks: BlockGroups
    layers: tuple[tuple[int, ...], ...]
    kept: str = ""
    parts: tuple[int, ...] = (1,)

    @property
    def size(self) -> int:
        return max(ceil_div(len(layers), parts) for layers, parts in zip(self.layers, self.parts, strict=True))


def layer_groups(config: EngineConfig, model: ModelConfig, context: int) -> LayerGroups:
    """The groups of an engine whose longest sequence has `context` tokens.

    One group where all layers have windows, of which the longest decides, or none has one, or some have recurrent states, or where
    something reads the blocks of all tokens. Otherwise, of the divisions of both kinds into groups of one size, that which holds the
    longest sequence in the least memory: as in vLLM's hybrid KV cache manager, whose groups have as many layers as the smaller kind.
    Layers that read the keys and values of others are in no group.
    """
    if model.delta_layers:
        return _one_group(config, model.kv_layers, 0)
    windows, chunk = (model.windows or (0,) * model.num_blocks)[: model.kv_layers], config.max_num_batched_tokens
    longest, kept = max(windows), _reason_to_keep(config, all(windows))
    kinds = _Kinds.of(model)
    if not kept and not all(windows) and not kinds.fit(config):
        kept = "the blocks of layers with and without a window have no common size"
    if config.disable_hybrid_kv_cache_manager or not longest or kept:
        return _one_group(config, len(windows), 0, kept if longest and not config.disable_hybrid_kv_cache_manager else "")
    if all(windows):
        return _one_group(config, len(windows), longest)
    whole = _one_group(config, len(windows), 0)

    def cost(one: LayerGroups) -> float:
        numbers = kinds.numbers(windows) if one is whole else one.size * kinds.largest
        return numbers * one.blocks.most_blocks(context, chunk) * (1 + GROUP_COST * one.blocks.count)

    return min(whole, *_divisions(config, windows, longest, kinds), key=cost)


@dataclass(frozen=True)
class _Kinds:
    """Numbers of a token's key, or value, in a layer without a window, and in one with it; whether their heads are `equal`."""

    full: int = 1
    windowed: int = 1
    equal: bool = True

    @classmethod
    def of(cls, model: ModelConfig) -> _Kinds:
        if model.window_heads is None:
            return cls()
        heads, width = model.window_heads
        return cls(model.n_kv_heads * model.head_dim, heads * width, equal=False)

    @property
    def largest(self) -> int:
        return max(self.full, self.windowed)

    def fit(self, config: EngineConfig) -> bool:
        """Whether whole layers of the one kind fill a place of the other: packed ones have scales, too."""
        whole = self.largest % self.full == 0 == self.largest % self.windowed
        return self.equal or (whole and config.kv_cache_dtype == "auto")

    def numbers(self, windows: tuple[int, ...]) -> int:
        """Those of layers with these windows."""
        return sum(self.windowed if window else self.full for window in windows)


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


def _divisions(config: EngineConfig, windows: tuple[int, ...], longest: int, kinds: _Kinds) -> Iterator[LayerGroups]:
    """Into groups of every size that gives at most MOST_GROUPS, those of layers without a window first; the largest size first."""
    full = [layer for layer, window in enumerate(windows) if not window]
    windowed = [layer for layer, window in enumerate(windows) if window]
    both = ((full, kinds.largest // kinds.full), (windowed, kinds.largest // kinds.windowed))
    for size in range(max(ceil_div(len(kind), parts) for kind, parts in both), 0, -1):
        counts = [ceil_div(len(kind), size * parts) for kind, parts in both]
        if sum(counts) <= MOST_GROUPS:
            layers = [
                kind[i * size * parts : (i + 1) * size * parts]
                for (kind, parts), count in zip(both, counts, strict=True)
                for i in range(count)
            ]
            shared = tuple(parts for (_, parts), count in zip(both, counts, strict=True) for _ in range(count))
            yield LayerGroups(BlockGroups(Window(longest, config.block_size), *counts), tuple(map(tuple, layers)), parts=shared)
