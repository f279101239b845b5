"""A real tiny checkpoint on the device: dtypes, the pool's size and the longest sequence."""

import pytest

from tests.conftest import HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, VOCAB
from tinyvllm.config.engine import EngineConfig
from tinyvllm.errors import ArgumentError


def loaded(model, **options):
    from tinyvllm.runner.loaded import LoadedModel
    from tinyvllm.runner.opened import open_model

    config = EngineConfig(model=str(model), **options)
    return LoadedModel(config, "CPU", open_model(config, "CPU"))


def test_context_and_pool_follow_the_model_and_the_request(tiny_model):
    made = loaded(tiny_model, max_num_seqs=4)
    assert made.max_model_len == 512 and made.pool.num_blocks == 4 * 512 // 16
    assert loaded(tiny_model, num_blocks=3).max_model_len == 48, "no sequence can be longer than the pool"
    assert loaded(tiny_model, max_model_len=100, num_blocks=3).max_model_len == 100
    with pytest.raises(ArgumentError, match="513"):
        loaded(tiny_model, max_model_len=513)


@pytest.mark.parametrize(("dtype", "itemsize", "format"), [("auto", 4, "F32"), ("float16", 2, "F16"), ("bfloat16", 2, "BF16")])
def test_dtype_of_weights_and_cache(tiny_model, dtype, itemsize, format):
    made = loaded(tiny_model, dtype=dtype, num_blocks=4)
    assert made.model.weights.table.format == made.model.blk[1].weights.ffn_down.weight.format == format
    assert made.pool.layers[0].keys.dtype.itemsize == itemsize
    assert made.weight_bytes - made.bytes_per_token == VOCAB * HIDDEN * itemsize, "the input embedding is gathered, not streamed"
    E, keys = HIDDEN, HIDDEN * KV_HEADS // HEADS
    matrices, vectors = 2 * VOCAB * E + 2 * (2 * E * E + 2 * keys * E + 3 * INTERMEDIATE * E), E + 2 * 2 * E
    assert made.weight_bytes == itemsize * matrices + 4 * vectors, "what every op computes with stays float32"


def test_keys_and_values_are_one_memory(tiny_model):
    cache = loaded(tiny_model, num_blocks=4).pool.layers[0]
    assert cache.keys.shape == (5, 2, KV_HEADS, 16, HIDDEN // HEADS), "four blocks and the scratch block"
    cache.keys.assign(cache.keys.full_like(3.0)).realize()
    assert (cache.values.numpy() == 3.0).all()


def test_dummy_weights_need_only_the_description(tiny_model, tmp_path):
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    made = loaded(tmp_path, load_format="dummy", num_blocks=4)
    assert made.model.blk[0].weights.qkv.weight.dense().numpy().std() > 0
