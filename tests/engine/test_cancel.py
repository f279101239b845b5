"""Requests that are cancelled between any two steps, run out of time or break: their blocks are free at once, others are unchanged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.soak_traffic import check_empty
from tinyvllm import LLM, SamplingParams
from tinyvllm.engine.engine import Engine
from tinyvllm.request import BeamSearchParams, RequestOptions, RequestOutput, StructuredOutputsParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [256, *np.random.default_rng(seed).integers(32, 127, tokens - 1).tolist()]


@pytest.fixture(scope="module", params=["off", {"method": "suffix", "num_speculative_tokens": 4}], ids=["plain", "drafts"])
def llm(tiny_model, request) -> Iterator[LLM]:
    with LLM(
        tiny_model, device="CPU", max_model_len=128, max_num_seqs=6, max_num_batched_tokens=24, num_blocks=14, swap_space="1MB",
        preemption_mode="swap", speculative_config=request.param,
    ) as llm:  # fmt: skip
        yield llm


def finish(engine: Engine) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    for _ in range(500):
        if not engine.has_work():
            break
        outputs |= {output.request_id: output for output in engine.step()}
    check_empty(engine)
    return outputs


@pytest.fixture(scope="module")
def undisturbed(llm) -> list[int]:
    llm.engine.add("calm", prompt(20, 7), GREEDY)
    return finish(llm.engine)["calm"].outputs[0].token_ids


def fine(prompt: list[int], output: list[int], logits: np.ndarray) -> np.ndarray:
    return logits


KINDS: dict[str, tuple[int, Any]] = {
    "chunks of a long prompt": (90, GREEDY),
    "continuations": (30, replace(GREEDY, n=3, temperature=0.8, seed=1)),
    "best of": (30, replace(GREEDY, best_of=3, temperature=0.8, seed=1)),
    "beams": (30, BeamSearchParams(3, 12, ignore_eos=True)),
    "scoring": (70, replace(GREEDY, prompt_logprobs=1)),
    "grammar": (20, replace(GREEDY, ignore_eos=False, structured_outputs=StructuredOutputsParams(regex="[a-z ]{12}"))),
    "processor": (20, replace(GREEDY, logits_processors=[fine])),
}


@pytest.mark.parametrize("overlap", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_between_any_two_steps(llm, undisturbed, kind: str, overlap: bool) -> None:
    engine, (tokens, params) = llm.engine, KINDS[kind]
    engine.config = replace(engine.config, async_scheduling=overlap)
    for moment in range(0, 16, 2 if overlap else 1):
        engine.add("calm", prompt(20, 7), GREEDY)
        engine.add("other", prompt(tokens), params)
        heard: dict[str, RequestOutput] = {}
        for _ in range(moment):
            heard |= {output.request_id: output for output in engine.step()}
        over = heard.get("other") is not None and heard["other"].finished
        engine.abort("other")
        scheduler = engine.scheduler
        assert all(sequence.request_id == "calm" for sequence in (*scheduler.running, *scheduler.waiting))
        held = {block for sequence in scheduler.running for block in sequence.block_table} | set(scheduler._copies)
        assert scheduler.pool.num_free == scheduler.pool.num_blocks - len(held), "what was copied in the last step is let go in the next"
        assert scheduler.host.num_free == scheduler.host.num_blocks and not scheduler.borrowed.num_held
        heard |= finish(engine)
        assert heard["calm"].outputs[0].token_ids == undisturbed
        assert over or {part.finish_reason for part in heard["other"].outputs} <= {"abort", "stop", "length"}
        if kind != "best of":  # the best may be one that had ended: with drafts they do not end in the same step
            assert over or "abort" in {part.finish_reason for part in heard["other"].outputs}


def test_aborts_of_those_that_are_swapped_out(llm, undisturbed) -> None:
    engine = llm.engine
    for round in range(12):
        names = [f"r{i}" for i in range(6)]
        for i, name in enumerate(names):
            engine.add(name, prompt(30, i), replace(LONG, n=1 + i % 2))
        heard: dict[str, RequestOutput] = {}
        while not any(s.host_table for s in engine.scheduler.waiting):
            heard |= {output.request_id: output for output in engine.step()}
        for _ in range(round):
            engine.step()
        for sequence in [s for s in engine.scheduler.waiting if s.host_table]:
            engine.abort(sequence.request_id)
            assert not sequence.host_table
        assert engine.scheduler.host.num_free == engine.scheduler.host.num_blocks
        finish(engine)


def test_processors_that_raise_end_their_request_alone(llm, undisturbed) -> None:
    def raising(prompt: list[int], output: list[int], logits: np.ndarray) -> np.ndarray:
        if len(output) == 3:
            raise KeyError("mine")
        return logits

    def misshapen(prompt: list[int], output: list[int], logits: np.ndarray) -> np.ndarray:
        return logits[:-1]

    engine = llm.engine
    engine.add("calm", prompt(20, 7), GREEDY)
    engine.add("raising", prompt(20, 7), replace(GREEDY, logits_processors=[raising]))
    engine.add("misshapen", prompt(9), replace(GREEDY, logits_processors=[misshapen]))
    heard = finish(engine)
    assert heard["calm"].outputs[0].token_ids == undisturbed
    broken = heard["raising"].outputs[0]
    assert broken.token_ids == undisturbed[:3] and broken.finish_reason == "error" and "KeyError: 'mine'" in broken.error
    assert heard["misshapen"].outputs[0].token_ids == [] and "expected logits of shape (264,)" in heard["misshapen"].outputs[0].error


def test_one_continuation_that_breaks_leaves_the_others(llm) -> None:
    calls = []

    def once(prompt: list[int], output: list[int], logits: np.ndarray) -> np.ndarray:
        calls.append(len(output))
        if len(output) == 2 and calls.count(2) == 1:
            raise ValueError("the first to get here")
        return logits

    llm.engine.add("n", prompt(12), replace(GREEDY, n=3, temperature=0.8, seed=3, logits_processors=[once]))
    outputs = finish(llm.engine)["n"].outputs
    assert sorted(part.finish_reason for part in outputs) == ["error", "length", "length"]


def test_deadlines_of_beams_and_continuations(llm) -> None:
    """All of a search end together, long after the sequence that it began with is gone."""
    engine = llm.engine
    for params in (BeamSearchParams(3, 60, ignore_eos=True), replace(LONG, n=3, max_tokens=60, temperature=0.8, seed=2)):
        engine.add("late", prompt(20), params, options=RequestOptions(deadline_ms=60_000.0))
        for _ in range(12):
            engine.step()
        engine.scheduler.deadlines.clock = lambda: time.monotonic() + 120
        heard = finish(engine)
        engine.scheduler.deadlines.clock = time.monotonic
        assert {part.finish_reason for part in heard["late"].outputs} == {"deadline"}
        assert all(0 < len(part.token_ids) < 60 for part in heard["late"].outputs)


def test_beams_that_outgrow_the_whole_cache_end_with_what_they_have(tiny_model) -> None:
    with LLM(tiny_model, device="CPU", max_model_len=128, max_num_seqs=6, num_blocks=4) as llm:
        llm.engine.add("beams", prompt(40), BeamSearchParams(3, 60, ignore_eos=True))
        outputs = finish(llm.engine)["beams"].outputs
    assert len(outputs) == 3 and all(part.finish_reason == "length" and len(part.token_ids) >= 24 for part in outputs)


@pytest.mark.parametrize("caching", [False, True])
def test_beams_that_do_not_fit_together_are_what_they_are_with_room(tiny_model, caching: bool) -> None:
    """They compute in turn, and again and again."""
    found = []
    for blocks in (64, 5):
        with LLM(tiny_model, device="CPU", max_model_len=96, max_num_seqs=6, num_blocks=blocks, enable_prefix_caching=caching) as llm:
            llm.engine.add("beams", prompt(40), BeamSearchParams(4, 20, ignore_eos=True))
            output = finish(llm.engine)["beams"]
            found.append([part.token_ids for part in output.outputs])
    assert found[0] == found[1]


def test_scores_in_a_pool_that_holds_one_prompt(tiny_model) -> None:
    """Its own sequence waits for the blocks that its scores are computed in, and so do others."""
    with LLM(tiny_model, device="CPU", max_model_len=96, max_num_seqs=4, max_num_batched_tokens=16, num_blocks=6) as llm:
        engine = llm.engine
        engine.add("scored", prompt(70), replace(GREEDY, prompt_logprobs=1))
        engine.add("other", prompt(60, 3), GREEDY)
        heard = finish(engine)
        assert len(heard["scored"].prompt_logprobs) == 70
        assert all(len(output.outputs[0].token_ids) == 12 for output in heard.values())


def test_scores_come_in_while_others_never_cease(tiny_model) -> None:
    with LLM(tiny_model, device="CPU", max_model_len=96, max_num_seqs=4, max_num_batched_tokens=32, num_blocks=8) as llm:
        engine = llm.engine
        engine.add("scored", prompt(70), replace(GREEDY, max_tokens=2, prompt_logprobs=0))
        for i in range(200):
            if len(engine.requests) < 8:
                engine.add(f"other {i}", prompt(30, i), GREEDY)
            if any(output.request_id == "scored" and output.finished for output in engine.step()):
                break
        else:
            raise AssertionError("two hundred steps, and no room for its scores")
        finish(engine)
