"""Models with windows in some layers: counts of blocks, and the bits of an engine that keeps all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.windowed import LENGTHS, MOST, SIZE, STEP, WINDOW, Answer, answers, check_turns, count_held, load, params, prompt
from tinyvllm import LLM, SamplingParams
from tinyvllm.backends import registry
from tinyvllm.config.engine import resolve
from tinyvllm.engine.frontend import plan_engine
from tinyvllm.windows import Window

COMMON = {
    "hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 32768, "sliding_window": WINDOW, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "intermediate_size": 64, "num_hidden_layers": 6,
    "rms_norm_eps": 1e-6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "intermediate_size": 32, "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5, "layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
    "hidden_act": "silu", "attention_bias": True, "swiglu_limit": 7.0,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip
GEMMA4 = {  # two layers with a window share a place; the last two read the keys and values of others
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "intermediate_size": 64, "num_hidden_layers": 7,
    "layer_types": [*["sliding_attention"] * 4, "full_attention", "sliding_attention", "full_attention"], "num_kv_shared_layers": 2,
    "global_head_dim": 64, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 256,
}  # fmt: skip
CONFIGS = {"gemma3": COMMON | GEMMA, "gpt-oss": COMMON | GPT_OSS, "gemma4": COMMON | GEMMA4}
WINDOWED = {"gemma3": 5, "gpt-oss": 1, "gemma4": 2}  # groups
SCARCE = {"gemma3": 152, "gpt-oss": 52, "gemma4": 76}  # blocks with which a sequence is preempted


def most(model: str, num_tokens: int, step: int = STEP) -> int:
    """Blocks of a sequence: those of the layer that sees all, and those of the windows."""
    return -(-num_tokens // SIZE) + WINDOWED[model] * Window(WINDOW, SIZE).most_blocks(num_tokens, step)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, config in CONFIGS.items():
        found[name] = tmp_path_factory.mktemp(name)
        (found[name] / "config.json").write_text(json.dumps(config))
    return found


Kept = tuple[str, str, LLM, list[Answer]]
KINDS = [
    ("gemma3", "auto"),
    pytest.param(("gemma3", "int8"), marks=pytest.mark.long),
    pytest.param(("gpt-oss", "auto"), marks=pytest.mark.long),
    pytest.param(("gemma4", "auto"), marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=KINDS)
def kept(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Kept]:
    """A model, a type of cache, the engine that keeps all blocks, and its answers."""
    model, kind = request.param
    registry.forget_choices()
    with load(folders[model], kept=True, kv_cache_dtype=kind, num_blocks=300) as llm:
        found = answers(llm)
        assert "ref" not in {choice.variant for choice in registry.choices()}
        assert llm.engine.runner.groups.blocks.count == 1 and not llm.engine.runner.groups.blocks.window.tokens
        yield model, kind, llm, found


CASES: dict[str, dict[str, Any]] = {
    "chunks": {},
    "no cascade": {"enable_cascade": False},
    "prefix cache off": {"enable_prefix_caching": False},
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap", "swap_space": "4MB"},
    "rounds": {"num_scheduler_steps": 4},
    "ahead": {"async_scheduling": True},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}},
}
PLAIN = ("chunks", "swap", "drafts")


@pytest.mark.parametrize("case", [case if case in PLAIN else pytest.param(case, marks=pytest.mark.long) for case in CASES])
def test_same_bits_in_fewer_blocks(kept: Kept, folders: dict[str, Path], case: str) -> None:
    model, kind, _, expected = kept
    longest = most(model, LENGTHS[-1] + 50)
    blocks = SCARCE[model] if case in ("recompute", "swap") else 1000
    with load(folders[model], kv_cache_dtype=kind, num_blocks=blocks, **CASES[case]) as llm:
        held, scheduler, count = count_held(llm), llm.engine.scheduler, 1 + WINDOWED[model]
        assert llm.engine.runner.groups.blocks.count == scheduler.tables.groups.count == count
        assert answers(llm) == expected
        assert held[0] <= longest < count * -(-LENGTHS[-1] // SIZE)
        assert bool(scheduler.num_swaps) == (case == "swap") and (held[2] > 0 or case not in ("recompute", "swap"))
        assert scheduler.pool.num_free == scheduler.pool.num_blocks
        assert answers(llm) == expected, "with what the prefix cache has"
        if case == "chunks":
            assert scheduler.prefix is not None and scheduler.prefix.hits
            assert answers(llm, range(3, 4), n=3) == expected[3:4] * 3, "forks of a greedy request"
            segment = llm.segment(prompt(2))
            assert segment.blocks == len(scheduler.pinned) == LENGTHS[2] // SIZE + WINDOWED[model] * WINDOW // SIZE
            segment.release()


def test_the_next_turn_hits_by_all_groups(kept: Kept, folders: dict[str, Path]) -> None:
    """A conversation of which the cache holds the windows and the layer that sees all, not every block: each turn finds all before it."""
    model, kind, whole, _ = kept
    with load(folders[model], kv_cache_dtype=kind, num_blocks=most(model, 400)) as llm:
        assert check_turns(llm, whole, 3)[1] > 150


def test_logits_outside_the_schedule(kept: Kept, folders: dict[str, Path]) -> None:
    model, kind, whole, _ = kept
    ids, scored = prompt(4), SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with load(folders[model], kv_cache_dtype=kind, num_blocks=2 * most(model, LENGTHS[-1])) as llm:
        np.testing.assert_array_equal(llm.prompt_logits(ids).view(np.uint32), whole.prompt_logits(ids).view(np.uint32))
        ours, theirs = (each.generate({"prompt_token_ids": ids}, scored)[0].prompt_logprobs for each in (llm, whole))
        assert ours == theirs and len(ours) == len(ids)


def test_blocks_on_disk_belong_to_their_groups(folders: dict[str, Path], tmp_path: Path) -> None:
    """After a restart a prompt hits as it would have before, and has the same answer."""
    options: dict[str, Any] = {"num_blocks": 4 * most("gemma3", 310), "prefix_cache_dir": str(tmp_path / "cache")}
    found = []
    for _ in range(2):
        with load(folders["gemma3"], **options) as llm:
            (output,) = llm.generate({"prompt_token_ids": prompt(2)}, params(2))
            found.append((output.num_cached_tokens, output.outputs[0].token_ids))
    assert found[0][0] == 0 and found[1] == (LENGTHS[2] // SIZE * SIZE, found[0][1])


@pytest.mark.long
@pytest.mark.parametrize("model", ["gemma3", "gpt-oss"])
def test_32k_tokens_in_the_blocks_of_windows_and_one_layer(folders: dict[str, Path], model: str) -> None:
    step = 512
    ids = np.random.default_rng(0).integers(3, 256, 32_000).tolist()
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1)
    found = []
    for all_blocks, blocks in ((True, 4096), (False, most(model, 32768, step))):
        with load(folders[model], all_blocks, max_model_len=32768, max_num_batched_tokens=step, num_blocks=blocks, max_num_seqs=1) as llm:
            held = count_held(llm)
            (output,) = llm.generate({"prompt_token_ids": ids}, greedy)
            found.append((output.outputs[0].token_ids, output.outputs[0].cumulative_logprob))
            count = 1 + WINDOWED[model]
            windows = WINDOWED[model] * (WINDOW + step) // SIZE
            assert held[0] == (4005 if all_blocks else 3968 + windows), "the chunk before the last one holds the most"
            layers, each = llm.engine.runner.config.num_blocks, 2 * 32 * SIZE * 4
            assert llm.engine.runner.pool.block_bytes == each * (layers if all_blocks else layers // count)
    assert found[0] == found[1]


def test_the_plan_counts_the_blocks_of_groups(folders: dict[str, Path]) -> None:
    """Room for four sequences of some length is room for four of that length."""
    context = 4000
    config = resolve(folders["gemma3"], device="CPU", load_format="dummy", dtype="float32", block_size=SIZE, max_num_seqs=4,
                     max_num_batched_tokens=STEP)  # fmt: skip
    first = plan_engine(config, speed=False).sizes.memory
    room = (4 * most("gemma3", context) + 1) * SIZE * first.kv_token // 6
    sizes = plan_engine(config, first.fixed + room, speed=False).sizes
    assert {fit.sequences: fit.context for fit in sizes.fits}[4] == context
    assert room * 4 < (4 * context + SIZE) * first.kv_token


def test_a_drafter_of_all_tokens_keeps_every_block(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    drafter = {"method": "draft_model", "model": str(folders["gemma3"]), "num_speculative_tokens": 2}
    with load(folders["gemma3"], num_blocks=300, speculative_config=drafter) as llm:
        assert llm.engine.runner.groups.blocks.count == 1 and "because the draft model" in caplog.text
        assert MOST < 300
