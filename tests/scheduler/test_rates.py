"""What waits are predicted from, and what preemption weighs."""

from __future__ import annotations

import pytest

from tests.scheduler.builders import make, make_sequence, run
from tinyvllm.scheduler import Rates


def test_nothing_is_known_before_anything_was_seen():
    rates = Rates()
    assert rates.prefill_token is None and rates.decode_step is None and rates.copy_bandwidth > 0


def test_a_step_that_was_compiled_does_not_count_for_much():
    rates = Rates()
    for seconds in (9.0, 0.01, 0.02, 0.01):
        rates.observe_step(0, seconds)
    assert rates.decode_step == pytest.approx(0.015)
    for tokens, seconds in ((10, 5.0), (10, 0.115), (20, 0.215)):
        rates.observe_step(tokens, seconds)
    assert rates.prefill_token == pytest.approx(0.01), "without what the decodes of the same step take"


def test_only_the_last_steps_count():
    rates = Rates()
    for seconds in [1.0] * 40 + [0.5] * 40:
        rates.observe_step(0, seconds)
        rates.observe_copy(100, seconds)
    assert rates.decode_step == 0.5 and rates.copy_bandwidth == 200


def test_the_wait_is_the_tokens_ahead_and_the_rows_that_must_come_free():
    scheduler = make(rows=2, budget=32)
    scheduler.rates.observe_step(0, 0.1)
    scheduler.rates.observe_step(10, 0.1 + 10 * 0.01)
    assert scheduler.predicted_wait(make_sequence(0, 20)) == pytest.approx(0.2)
    for number in range(2):
        scheduler.add(make_sequence(number, 5, wanted=8))
    run(scheduler)  # both have a token of 8
    wait = scheduler.predicted_wait(make_sequence(2, 20))
    assert wait == pytest.approx(20 * 0.01 + 2 * 0.01 + 7 * 0.1), "its prompt, a token of each that runs, seven steps until a row is free"
    scheduler.add(make_sequence(3, 30))
    assert scheduler.predicted_wait(make_sequence(4, 20)) == pytest.approx(wait + 30 * 0.01)
    assert scheduler.predicted_wait(make_sequence(5, 20, priority=-1)) == pytest.approx(wait), "it does not wait for those after it"


def test_what_is_cached_need_not_be_waited_for():
    scheduler = make(caching=True)
    scheduler.rates.observe_step(10, 0.1)
    first = make_sequence(0, 17)
    scheduler.add(first)
    run(scheduler)
    scheduler.finish(first, "stop")
    assert scheduler.predicted_wait(make_sequence(1, 17)) == pytest.approx(0.01)
    assert scheduler.predicted_wait(make_sequence(2, 17, cache_salt="other")) == pytest.approx(0.17)
