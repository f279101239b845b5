"""Models with recurrent states: what a sequence gets does not depend on its batch, on pieces, on what was there before it, or on a
copy of its prefix's state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyvllm import LLM, BeamSearchParams, SamplingParams
from tinyvllm.errors import ArgumentError, ModelError
from tinyvllm.scheduler import recurrent

MODEL = Path(__file__).parents[1] / "tiny" / "golden" / "qwen3.5"
PROMPTS = [[(7 * i * i + 3 * n) % 250 + 3 for i in range(length)] for n, length in enumerate((37, 1, 64, 5))]
SCORED = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)


def open_llm(**options) -> LLM:
    return LLM(str(MODEL), dtype="float32", max_model_len=160, skip_tokenizer_init=True, **{"max_num_seqs": 4} | options)


@pytest.fixture(scope="module")
def llm():
    return open_llm()


@pytest.fixture(scope="module")
def alone(llm):
    """Tokens and log-probabilities of each prompt, run by itself."""
    return [generated(llm, [prompt])[0] for prompt in PROMPTS]


def generated(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], list[dict[int, float]]]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], SCORED)
    found = [output.outputs[0] for output in outputs]
    return [(list(one.token_ids), [{t: p.logprob for t, p in step.items()} for step in one.logprobs or []]) for one in found]


def test_a_batch_changes_no_bit(llm, alone):
    assert generated(llm, PROMPTS) == alone
    assert generated(llm, PROMPTS[::-1]) == alone[::-1]


def test_chunks_change_no_bit(llm, alone):
    pieces = open_llm(max_num_batched_tokens=16)
    assert generated(pieces, PROMPTS) == alone
    assert (pieces.prompt_logits(PROMPTS[2]) == llm.prompt_logits(PROMPTS[2])).all()


def test_steps_that_are_too_large_for_the_reference_are_refused_at_start(monkeypatch):
    monkeypatch.setenv("TINYVLLM_KERNELS", "gated_delta=ref")
    with pytest.raises(
        ArgumentError, match=r"max_num_batched_tokens must be at most 64 where no kernel computes gated_delta.* CPU\), got 65"
    ):
        open_llm(max_num_batched_tokens=65)


def test_a_preempted_sequence_goes_on(alone):
    small = open_llm(num_blocks=9)
    assert generated(small, [*PROMPTS, *PROMPTS]) == [*alone, *alone]
    assert small.engine.metrics.recomputed > 0


def test_continuations_and_beams_begin_with_their_own_states(llm, alone):
    several = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], several)
    again = [llm.generate([{"prompt_token_ids": PROMPTS[0]}], several)[0].outputs[n].token_ids for n in range(3)]
    assert [one.token_ids for one in output.outputs] == again
    (found,) = llm.beam_search([{"prompt_token_ids": PROMPTS[0]}], BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True))
    for beam in found.outputs:
        tokens = list(beam.token_ids)
        rows = llm.prompt_logits([*PROMPTS[0], *tokens])[len(PROMPTS[0]) - 1 : -1].astype(np.float64)
        scores = rows - np.log(np.exp(rows).sum(1, keepdims=True))
        assert beam.cumulative_logprob == pytest.approx(scores[range(len(tokens)), tokens].sum(), abs=1e-3)


def test_scored_prompts_have_states_of_their_own(llm, alone):
    scored = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], scored)
    for prompt, output, (tokens, _) in zip(PROMPTS, outputs, alone, strict=True):
        assert list(output.outputs[0].token_ids) == tokens
        rows = llm.prompt_logits(prompt).astype(np.float64)
        scores = rows - np.log(np.exp(rows).sum(1, keepdims=True))
        for position, given in enumerate(output.prompt_logprobs[1:]):
            token = prompt[position + 1]
            assert given[token].logprob == pytest.approx(scores[position, token], abs=1e-4)


def test_the_next_turn_goes_on_from_a_copy_with_the_same_bits(llm, alone):
    """It begins at the last full block of the first turn's prompt; a prefix without a copy is computed, whatever blocks are cached."""
    cold = open_llm(enable_prefix_caching=False)
    first = PROMPTS[2]
    second = [*first, *alone[2][0], 9, 8, 7]
    llm.engine.scheduler.prefix.reset()
    assert generated(llm, [first]) == [alone[2]]
    (output,) = llm.generate([{"prompt_token_ids": second}], SCORED)
    assert output.num_cached_tokens == 48
    assert generated(llm, [second]) == generated(cold, [second]) and list(output.outputs[0].token_ids) == generated(cold, [second])[0][0]
    other = [*first[:40], 1, 2, 3]
    (output,) = llm.generate([{"prompt_token_ids": other}], SCORED)
    assert output.num_cached_tokens == 0, "two blocks are there, but no state"
    assert list(output.outputs[0].token_ids) == generated(cold, [other])[0][0]
    exact = second[:65]  # the step after the hit computes one token
    found = [llm.generate([{"prompt_token_ids": exact}], SCORED)[0] for _ in range(2)]
    assert [one.num_cached_tokens for one in found] == [48, 64]
    assert [list(one.outputs[0].token_ids) for one in found] == [generated(cold, [exact])[0][0]] * 2


def test_long_answers_have_copies_too(monkeypatch, alone):
    monkeypatch.setattr(recurrent, "EVERY_DECODED", 32)
    llm, answer = open_llm(num_scheduler_steps=4), SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], answer)
    (again,) = llm.generate([{"prompt_token_ids": [*PROMPTS[0], *output.outputs[0].token_ids[:95]]}], replace(answer, max_tokens=5))
    assert again.num_cached_tokens == 128 and again.outputs[0].token_ids == output.outputs[0].token_ids[95:]


def test_few_copies_for_many_prompts(alone):
    llm = open_llm()
    prompts = [[n + 3, *PROMPTS[2]] for n in range(9)]
    first = generated(llm, prompts)
    snapshots = llm.engine.scheduler.states.snapshots
    assert len(snapshots) == 4
    assert generated(llm, prompts[::-1]) == first[::-1] and len(snapshots) == 4
    assert llm.engine.scheduler.prefix.hits > 0


def test_only_attention_takes_blocks(llm):
    pool, config = llm.engine.runner.pool, llm.engine.runner.config
    assert len(pool.layers) == 1 and pool.block_bytes == 2 * config.n_kv_heads * 16 * config.head_dim * 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"swap_space": 1 << 20}, "swap_space: not supported yet"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options, words):
    with pytest.raises(ArgumentError, match=words):
        open_llm(**options)


def divided_case(**options) -> dict[str, Any]:
    """What must not depend on ranks: prompts in chunks, sequences that are preempted, copies of states, continuations, drawn tokens."""
    found: dict[str, Any] = {}
    with open_llm(max_num_batched_tokens=32, speculative_config="off", num_blocks=9, **options) as llm:
        found["greedy"] = generated(llm, PROMPTS)
        assert llm.engine.metrics.recomputed > 0, "the case is of no use"
        llm.engine.scheduler.prefix.reset()
        generated(llm, PROMPTS[2:3])
        (again,) = llm.generate([{"prompt_token_ids": [*PROMPTS[2], *range(9, 20)]}], SCORED)
        found["cached"] = again.num_cached_tokens, again.outputs[0].token_ids
        several = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=8, ignore_eos=True)
        found["drawn"] = [one.token_ids for one in llm.generate([{"prompt_token_ids": PROMPTS[0]}], several)[0].outputs]
        found["scored"] = llm.prompt_logits(PROMPTS[2])
        if not options.get("tensor_parallel_size"):
            found["embedding"] = llm.embed([{"prompt_token_ids": PROMPTS[0]}])
    return found


@pytest.fixture(scope="module")
def undivided(alone):
    found = divided_case()
    assert found["greedy"] == alone and found["cached"][0] > 0
    return found


@pytest.mark.parametrize(
    ("tensor", "stages"), [(2, 2), *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((2, 1), (1, 2), (1, 3)))]
)
def test_ranks_have_the_bits_of_one_process(undivided, tensor, stages):
    """Of three stages the first and the last have states only, and no keys and values."""
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    found = divided_case(**{name: size for name, size in sizes.items() if size > 1})
    for name, value in found.items():
        np.testing.assert_equal(value, undivided[name], err_msg=name)


def test_what_cannot_be_divided_is_refused_by_name():
    with pytest.raises(ModelError, match="context_parallel_size=2: models with recurrent states"):
        open_llm(context_parallel_size=2)
    with pytest.raises(ModelError, match="tensor_parallel_size=4: the slices of blk.0.attn_output.weight in F32 cut a head"):
        open_llm(tensor_parallel_size=4)
