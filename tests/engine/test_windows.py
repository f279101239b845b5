"""Blocks that have left the window of every layer are freed: counts of blocks, and the bits of an engine that keeps them."""

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
from tinyvllm.engine.scoring import PIECE
from tinyvllm.windows import Window

CONFIG = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 64, "intermediate_size": 96, "head_dim": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "sliding_window": WINDOW,
    "hidden_act": "silu", "tie_word_embeddings": False, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("window")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module", params=["auto", pytest.param("int8", marks=pytest.mark.long)])
def masked(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[str, LLM, list[Answer]]]:
    """A type of cache, the engine that keeps all blocks, and its answers, computed by kernels."""
    registry.forget_choices()
    with load(folder, kept=True, kv_cache_dtype=request.param, num_blocks=300) as llm:
        found = answers(llm)
        assert "ref" not in {choice.variant for choice in registry.choices()}
        assert not llm.engine.runner.groups.blocks.window.tokens
        yield request.param, llm, found


CASES: dict[str, dict[str, Any]] = {
    "chunks": {"num_blocks": 150},
    "prefix cache off": {"enable_prefix_caching": False, "num_blocks": MOST},
    "recompute": {"num_blocks": MOST, "preemption_mode": "recompute"},
    "swap": {"num_blocks": MOST, "preemption_mode": "swap", "swap_space": "4MB"},
    "rounds": {"num_scheduler_steps": 4},
    "ahead": {"async_scheduling": True},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}},
}

PLAIN = ("chunks", "swap", "drafts")


@pytest.mark.parametrize("case", [case if case in PLAIN else pytest.param(case, marks=pytest.mark.long) for case in CASES])
def test_same_bits_in_fewer_blocks(masked: tuple[str, LLM, list[Answer]], folder: Path, case: str) -> None:
    kind, _, expected = masked
    with load(folder, kv_cache_dtype=kind, **CASES[case]) as llm:
        held = count_held(llm)
        assert answers(llm) == expected
        scheduler = llm.engine.scheduler
        assert held[0] <= MOST and held[0] < LENGTHS[-1] // SIZE
        assert bool(scheduler.num_swaps) == (case == "swap") and (held[2] > 0 or case not in ("recompute", "swap"))
        assert scheduler.pool.num_free == scheduler.pool.num_blocks
        assert answers(llm) == expected, "with what the prefix cache has"
        if case == "chunks":
            assert scheduler.prefix is not None and scheduler.prefix.hits
            assert answers(llm, range(3, 4), n=3) == expected[3:4] * 3, "forks of a greedy request"


def test_the_next_turn_hits_by_the_blocks_of_the_window(masked: tuple[str, LLM, list[Answer]], folder: Path) -> None:
    """A conversation that is longer than the whole cache: each turn finds all before it."""
    kind, whole, _ = masked
    with load(folder, kv_cache_dtype=kind, num_blocks=MOST) as llm:
        assert min(check_turns(llm, whole, 4)) > MOST * SIZE


def test_logits_outside_the_schedule(masked: tuple[str, LLM, list[Answer]], folder: Path) -> None:
    """Of a prompt that the cache cannot hold: its logits, its vector, and log-probabilities of its own tokens."""
    kind, whole, _ = masked
    ids = prompt(4)
    assert LENGTHS[4] > MOST * SIZE and PIECE > STEP
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with load(folder, kv_cache_dtype=kind, num_blocks=2 * MOST) as llm:
        np.testing.assert_array_equal(llm.prompt_logits(ids).view(np.uint32), whole.prompt_logits(ids).view(np.uint32))
        ours, theirs = (each.generate({"prompt_token_ids": ids}, scored)[0].prompt_logprobs for each in (llm, whole))
        assert ours == theirs and len(ours) == len(ids)


def test_32k_tokens_in_the_blocks_of_a_window(folder: Path) -> None:
    """And without a length, the context is not shortened to what the cache holds."""
    step = 512
    ids = np.random.default_rng(0).integers(3, 256, 32_000).tolist()
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1)
    found = []
    for kept, blocks in ((True, 4096), (False, Window(WINDOW, SIZE).most_blocks(32768, step))):
        with load(folder, kept, max_model_len=32768, max_num_batched_tokens=step, num_blocks=blocks, max_num_seqs=1) as llm:
            held = count_held(llm)
            (output,) = llm.generate({"prompt_token_ids": ids}, greedy)
            found.append((output.outputs[0].token_ids, output.outputs[0].cumulative_logprob))
            assert held[:2] == ([4005] * 2 if kept else [(WINDOW + step) // SIZE] * 2) and held[1] <= blocks
    assert found[0] == found[1]
    with load(folder, max_model_len=None, num_blocks=MOST) as llm:
        assert llm.engine.max_model_len == 8192
    with load(folder, kept=True, max_model_len=None, num_blocks=MOST) as llm:
        assert llm.engine.max_model_len == MOST * SIZE


def test_a_segment_holds_what_the_query_after_it_sees(folder: Path) -> None:
    with load(folder, num_blocks=4 * MOST) as llm:
        first = llm.segment(prompt(2))
        second = llm.segment(prompt(1), after=first)
        assert first.blocks == WINDOW // SIZE == second.blocks + 1, "one block is in the windows of both"
        assert llm.engine.segments.num_blocks == len(llm.engine.scheduler.pinned) == first.blocks + second.blocks
        (output,) = llm.generate(second + [7, 8, 9], params(1))
        assert output.num_cached_tokens == (LENGTHS[2] + LENGTHS[1]) // SIZE * SIZE
        first.release(), second.release()
        assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_blocks


def test_the_plan_counts_the_blocks_of_windows(folder: Path) -> None:
    """Room for MOST blocks of each of four sequences is room for four of any length."""
    for kept, context in ((False, 32768), (True, MOST * SIZE)):
        config = resolve(folder, device="CPU", load_format="dummy", dtype="float32", block_size=SIZE, max_num_seqs=4,
                         max_num_batched_tokens=STEP, disable_hybrid_kv_cache_manager=kept)  # fmt: skip
        first = plan_engine(config, speed=False).sizes.memory
        sizes = plan_engine(config, first.fixed + (4 * MOST + 1) * SIZE * first.kv_token, speed=False).sizes
        assert {fit.sequences: fit.context for fit in sizes.fits}[4] == context
