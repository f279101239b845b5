"""Drafts where several processes share the model: the tokens and log-probabilities of one process without drafts."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.engine.drafting import Fixed, Oracle, Scripted
from tests.tiny.delta import write_delta_model
from tests.tiny.wide import with_wide_experts
from tinyvllm import LLM, SamplingParams
from tinyvllm.config.engine import DEFAULT_MODEL

GOLDEN = Path(__file__).parents[1] / "tiny" / "golden"
PROMPTS = [{"prompt_token_ids": [*range(5, 75)]}, {"prompt_token_ids": [7, 9, 11]}, {"prompt_token_ids": [7, 9, 11, 13, 15]}]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, seed=4, top_k=20, repetition_penalty=1.1, max_tokens=24, ignore_eos=True),
]
SIZES = [{"tensor_parallel_size": 2}, {"context_parallel_size": 2}]


def open_model(model: str | Path, sizes: dict[str, int], **more: Any) -> LLM:
    blocks = 8 if sizes.get("context_parallel_size", 1) > 1 else 64
    given = {"max_model_len": 256, "max_num_seqs": 4, "num_blocks": blocks, "max_num_batched_tokens": 48, "skip_tokenizer_init": True}
    return LLM(model, device="CPU", **given | sizes | {"speculative_config": "off"} | more)


def results(outputs: list[Any]) -> list[Any]:
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@functools.cache
def without_drafts(model: str | Path) -> list[Any]:
    with open_model(model, {}) as llm:
        return llm.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize(
    "sizes", [*SIZES, pytest.param({"tensor_parallel_size": 2, "context_parallel_size": 2}, marks=pytest.mark.long)], ids=str
)
@pytest.mark.parametrize("model", [DEFAULT_MODEL, pytest.param(GOLDEN / "gemma2", marks=pytest.mark.long)], ids=["bundled", "gemma2"])
def test_ranks_check_drafts(model: str | Path, sizes: dict[str, int]) -> None:
    """Drafts that are right for a while, then wrong, of several sequences at a time."""
    check(model, sizes)


def check(model: str | Path, sizes: dict[str, int], **more: Any) -> None:
    expected = without_drafts(model)
    oracle, controller = Oracle(expected), Fixed(4)
    with open_model(model, sizes, **more) as llm:
        llm.engine.speculate(Scripted(oracle.half_right), controller)
        got = llm.generate(PROMPTS, PARAMS)
    assert results(got) == results(expected)
    assert 10 < controller.accepted < sum(drafts for drafts, _ in controller.checked)


@pytest.mark.long
def test_ranks_with_experts_check_drafts(tmp_path: Path) -> None:
    check(with_wide_experts("mixtral", tmp_path / "model"), {"tensor_parallel_size": 2})


def test_recurrent_states_of_ranks_take_drafts(tmp_path: Path) -> None:
    """A rank's slots keep what drafts need, as rank 0's do."""
    config = {"method": "ngram", "num_speculative_tokens": 4}
    check(write_delta_model(tmp_path), {"tensor_parallel_size": 2}, speculative_config=config)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ranks_look_drafts_up(sizes: dict[str, int]) -> None:
    """What repeats itself is found."""
    expected = without_drafts(DEFAULT_MODEL)
    text = expected[0].prompt_token_ids + expected[0].outputs[0].token_ids
    prompt, params = [{"prompt_token_ids": text + text[:70]}], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with open_model(DEFAULT_MODEL, {}) as llm:
        alone = llm.generate(prompt, params)
    config = {"method": "ngram", "num_speculative_tokens": 3}
    with open_model(DEFAULT_MODEL, sizes, speculative_config=config) as llm:
        (got,) = llm.generate(prompt, params)
    assert results([got]) == results(alone) and got.metrics.draft_tokens > 0


@pytest.mark.long
def test_a_draft_model_is_whole_in_rank_0() -> None:
    expected = without_drafts(DEFAULT_MODEL)
    config = {"method": "draft_model", "model": str(DEFAULT_MODEL), "num_speculative_tokens": 3}
    with open_model(DEFAULT_MODEL, {"tensor_parallel_size": 2}, speculative_config=config) as llm:
        got = llm.generate(PROMPTS, PARAMS)
    assert results(got) == results(expected)
    assert any(output.metrics.accepted_tokens > 0 for output in got)
