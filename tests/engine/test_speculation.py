"""Speculation changes no token and no log-probability, whatever the drafter guesses, and whatever else is in the batch.

Tests compare an engine whose drafter is scripted with one that has none. The full matrix is `long`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine.drafting import Fixed, Oracle, Scripted, repeats, speculate
from tests.engine.test_rounds import all_free, results
from tinyvllm import LLM, SamplingParams
from tinyvllm.request import Sequence, StructuredOutputsParams
from tinyvllm.scheduler import Scheduled

OPTIONS: dict[str, Any] = dict(device="CPU", max_model_len=128, max_num_seqs=8)
NUM = 24
KINDS: dict[str, dict[str, Any]] = {
    "greedy": dict(temperature=0.0, ignore_eos=True),
    "sampled": dict(temperature=0.7, top_p=0.9, seed=5, ignore_eos=True),
    "filters": dict(temperature=1.1, top_k=30, min_p=0.02, seed=6, ignore_eos=True, logit_bias={97: 2.0}),
    "penalties": dict(temperature=0.8, seed=7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, ignore_eos=True),
    "grammar": dict(temperature=0.9, seed=8, structured_outputs=StructuredOutputsParams(regex="([ab]{2,9}-[0-9]{1,6};){3,8}")),
    "min_tokens": dict(temperature=0.0, min_tokens=9, stop_token_ids=[*range(40, 128)]),
    "stop strings": dict(temperature=1.0, seed=9, stop=["e", "Qx"], min_tokens=3, ignore_eos=True),
    "logprobs": dict(temperature=0.9, seed=10, logprobs=3, ignore_eos=True),
    "bad words": dict(temperature=0.7, seed=11, bad_words=["a", "ab", "q"], ignore_eos=True),
    "allowed": dict(temperature=0.7, seed=12, allowed_token_ids=[*range(60, 90)], logprobs=0, ignore_eos=True),
}


def prompt(i: int) -> dict[str, Any]:
    length = (3, 40, 17, 1, 15, 16)[i]
    return {"prompt_token_ids": [0, *np.random.default_rng(i).integers(10, 3000, length - 1).tolist()]}


def params(kind: str, **more: Any) -> SamplingParams:
    return SamplingParams(**(dict(max_tokens=NUM) | KINDS[kind] | more))


ALL = [params(kind) for kind in KINDS]
PROMPTS = [prompt(i % 6) for i in range(len(ALL))]


@pytest.fixture(scope="module")
def plain():
    with LLM(**OPTIONS, max_num_batched_tokens=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafted():
    with LLM(**OPTIONS, max_num_batched_tokens=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle(plain):
    """Knows the outputs of every kind for every prompt in these tests."""
    every = plain.generate(PROMPTS, ALL)
    oracle = Oracle(every)
    oracle.all = every
    oracle.expected = {kind: plain.generate([prompt(1)], [params(kind)]) for kind in KINDS}
    return oracle


GUESSES: dict[str, Callable[[Oracle], Any]] = {
    "right": lambda oracle: oracle.right,
    "half right": lambda oracle: oracle.half_right,
    "wrong": lambda oracle: oracle.wrong,
    "repeats": lambda oracle: repeats,
}


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("kind", KINDS)
def test_alone(drafted, oracle, kind, guess):
    drafter, controller = speculate(drafted, GUESSES[guess](Oracle(oracle.expected[kind])), 3)
    outputs = drafted.generate([prompt(1)], [params(kind)])
    assert results(outputs) == results(oracle.expected[kind])
    assert all_free(drafted) and not drafter.texts
    num_tokens = len(outputs[0].outputs[0].token_ids)
    if guess == "right":
        assert len(controller.checked) < num_tokens, "less steps than tokens"
        wasted = 3 if kind in ("grammar", "min_tokens", "stop strings") else 0  # the end comes as a surprise
        assert controller.accepted >= sum(drafts for drafts, _ in controller.checked) - wasted
        assert controller.accepted >= (num_tokens - 1) * 3 // 4 - 3
    if guess == "wrong":
        assert controller.checked and controller.accepted == 0


@pytest.mark.parametrize("K", [1, 8])
@pytest.mark.parametrize("guess", ["right", "half right"])
def test_a_mixed_batch(drafted, oracle, guess, K):
    _, controller = speculate(drafted, GUESSES[guess](oracle), K)
    assert results(drafted.generate(PROMPTS, ALL)) == results(oracle.all)
    assert controller.accepted > 20 and all_free(drafted)


# --- what a drafter gets, and what it may not do


class StateReader(Scripted):
    """Collects the states of each token, by sequence and position."""

    state_layers = (0, 2, -1)

    def __init__(self, guess: Any):
        super().__init__(guess, looks_up=False)
        self.states: dict[int, dict[int, np.ndarray]] = {}

    def observe_states(self, states: Any, rows: Any) -> None:
        values = states.numpy()
        for row in rows:
            assert row.sequence.sequence_id not in self.forgotten and row.start + row.count <= len(row.sequence)
            mine = self.states.setdefault(row.sequence.sequence_id, {})
            assert not mine.keys() & set(range(row.start, row.start + row.count)), "each position comes once"
            mine.update({row.start + i: values[row.first_row + i] for i in range(row.count)})


def test_hidden_states_of_every_token(oracle):
    """Whatever the drafts, in a batch with chunks: always those of the text computed at once, as one chunk."""
    with LLM(**OPTIONS, max_num_batched_tokens=24, num_scheduler_steps=4, enable_prefix_caching=False) as llm:
        E, runner = llm.engine.runner.config.dim, llm.engine.runner
        for guess in ("half right", "wrong"):
            reader = StateReader(GUESSES[guess](oracle))
            llm.engine.speculate(reader, Fixed(3))
            outputs = llm.generate(PROMPTS, ALL)
            assert results(outputs) == results(oracle.all)
            for output, states in zip(outputs, (reader.states[i] for i in sorted(reader.states)), strict=True):
                text = output.prompt_token_ids + output.outputs[0].token_ids
                assert sorted(states) == list(range(len(states))) and len(text) - 5 <= len(states) <= len(text) - 1
                sequence = Sequence(0, "x", text, SamplingParams(), block_table=[*range(8)])
                expected = runner.states(Scheduled(sequence, 0, len(text), 0))
                got = np.stack([states[i] for i in range(len(states))])
                np.testing.assert_allclose(got[:, 2 * E :], expected[: len(got)], atol=1e-4)
                assert not np.allclose(got[:, :E], got[:, E : 2 * E])
