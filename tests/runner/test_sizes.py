"""Which window decides when blocks are freed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tinyvllm.config import EngineConfig
from tinyvllm.models.config import ModelConfig
from tinyvllm.runner.sizes import freed_window
from tinyvllm.speculative import SpeculativeConfig


@pytest.mark.parametrize("windows, options, expected", [
    ((), {}, 0),
    ((0, 0), {}, 0),
    ((16, 0), {}, 0),
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
    model = cast(ModelConfig, SimpleNamespace(windows=windows))
    assert freed_window(EngineConfig("m", **options), model).tokens == expected
