"""Speculation changes no token and no log-probability, whatever the drafter guesses, and whatever else is in the batch.

Tests compare an engine whose drafter is scripted with one that has none. The full matrix is `long`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine.drafting import Fixed, Oracle, Scripted, repeats, speculate
from tests.engine.test_rounds import all_free, results
from tinyvllm import LLM, SamplingParams
from tinyvllm.engine.draft_loop import TIMED, SpeculativeLoop
from tinyvllm.request import BeamSearchParams, RequestOptions, Sequence, StructuredOutputsParams
from tinyvllm.scheduler import Scheduled
from tinyvllm.speculate.controller import MAX_PAUSE_LOOKUP, PATIENCE, AdaptiveController

OPTIONS: dict[str, Any] = dict(device="CPU", max_model_len=128, max_num_seqs=8, speculative_config="off")
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


@pytest.mark.parametrize(("guess", "K"), [("right", 1), ("half right", 8)])
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


def misbehave(how: str, right: Any) -> Any:
    """A guess that is right but for one thing."""

    def guess(tokens: list[int], count: int) -> Any:
        good = right(tokens, count)
        match how:
            case "too many":
                return right(tokens, count + 40)
            case "out of vocabulary":
                return [*good[:1], 3072, *good[1:]]
            case "negative":
                return [*good[:1], -1, *good[1:]]
            case "no integers":
                return [*good[:1], "a", 1.0, None]
            case "numpy":
                return np.array(good, np.int64)
            case "none at all":
                return None
        raise AssertionError(how)

    return guess


@pytest.mark.parametrize("how", ["too many", "out of vocabulary", "negative", "no integers", "numpy"])
def test_unusable_tokens_end_a_draft(drafted, oracle, how):
    _, controller = speculate(drafted, misbehave(how, Oracle(oracle.expected["greedy"]).right), 3)
    assert results(drafted.generate([prompt(1)], [params("greedy")])) == results(oracle.expected["greedy"])
    assert drafted.engine.speculation.on
    longest = 3 if how in ("too many", "numpy") else 1
    assert max(drafts for drafts, _ in controller.checked) == longest and controller.accepted >= NUM // 2 - 1


def broken(method: str, error: Any) -> Any:
    class Broken(Scripted):
        calls = 0

    def fail(self: Any, *arguments: Any) -> Any:
        self.calls += 1
        if callable(error):
            return error(*arguments)
        raise error

    setattr(Broken, method, fail)
    return Broken


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        ("propose", KeyError("lost"), "KeyError"),
        ("propose", lambda requests: [], "expected a draft for each of 10 sequences, got 0"),
        ("propose", lambda requests: None, "TypeError"),
        ("propose", MemoryError(), "MemoryError"),
        ("observe", ValueError("observed"), "observed"),
        ("forget", OSError("forgot"), "forgot"),
    ],
)
def test_a_drafter_that_fails_is_switched_off(drafted, oracle, caplog, method, error, message):
    """Once, with a warning; every request gets its tokens."""
    drafter = broken(method, error)(oracle.half_right)
    drafted.engine.speculate(drafter, Fixed(3))
    with caplog.at_level(logging.WARNING, logger="tinyvllm"):
        assert results(drafted.generate(PROMPTS, ALL)) == results(oracle.all)
        assert results(drafted.generate(PROMPTS[:2], ALL[:2])) == results(oracle.all[:2])
    warnings = [record.getMessage() for record in caplog.records if "switched off" in record.getMessage()]
    assert len(warnings) == 1 and "'scripted'" in warnings[0] and method in warnings[0]
    assert message.replace("10 sequences", "") in warnings[0] or "expected a draft for each" in warnings[0]
    assert not drafted.engine.speculation.on and drafter.calls == 1 and all_free(drafted)


def test_a_slow_drafter_is_switched_off(drafted, oracle, caplog):
    now = iter(range(0, 10_000, 3))
    speculate(drafted, oracle.right, 3)
    drafted.engine.speculation._clock = lambda: float(next(now))
    with caplog.at_level(logging.WARNING, logger="tinyvllm"):
        assert results(drafted.generate([prompt(1)], [params("greedy")])) == results(oracle.expected["greedy"])
    assert not drafted.engine.speculation.on and "one call took 3.0 s" in caplog.text


@pytest.mark.parametrize("method", ["limits", "choose", "observe", "observe_step", "observe_proposal", "forget"])
def test_a_controller_that_fails_ends_speculation(drafted, oracle, method):
    controller = Fixed(2)
    setattr(controller, method, lambda *arguments: 1 / 0)
    drafted.engine.speculate(Scripted(oracle.right), controller)
    assert results(drafted.generate(PROMPTS[:3], ALL[:3])) == results(oracle.all[:3])
    assert not drafted.engine.speculation.on


def test_the_drafter_observes_every_token_and_forgets_every_sequence(drafted, oracle):
    drafter, _ = speculate(drafted, oracle.half_right, 3)
    outputs = drafted.generate(PROMPTS, ALL)
    assert sorted(drafter.forgotten.values()) == sorted(output.outputs[0].token_ids for output in outputs) and not drafter.texts
    assert not drafted.engine.speculation._observed


@pytest.mark.parametrize("run_ahead", [False, True])
def test_steps_between_two_proposals_run_as_without_a_drafter(oracle, run_ahead):
    """Nothing is guessed: by counts, the drafter, the controller and the clock of steps have their turn in few steps."""
    with LLM(**OPTIONS, async_scheduling=run_ahead) as llm:
        calls = {"propose": 0, "limits": 0, "observe_step": 0}

        def counted(thing: Any, name: str) -> None:
            method = getattr(thing, name)

            def call(*arguments: Any) -> Any:
                calls[name] += 1
                return method(*arguments)

            setattr(thing, name, call)

        drafter, controller = Scripted(lambda tokens, count: []), AdaptiveController(8)
        counted(drafter, "propose")
        counted(controller, "limits")
        counted(controller, "observe_step")
        llm.engine.speculate(drafter, controller)
        wanted = params("greedy", max_tokens=80)
        outputs = llm.generate([prompt(1)] * 3, [wanted] * 3)
        most = 3 + PATIENCE + MAX_PAUSE_LOOKUP.bit_length() + 80 // MAX_PAUSE_LOOKUP  # 3: the prompts' step, and the end
        assert calls["propose"] <= most and calls["limits"] <= most + 2 and calls["observe_step"] <= most + 80 // TIMED, calls
        assert calls["propose"] > PATIENCE
        assert {part.token_ids[:NUM] == oracle.expected["greedy"][0].outputs[0].token_ids for o in outputs for part in o.outputs} == {True}


def test_the_controller_knows_how_many_sequences_decode(drafted, oracle):
    """What a draft costs depends on them: beams, which get none, count, and sequences whose prompt is computed do not."""
    controller, heard = Fixed(2), set[tuple[str, int, int]]()
    for name in ("limits", "choose"):
        method = getattr(controller, name)
        setattr(
            controller, name, lambda some, *rest, name=name, method=method: heard.add((name, len(some), rest[-1])) or method(some, *rest)
        )
    engine = drafted.engine
    engine.speculate(Scripted(oracle.right), controller)
    engine.add("decode", prompt(0)["prompt_token_ids"], params("greedy"))
    engine.step()
    engine.add("prompt", [0, *range(10, 120)], params("greedy", max_tokens=1))  # two chunks
    engine.step()
    assert heard == {("limits", 1, 1), ("choose", 1, 1)}
    while engine.has_work():
        engine.step()
    heard.clear()
    engine.add("decode", prompt(0)["prompt_token_ids"], params("greedy"))
    engine.add("beams", prompt(0)["prompt_token_ids"], BeamSearchParams(2, 4, ignore_eos=True))
    while engine.has_work():
        engine.step()
    assert {("limits", 1, 3), ("choose", 1, 3)} <= heard, "one sequence and two beams"


def test_no_draft_beyond_the_longest_output(drafted):
    """The last draft leaves room for the token after it; the prompt's step draws the first of 6 tokens."""
    for length, most in ((6, 4), (2, 0)):
        _, controller = speculate(drafted, lambda tokens, count: [1] * count, 8)
        drafted.generate([prompt(4)], [params("greedy", max_tokens=length)])
        assert max((drafts for drafts, _ in controller.checked), default=0) == most
    _, controller = speculate(drafted, lambda tokens, count: [1] * count, 8)
    long = {"prompt_token_ids": [0, *range(10, 130)]}  # of 128
    drafted.generate([long], [params("greedy", max_tokens=None)])
    assert max(drafts for drafts, _ in controller.checked) == 128 - 121 - 2


def test_tenants_are_apart(drafted):
    drafter, _ = speculate(drafted, repeats, 2)
    for number, (salt, key) in enumerate((("a", "x"), ("a", "y"), (None, "x"), (None, ""))):
        options = RequestOptions(cache_salt=salt, key=key)
        drafted.engine.add(f"t{number}", prompt(2)["prompt_token_ids"], params("greedy", max_tokens=3), None, options)
    while drafted.engine.has_work():
        drafted.engine.step()
    assert len(drafter.tenants) == 4


# --- what happens to sequences meanwhile


ENGINES: dict[str, dict[str, Any]] = {
    "preempted": dict(num_blocks=14, enable_prefix_caching=False),
    "both": dict(async_scheduling=True, num_scheduler_steps=4),
    "swapped": dict(num_blocks=14, swap_space="8MB", preemption_mode="swap"),
    "several steps": dict(num_scheduler_steps=5),
    "run-ahead": dict(async_scheduling=True),
    "small chunks": dict(max_num_batched_tokens=16, max_num_seqs=5),
    "int8 cache": dict(kv_cache_dtype="int8"),
    "q4_k_m": dict(quantization="q4_k_m", kv_cache_dtype="int4"),
    "no cascade": dict(enable_cascade=False),
    "small blocks": dict(block_size=8),
}


def check_engine(oracle: Oracle, name: str, guesses: list[tuple[str, int]]) -> None:
    """An engine with drafts, compared with itself without."""
    options = ENGINES[name]
    with LLM(**(OPTIONS | options)) as llm:
        expected = llm.generate(PROMPTS, ALL)
        if "kv_cache_dtype" not in options:
            assert results(expected) == results(oracle.all)
        preempted = sum(output.metrics.preemptions for output in expected)
        own = Oracle(expected)
        for guess, K in guesses:
            _, controller = speculate(llm, GUESSES[guess](own), K)
            outputs = llm.generate(PROMPTS, ALL)
            assert results(outputs) == results(expected)
            assert controller.checked and all_free(llm) and isinstance(llm.engine.loop, SpeculativeLoop)
            if "num_blocks" in options:
                assert preempted and sum(output.metrics.preemptions for output in outputs)


@pytest.mark.parametrize("name", ["preempted", "swapped", "both"])
def test_engines(oracle, name):
    check_engine(oracle, name, [("half right", 3)])


@pytest.mark.long
@pytest.mark.parametrize("name", ENGINES)
def test_all_engines(oracle, name):
    check_engine(oracle, name, [(guess, K) for guess in GUESSES for K in (1, 3, 8)])


def test_run_ahead_where_nothing_is_guessed(oracle):
    """The loops below run as without a drafter; a guess while a step is in flight has its tokens read before the next launch."""
    with LLM(**OPTIONS, async_scheduling=True) as llm:
        launches = []
        launch_whole = llm.engine.stages.launch_whole
        llm.engine.stages.launch_whole = lambda step: launches.append(1) or launch_whole(step)
        speculate(llm, lambda tokens, count: [], 3)
        assert results(llm.generate([prompt(1)], [params("greedy")])) == results(oracle.expected["greedy"])
        assert len(launches) == NUM - 1, "every decode is launched ahead"
        right = Oracle(oracle.expected["greedy"]).right
        length = len(prompt(1)["prompt_token_ids"])
        launches.clear()
        _, controller = speculate(llm, lambda tokens, count: right(tokens, count) if len(tokens) > length + 8 else [], 3)
        assert results(llm.generate([prompt(1)], [params("greedy")])) == results(oracle.expected["greedy"])
        assert 8 <= len(launches) <= 11 and controller.accepted >= 9


def test_forks(plain, drafted):
    wanted = SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=20, ignore_eos=True, logprobs=1)
    expected = plain.generate([prompt(1)], [wanted])
    _, controller = speculate(drafted, Oracle(expected).half_right, 3)
    assert results(drafted.generate([prompt(1)], [wanted])) == results(expected)
    assert controller.accepted > 5 and all_free(drafted)


def test_cached_prefixes_hold_no_rejected_tokens(plain, drafted, oracle):
    """Blocks that were filled while drafts were rejected are found by a longer prompt, and its tokens are those of an empty cache."""
    text = prompt(1)["prompt_token_ids"] + oracle.expected["greedy"][0].outputs[0].token_ids
    longer = {"prompt_token_ids": text[:60]}
    with LLM(**OPTIONS, enable_prefix_caching=False) as empty:
        expected = empty.generate([longer], [params("logprobs")])
    for guess in ("wrong", "half right"):
        drafted.engine.scheduler.prefix.reset()
        speculate(drafted, GUESSES[guess](Oracle(oracle.expected["greedy"])), 8)
        drafted.generate([prompt(1)], [params("greedy")])
        speculate(drafted, GUESSES[guess](Oracle(expected)), 8)
        found = drafted.generate([longer], [params("logprobs")])
        assert found[0].num_cached_tokens >= 48 and results(found) == results(expected)


def test_beam_search_has_no_drafts_and_says_so(drafted):
    speculate(drafted, lambda tokens, count: [1] * count, 3)
    before = drafted.engine.stats.num_tokens
    drafted.engine.add("b", prompt(1)["prompt_token_ids"], BeamSearchParams(beam_width=2, max_tokens=5), None, RequestOptions(receipt=True))
    outputs = [output for _ in iter(drafted.engine.has_work, False) for output in drafted.engine.step()]
    assert outputs[-1].receipt.speculation == "off: beam search" and outputs[-1].receipt.draft_tokens == 0
    assert drafted.engine.stats.num_tokens > before


def test_figures_of_drafts(drafted, oracle):
    _, controller = speculate(drafted, Oracle(oracle.expected["greedy"]).half_right, 3)
    drafted.engine.add("r", prompt(1)["prompt_token_ids"], params("greedy"), None, RequestOptions(receipt=True))
    outputs = [output for _ in iter(drafted.engine.has_work, False) for output in drafted.engine.step()]
    receipt, checked = outputs[-1].receipt, controller.checked
    drafts, accepted = sum(d for d, _ in checked), controller.accepted
    assert 0 < accepted < drafts and receipt.speculation == "scripted"
    assert (receipt.draft_tokens, receipt.accepted_tokens) == (drafts, accepted)
    assert (outputs[-1].metrics.draft_tokens, outputs[-1].metrics.accepted_tokens) == (drafts, accepted)
    assert receipt.steps == 1 + (NUM - 1) - accepted
