"""Engines with drafters that read hidden states: the tokens are those without, whatever the heads guess."""

from __future__ import annotations

from typing import Any

import pytest

from tests.speculate import heads as tiny
from tinyvllm import LLM, SamplingParams
from tinyvllm.config.engine import EngineConfig
from tinyvllm.engine.drafter_memory import drafter_memory
from tinyvllm.engine.engine import Engine
from tinyvllm.errors import ArgumentError, ModelError
from tinyvllm.runner.opened import open_model
from tinyvllm.speculative import parse

PROMPTS = [[5, 9, 14, 9, 14, 9, 3], list(range(20, 61)), [7]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=24),
    SamplingParams(temperature=0.0, max_tokens=24, repetition_penalty=1.3),
]


def config_of(method: str, folder: Any) -> dict[str, Any]:
    if method in ("medusa_lite", "eagle_lite"):
        return {"method": method, "num_speculative_tokens": 3}
    if method == "medusa":
        found = tiny.write_heads(folder / "medusa", {"medusa_num_heads": 3, "medusa_num_layers": 1}, tiny.medusa_tensors(3, 1))
    else:
        layout = next(layout for layout in tiny.LAYOUTS if layout.name == ("eagle3" if method == "eagle3" else "eagle1"))
        found = tiny.write_heads(folder / method, tiny.config_of(layout), tiny.tensors_of(layout))
    return {"method": method, "model": str(found), "num_speculative_tokens": 3}


def answers(model: Any, **options: Any) -> list[tuple[list[int], float]]:
    given = {"num_blocks": 24, "max_num_seqs": 3, "max_num_batched_tokens": 32, "speculative_config": "off"} | options
    llm = LLM(str(model), device="CPU", **given)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    found = llm.generate([*prompts, prompts[1]], [*PARAMS, PARAMS[1]], use_tqdm=False)
    assert llm.engine.speculation is None or llm.engine.speculation.on, "the drafter has failed"
    return [(list(out.outputs[0].token_ids), out.outputs[0].cumulative_logprob) for out in found]


@pytest.mark.parametrize(
    "method", ["eagle3", *(pytest.param(m, marks=pytest.mark.long) for m in ("medusa", "eagle", "medusa_lite", "eagle_lite"))]
)
def test_tokens_are_those_without_heads(tiny_model: Any, tmp_path: Any, plain: Any, method: str) -> None:
    """Prompts in chunks, a prefix hit, greedy and sampled requests together, a cache too small for all of them."""
    assert answers(tiny_model, speculative_config=config_of(method, tmp_path)) == plain


@pytest.mark.parametrize("method", ["medusa", pytest.param("eagle3", marks=pytest.mark.long)])
def test_packed_heads_change_no_token(tiny_model: Any, tmp_path: Any, plain: Any, method: str) -> None:
    """Heads whose matrices are packed at load take less memory, which is counted, and guess about the same tokens."""
    config = config_of(method, tmp_path)
    assert answers(tiny_model, speculative_config={**config, "quantization": "q8_0"}) == plain
    opened = open_model(EngineConfig(model=str(tiny_model), device="CPU"), "CPU")

    def weights(**more: str) -> int:
        engine = EngineConfig(model=str(tiny_model), device="CPU", speculative_config=parse({**config, **more}))
        return drafter_memory(engine, opened).weights

    assert weights(quantization="q8_0") < 0.6 * weights()


def test_what_heads_cannot_be_packed_to(tiny_model: Any, tmp_path: Any) -> None:
    config = {**config_of("eagle3", tmp_path), "quantization": "q9"}
    with pytest.raises(ArgumentError, match=r"quantization of heads must be one of .*q8_0.*, got 'q9'"):
        LLM(str(tiny_model), device="CPU", num_blocks=24, speculative_config=config)


@pytest.mark.long
def test_the_models_own_layer(tiny_model: Any, tmp_path: Any) -> None:
    """MiMo, which is Qwen2 with a layer for drafts: tokens with it and without; a model without one is refused by name."""
    model = tiny.write_mimo(tmp_path / "mimo", tiny_model)
    config = {"method": "mtp", "num_speculative_tokens": 2}
    assert answers(model, speculative_config=config) == answers(model)
    with pytest.raises(ModelError, match=r"method mtp needs one layer model.mtp_layers.0.\*.*has 0; of the supported families MiMo"):
        LLM(str(tiny_model), device="CPU", num_blocks=24, speculative_config=config)


@pytest.fixture(scope="module")
def plain(tiny_model: Any) -> Any:
    return answers(tiny_model)


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_the_heads_cache_is_part_of_the_kv_memory(tiny_model: Any, tmp_path: Any, method: str) -> None:
    """What is counted before anything is loaded is what the drafter then has."""
    config = EngineConfig(
        model=str(tiny_model),
        device="CPU",
        kv_memory=1 << 20,
        max_num_seqs=3,
        max_model_len=64,
        speculative_config=parse(config_of(method, tmp_path)),
    )
    engine = Engine(config)
    counted, pool, drafter = drafter_memory(config, open_model(config, "CPU")), engine.runner.pool, engine.speculation.drafter
    assert counted.weights > 0
    if method == "eagle3":
        assert counted.cache(pool.num_blocks) == drafter.nbytes
    else:
        assert counted.cache(100) == 0
    assert config.kv_memory is not None
    rest = config.kv_memory - counted.cache(pool.num_blocks) - pool.num_blocks * pool.block_bytes
    assert 0 <= rest < pool.block_bytes + counted.block
    engine.close()
