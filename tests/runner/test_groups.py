"""Which layers share blocks, and when their blocks are freed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tinyvllm.config.engine import EngineConfig
from tinyvllm.models.config import ModelConfig
from tinyvllm.runner.groups import MOST_GROUPS, layer_groups
from tinyvllm.speculative import SpeculativeConfig

FIVE_TO_ONE = (16, 16, 16, 16, 16, 0)


def model(
    windows: tuple[int, ...], full: tuple[int, int] = (2, 64), windowed: tuple[int, int] | None = None, shared: int = 0
) -> ModelConfig:
    """`full` and `windowed` are key/value heads and features of a head; the last `shared` layers read the keys and values of others."""
    layers, (heads, width) = len(windows) or 2, full
    return cast(ModelConfig, SimpleNamespace(windows=windows, num_blocks=layers, delta_layers=(), kv_layers=layers - shared,
                n_kv_heads=heads, head_dim=width, window_heads=windowed))  # fmt: skip


@pytest.mark.parametrize("windows, options, expected", [
    ((), {}, 0),
    ((0, 0), {}, 0),
    ((16, 16), {}, 16),
    ((16, 24), {}, 24),
    ((16, 16), {"disable_hybrid_kv_cache_manager": True}, 0),
    ((16, 16), {"speculative_config": SpeculativeConfig("eagle3", model="heads")}, 0),
    ((16, 16), {"speculative_config": SpeculativeConfig("mtp")}, 0),
    ((16, 16), {"speculative_config": SpeculativeConfig("ngram")}, 16),
    ((16, 16), {"speculative_config": SpeculativeConfig("draft_model", model="small")}, 16),
])  # fmt: skip
def test_the_longest_window_decides_where_every_layer_has_one(windows: tuple[int, ...], options: dict[str, Any], expected: int) -> None:
    """And nothing keeps keys and values of all tokens by the blocks' numbers."""
    groups = layer_groups(EngineConfig("m", **options), model(windows), 8192)
    assert groups.blocks.count == 1 and groups.blocks.window.tokens == expected and groups.size == (len(windows) or 2)


@pytest.mark.parametrize("windows, full, windowed, size", [
    (FIVE_TO_ONE, 1, 5, 1),
    ((16, 0) * 12, 1, 1, 12),  # gpt-oss 20b
    ((*(FIVE_TO_ONE * 5), 16, 16, 16, 16), 1, 6, 5),  # Gemma 3 4B: one place is empty
    ((16, 16, 16, 0) * 8, 1, 3, 8),  # OLMo 3 7B
    ((16, 0) * 12 + (16,), 1, 2, 12),
])  # fmt: skip
def test_layers_of_one_kind_form_groups_of_one_size(windows: tuple[int, ...], full: int, windowed: int, size: int) -> None:
    groups = layer_groups(EngineConfig("m"), model(windows), 32768)
    assert (groups.blocks.full, groups.blocks.windowed, groups.size) == (full, windowed, size) and full + windowed <= MOST_GROUPS
    assert sorted(layer for each in groups.layers for layer in each) == list(range(len(windows)))
    for number, each in enumerate(groups.layers):
        assert len(each) <= size and {windows[layer] > 0 for layer in each} == {number >= full}


@pytest.mark.parametrize("options, context, why", [
    ({"disable_hybrid_kv_cache_manager": True}, 8192, ""),
    ({"speculative_config": SpeculativeConfig("mtp")}, 8192, "heads of mtp"),
    ({"speculative_config": SpeculativeConfig("draft_model", model="small")}, 8192, "draft model"),
    ({"tensor_parallel_size": 2, "speculative_config": None}, 8192, "several processes"),
    ({"max_num_batched_tokens": 512}, 500, ""),  # nothing would be freed
])  # fmt: skip
def test_one_group_holds_every_block_and_says_why(options: dict[str, Any], context: int, why: str) -> None:
    groups = layer_groups(EngineConfig("m", **options), model(FIVE_TO_ONE), context)
    assert groups.blocks.count == 1 and not groups.blocks.window.tokens and groups.size == 6
    assert why in groups.kept and bool(why) == bool(groups.kept)


SIX = (16,) * 5 + (0,)


@pytest.mark.parametrize("windows, full, windowed, shared, members, parts", [
    (SIX * 5, (2, 512), (8, 256), 0, [5, 4, 4, 4, 4, 4, 4, 1], (2, *(1,) * 7)),  # Gemma 4 26B A4B, with empty places
    ((16, 16, 16, 16, 0) * 7, (1, 512), (1, 256), 20, [3, 6, 6], (1, 2, 2)),  # E2B
    (SIX * 7, (2, 512), (2, 256), 18, [4, 8, 8, 4], (1, 2, 2, 2)),  # E4B
])  # fmt: skip
def test_smaller_layers_share_a_place(windows, full, windowed, shared, members, parts) -> None:  # noqa: ANN001
    groups = layer_groups(EngineConfig("m"), model(windows, full, windowed, shared), 32768)
    assert [len(each) for each in groups.layers] == members and groups.parts == parts
    assert groups.size == max(-(-count // part) for count, part in zip(members, parts, strict=True))
    assert sorted(layer for each in groups.layers for layer in each) == list(range(len(windows) - shared))


def test_blocks_without_a_common_size_are_kept() -> None:
    for kind, windowed in (("int8", (8, 256)), ("auto", (3, 256))):
        groups = layer_groups(EngineConfig("m", kv_cache_dtype=kind), model(SIX, (2, 512), windowed), 32768)
        assert groups.blocks.count == 1 and "no common size" in groups.kept
