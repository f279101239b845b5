"""Which heads of layers with recurrent states a rank has."""

from __future__ import annotations

import numpy as np
import pytest

from tinyvllm.errors import ModelError
from tinyvllm.ops.delta import DeltaShape
from tinyvllm.runner.state_split import StateSplit

# key heads, value heads, ranks, and the key heads that a rank needs of value heads in GGUF's order and in that of safetensors
CASES = [(16, 32, 2, 16, 8), (16, 32, 4, 8, 4), (16, 48, 2, 24, 8), (4, 16, 8, 2, 1), (2, 4, 2, 2, 1), (16, 64, 8, 8, 2), (3, 12, 2, 3, 3)]


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize(("keys", "values", "world", "tiled_keys", "plain_keys"), CASES)
def test_each_value_head_reads_its_key_head(keys: int, values: int, world: int, tiled_keys: int, plain_keys: int, tiled: bool) -> None:
    """Rows are numbered, so that those of a rank say which heads they are of; each value head is in one rank."""
    whole, seen = DeltaShape(keys, values, 2, 3, 4, tiled), list[int]()
    for rank in range(world):
        split = StateSplit.of(whole, rank, world)
        local, channels = split.local, np.arange(whole.channels)
        part = split.rows("attn_qkv")
        assert part is not None and part.count == local.channels and local.value_heads % local.key_heads == 0
        assert local.key_heads == (tiled_keys if tiled else plain_keys)
        q, k, v = np.split(part.of(channels), [local.keys, 2 * local.keys])
        assert (k == q + whole.keys).all()
        heads = (v.reshape(-1, 3)[:, 0] - 2 * whole.keys) // 3
        for head, number in enumerate(heads.tolist()):
            assert q.reshape(-1, 2)[local.key_head(head), 0] == 2 * whole.key_head(number)
        taps = split.rows("ssm_conv1d")
        assert taps is not None
        np.testing.assert_array_equal(
            taps.of(np.arange(4 * whole.channels)).reshape(4, -1), part.of(channels) + whole.channels * np.arange(4)[:, None]
        )
        seen += heads.tolist()
    assert seen == [*range(values)]


def test_value_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ModelError, match="tensor_parallel_size=4: 6 value heads of layers with recurrent states cannot be divided"):
        StateSplit.of(DeltaShape(2, 6, 16, 16, 4), 0, 4)
