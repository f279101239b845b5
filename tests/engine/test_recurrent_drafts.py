"""Speculation with recurrent states: equal tokens and log-probabilities with any drafter, any number of drafts, and none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.drafting import Fixed, Oracle, speculate
from tests.engine.test_rounds import all_free, results
from tinyvllm import LLM, SamplingParams
from tinyvllm.engine.kept_costs import KeptCosts
from tinyvllm.engine.second_model import open_any_drafter
from tinyvllm.scheduler import recurrent
from tinyvllm.speculate.cost_curve import StepCosts
from tinyvllm.speculative import AUTO, STATE_DRAFTS, SpeculativeConfig

GOLDEN = Path(__file__).parents[1] / "tiny" / "golden"
MODEL = GOLDEN / "qwen3.5"
PROMPTS = [{"prompt_token_ids": [(7 * i * i + 3 * n) % 250 + 3 for i in range(length)]} for n, length in enumerate((37, 1, 64, 5))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(temperature=0.7, seed=5, max_tokens=40, ignore_eos=True, logprobs=2)
PENALTY = SamplingParams(temperature=0.8, seed=6, repetition_penalty=1.2, max_tokens=40, ignore_eos=True)
MIXED = [GREEDY, SAMPLED, SAMPLED, PENALTY]
DRAFTERS = {
    "ngram": SpeculativeConfig("ngram", prompt_lookup_min=1),
    "suffix": SpeculativeConfig("suffix"),
    "draft": SpeculativeConfig("draft_model", str(GOLDEN / "qwen3")),
}
FAST = [("ngram", 1), ("suffix", 3), ("draft", 3)]


def open_llm(model: Path = MODEL, **options: Any) -> LLM:
    return LLM(
        str(model),
        **dict(device="CPU", dtype="float32", max_model_len=160, skip_tokenizer_init=True, max_num_seqs=4, num_blocks=14) | options,
    )


def forget(llm: LLM) -> None:
    """What earlier requests have left in the caches."""
    llm.engine.scheduler.prefix.reset()
    llm.engine.scheduler.states.snapshots.reset()


class Engines:
    """The same requests of an engine without drafts and of one whose states keep three: together, where there are too few blocks for
    them, each alone, and the first again after an answer to it, whose beginning is a copy.
    """

    def __init__(self) -> None:
        self.drafted = open_llm(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
        with open_llm(speculative_config="off", enable_prefix_caching=False) as plain:
            self.outputs = plain.generate(PROMPTS, MIXED)
            second = [*PROMPTS[2]["prompt_token_ids"], *self.outputs[2].outputs[0].token_ids, 9, 8]
            self.next_turn = {"prompt_token_ids": second}
            self.outputs += [*(plain.generate([PROMPTS[n]], [GREEDY])[0] for n in range(4)), *plain.generate([self.next_turn], [SAMPLED])]
        self.oracle = Oracle(self.outputs)

    def run(self) -> None:
        llm = self.drafted
        forget(llm)
        outputs = llm.generate(PROMPTS, MIXED)
        assert any(output.metrics.preemptions for output in outputs)
        outputs += [llm.generate([PROMPTS[n]], [GREEDY])[0] for n in range(4)]
        outputs += llm.generate([self.next_turn], [SAMPLED])
        assert outputs[-1].num_cached_tokens == 48
        assert results(outputs) == results(self.outputs) and all_free(llm) and llm.engine.speculation.on


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    engines.drafted.close()


@pytest.mark.parametrize(
    ("name", "K"),
    [*FAST, *(pytest.param(name, K, marks=pytest.mark.long) for name in DRAFTERS for K in (1, 3) if (name, K) not in FAST)],
)
def test_any_drafter(engines, name, K):
    engine, controller = engines.drafted.engine, Fixed(K)
    engine.speculate(open_any_drafter(engine.config, DRAFTERS[name], engine.runner, None), controller)
    engines.run()
    assert controller.checked


@pytest.mark.parametrize("guess", ["right", "half_right", "wrong"])
def test_guesses(engines, guess):
    """More drafts than a state keeps are cut."""
    _, controller = speculate(engines.drafted, getattr(engines.oracle, guess), 5)
    engines.run()
    assert max(drafts for drafts, _ in controller.checked) == 3
    assert (controller.accepted == 0) == (guess == "wrong")


def test_copies_of_answers_are_made_after_tokens_that_are_kept(monkeypatch):
    """At every multiple of 32 tokens: drafts end before it."""
    monkeypatch.setattr(recurrent, "EVERY_DECODED", 32)
    answer = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, logprobs=1)
    with open_llm(num_blocks=64, speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as llm:
        llm.engine.stop_speculation()
        first = llm.generate([PROMPTS[0]], [answer])
        longer = {"prompt_token_ids": [*PROMPTS[0]["prompt_token_ids"], *first[0].outputs[0].token_ids[:95]]}
        rest = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1)
        for guess in ("right", "half_right"):
            forget(llm)
            speculate(llm, getattr(Oracle(first), guess), 3)
            assert results(llm.generate([PROMPTS[0]], [answer])) == results(first)
            again = llm.generate([longer], [rest])[0]
            assert again.num_cached_tokens == 128 and again.outputs[0].token_ids == first[0].outputs[0].token_ids[95:]
            assert again.outputs[0].logprobs == first[0].outputs[0].logprobs[95:]


@pytest.mark.parametrize("options", [dict(num_scheduler_steps=4), dict(async_scheduling=True)])
def test_steps_that_the_device_advances(engines, options):
    """Between drafts, every third token has some: the first round takes them into the state, the others take nothing."""
    with open_llm(speculative_config={"method": "ngram", "num_speculative_tokens": 3}, num_blocks=64, **options) as llm:
        guess = engines.oracle.half_right
        _, controller = speculate(llm, lambda tokens, count: guess(tokens, count) if len(tokens) % 12 < 3 else [], 3)
        assert results(llm.generate(PROMPTS, MIXED)) == results(engines.outputs[:4])
        assert controller.accepted and controller.accepted < sum(drafts for drafts, _ in controller.checked)


def test_it_is_on_by_default(monkeypatch):
    """With the costs of a quiet machine: next to other processes a first draft may seem dear, and then there are none."""
    observe = StepCosts.observe
    monkeypatch.setattr(StepCosts, "observe", lambda self, count, drafts, seconds: observe(self, count, drafts, 1 + drafts / 8))
    monkeypatch.setattr(KeptCosts, "_read", lambda self: StepCosts())
    monkeypatch.setattr(KeptCosts, "save", lambda self: None)
    with open_llm(num_blocks=64) as llm, open_llm(num_blocks=64, speculative_config="off") as plain:
        engine = llm.engine
        assert engine.config.speculative_config == AUTO and engine.speculation.on
        assert engine.runner.state_slots.drafts == engine.scheduler.limits.max_drafts == STATE_DRAFTS
        assert plain.engine.runner.state_slots.drafts == 0 and plain.engine.runner.caches[0].states.shape[1] % 16 == 0
        sampled = SamplingParams(temperature=0.9, seed=8, max_tokens=40, ignore_eos=True, logprobs=1)
        long = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True, logprobs=1)
        for params in (sampled, long, long):
            assert results(llm.generate([PROMPTS[3]], [params])) == results(plain.generate([PROMPTS[3]], [params]))
        assert engine.metrics.accepted_tokens > 20, "the second time the answer is known"


@pytest.mark.long
def test_the_reference_is_asked_by_name(monkeypatch):
    """Where no kernel computes states, each step of it takes as long as the drafts that a state may keep."""
    monkeypatch.setenv("TINYVLLM_KERNELS", "gated_delta=ref")
    short, small = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), dict(max_num_batched_tokens=8, max_num_seqs=2)
    with open_llm(**small) as llm:
        assert llm.engine.speculation is None and llm.engine.runner.state_slots.drafts == 0
        expected = llm.generate(PROMPTS[3:], [short])
    with open_llm(**small, speculative_config={"method": "ngram", "num_speculative_tokens": 2}) as llm:
        _, controller = speculate(llm, Oracle(expected).half_right, 2)
        assert results(llm.generate(PROMPTS[3:], [short])) == results(expected)
        assert controller.accepted
