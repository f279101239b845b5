"""The target for a step with decodes and chunks: the gap between two tokens of a decode while a long prompt is computed."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import pytest

from tests.scheduler.builders import make, make_sequence, run
from tinyvllm.scheduler import Rates, Scheduler

TARGET = 0.25
Cost = Callable[[int, int], float]  # seconds of a step by its decodes and its prompt tokens


def dense_1b(decodes: int, tokens: int) -> float:
    """A model of 1.1B on two cores."""
    return 0.056 + 0.0036 * tokens


def slow(decodes: int, tokens: int) -> float:
    return 0.4 + 0.05 * tokens


def fast(decodes: int, tokens: int) -> float:
    return 0.001 + 0.00001 * tokens


def cheaper_in_bulk(decodes: int, tokens: int) -> float:
    """Short chunks stream the weights once each; long ones share that."""
    return 0.05 + 0.001 * tokens + (0.03 if tokens else 0.0)


def timed_step(scheduler: Scheduler, cost: Cost, observed: bool = True) -> tuple[int, int, float]:
    """Decodes, prompt tokens and seconds of one step, which the rates get unless it was a capture."""
    plan = run(scheduler)
    decodes = sum(entry.num_tokens == entry.num_logits == 1 for entry in plan.entries)
    tokens = plan.num_tokens - decodes
    seconds = cost(decodes, tokens)
    if observed:
        scheduler.rates.observe_step(tokens, seconds)
    return decodes, tokens, seconds


def with_decode(seconds: float | None = TARGET, budget: int = 512) -> Scheduler:
    """A scheduler in which one sequence decodes, and a prompt of 4,000 tokens waits."""
    scheduler = make(rows=8, budget=budget, longest=8000, blocks=4000, max_step_seconds=seconds)
    scheduler.add(make_sequence(0, 1, wanted=4000))
    run(scheduler)
    scheduler.add(make_sequence(1, 4000))
    return scheduler


def steps_of_the_prompt(scheduler: Scheduler, cost: Cost) -> list[tuple[int, int, float]]:
    """The steps with decodes and chunks; every first step of a size is a capture, which the rates do not get."""
    steps: list[tuple[int, int, float]] = []
    sizes: set[int] = set()
    while True:
        plan = scheduler.schedule()
        decodes = sum(entry.num_tokens == entry.num_logits == 1 for entry in plan.entries)
        tokens = plan.num_tokens - decodes
        scheduler.advance(plan)
        for entry in plan.entries:
            if entry.num_logits:
                entry.sequence.output_token_ids.append(7)
        if not tokens:
            return steps
        steps.append((decodes, tokens, cost(decodes, tokens)))
        if tokens in sizes:
            scheduler.rates.observe_step(tokens, steps[-1][2])
        sizes.add(tokens)


def test_without_a_target_a_chunk_takes_the_whole_budget():
    scheduler = with_decode(seconds=None)
    assert timed_step(scheduler, dense_1b)[:2] == (1, 511)


@pytest.mark.parametrize("cost", [dense_1b, cheaper_in_bulk], ids=lambda cost: cost.__name__)
def test_the_gap_keeps_to_the_target_with_few_sizes(cost):
    scheduler = with_decode()
    scheduler.rates.observe_step(0, cost(1, 0))
    steps = steps_of_the_prompt(scheduler, cost)
    assert sum(tokens for _, tokens, _ in steps) == 4000 and all(decodes == 1 for decodes, _, _ in steps)
    assert max(seconds for _, _, seconds in steps) <= TARGET
    assert median(seconds for _, _, seconds in steps) > TARGET / 2, "a third of the time would be too careful"
    sizes = {tokens for _, tokens, _ in steps[:-1]}  # the last one is the rest of the prompt
    assert len(sizes) <= 3 and all(size & (size - 1) == 0 for size in sizes), "every size is a capture"


def test_the_start_is_careful_until_a_step_was_timed():
    scheduler = with_decode()
    assert [timed_step(scheduler, fast, observed=False)[1] for _ in range(2)] == [32, 32]
    timed_step(scheduler, fast)
    assert timed_step(scheduler, fast)[1] == 511


def test_steps_of_prompts_alone_have_the_whole_budget():
    scheduler = make(rows=4, budget=512, longest=8000, blocks=4000, max_step_seconds=0.001)
    scheduler.add(make_sequence(0, 2000))
    for _ in range(3):
        assert timed_step(scheduler, slow)[:2] == (0, 512)


def test_a_machine_that_is_too_slow_still_computes_prompts():
    scheduler = with_decode()
    scheduler.rates.observe_step(0, slow(1, 0))
    timed_step(scheduler, slow)
    assert [timed_step(scheduler, slow)[1] for _ in range(3)] == [16, 16, 16]


def test_what_was_slow_once_is_tried_again():
    rates = Rates()
    rates.observe_step(0, 0.05)
    rates.observe_step(64, 9.0)  # while another program kept the cores busy
    assert rates.max_chunk_tokens(TARGET, 512) == 16
    for _ in range(40):
        rates.observe_step(16, 0.05 + 16 * 0.001)
    assert rates.max_chunk_tokens(TARGET, 512) == 128


def test_a_budget_that_is_no_power_of_two_is_used_up_where_time_allows():
    rates = Rates()
    rates.observe_step(100, 0.01)
    assert rates.max_chunk_tokens(TARGET, 100) == 100 and rates.max_chunk_tokens(0.008, 100) == 64
    assert rates.max_chunk_tokens(0.0, 100) == 16 and rates.max_chunk_tokens(0.0, 9) == 9 and rates.max_chunk_tokens(0.0, 0) == 0


def test_the_schedule_names_what_was_allowed():
    scheduler = with_decode()
    assert scheduler.schedule().max_chunk_tokens == 32
    scheduler = with_decode(seconds=None)
    assert scheduler.schedule().max_chunk_tokens is None
