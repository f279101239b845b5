"""Priorities, deadlines, queue limits."""

from __future__ import annotations

import pytest

from tests.scheduler.builders import all_free, make, make_sequence, ran, run
from tinyvllm.errors import BusyError
from tinyvllm.request import Status
from tinyvllm.scheduler.rates import MIN_SAMPLES


def add(scheduler, *sequences):
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


# ---- priorities ----


def test_the_more_urgent_take_a_row_from_the_less_urgent():
    scheduler = make(rows=2)
    a, b = add(scheduler, make_sequence(0, 3), make_sequence(1, 3, priority=1))
    run(scheduler)
    (c,) = add(scheduler, make_sequence(2, 3))
    plan = run(scheduler)
    assert plan.preempted == [b] and ran(plan) == [0, 2] and b.status is Status.WAITING
    (d,) = add(scheduler, make_sequence(3, 3))
    assert run(scheduler).preempted == [] and list(scheduler.waiting) == [d, b], "equals do not push each other out"


def test_the_more_urgent_take_blocks_from_the_least_urgent_first():
    scheduler = make(rows=8, blocks=8, size=4)
    a, b, c = add(scheduler, make_sequence(0, 6, priority=1), make_sequence(1, 6, priority=2), make_sequence(2, 6, priority=2))
    run(scheduler)
    assert scheduler.pool.num_free == 2
    add(scheduler, make_sequence(3, 10))
    plan = run(scheduler)
    assert plan.preempted == [c] and ran(plan) == [0, 1, 3]


def test_none_is_preempted_where_it_would_not_help():
    scheduler = make(rows=8, blocks=8, size=4)
    a, b = add(scheduler, make_sequence(0, 10), make_sequence(1, 6, priority=1))
    run(scheduler)
    add(scheduler, make_sequence(2, 14, priority=-1))
    assert run(scheduler).preempted == [b], "3 blocks are free and b has 2"
    scheduler = make(rows=8, blocks=8, size=4)
    a, b = add(scheduler, make_sequence(0, 10), make_sequence(1, 6, priority=1))
    run(scheduler)
    add(scheduler, make_sequence(2, 20))
    assert run(scheduler).preempted == [], "5 blocks and one to spare, of which b has 2 and 3 are free"


def test_steps_ahead_stop_for_the_more_urgent_only():
    scheduler = make(rows=1)
    add(scheduler, make_sequence(0, 3, priority=1))
    run(scheduler)
    plan = scheduler.schedule()
    scheduler.advance(plan)
    add(scheduler, make_sequence(1, 3, priority=1))
    following = scheduler.follow(plan)
    assert following is not None
    scheduler.advance(following)
    add(scheduler, make_sequence(2, 3))
    assert scheduler.follow(following) is None, "it may take the row"


# ---- deadlines ----


def test_late_ones_end_wherever_they_are():
    scheduler = make(rows=2, budget=8)
    running, sleeping = make_sequence(0, 12, deadline_ms=1000.0), make_sequence(1, 12, deadline_ms=1000.0)
    scheduler.add(running, [sleeping])
    timeless, waiting = add(scheduler, make_sequence(2, 3), make_sequence(3, 30, deadline_ms=900.0))
    run(scheduler)
    scheduler.deadlines.clock.now += 0.95
    assert run(scheduler).expired == [waiting] and waiting.finish_reason == "deadline"
    scheduler.deadlines.clock.now += 0.1
    plan = run(scheduler)
    assert set(plan.expired) == {running, sleeping} and ran(plan) == [2]
    scheduler.finish(timeless, "stop")
    assert all_free(scheduler) and not scheduler.deadlines and not scheduler.has_work()


def test_the_first_tokens_deadline_ends_with_the_first_token():
    scheduler = make(rows=1)
    first, second = add(scheduler, make_sequence(0, 3, ttft_deadline_ms=500.0), make_sequence(1, 3, ttft_deadline_ms=500.0))
    run(scheduler)
    scheduler.deadlines.clock.now += 1.0
    assert run(scheduler).expired == [second] and not first.finished


def test_steps_ahead_stop_for_a_late_sequence():
    scheduler = make()
    (sequence,) = add(scheduler, make_sequence(0, 3, deadline_ms=1000.0))
    run(scheduler)
    plan = scheduler.schedule()
    scheduler.advance(plan)
    following = scheduler.follow(plan)
    assert following is not None
    scheduler.advance(following)
    scheduler.deadlines.clock.now += 2.0
    assert scheduler.follow(following) is None


def test_what_cannot_be_in_time_is_refused_with_the_wait():
    scheduler = make(rows=1)
    for _ in range(MIN_SAMPLES):
        scheduler.rates.observe_step(0, 0.1)
        scheduler.rates.observe_step(10, 0.2)  # 10 ms a token
    for options, word in ((dict(ttft_deadline_ms=150.0), "ttft_deadline_ms=150"), (dict(deadline_ms=900.0), "deadline_ms=900")):
        with pytest.raises(BusyError, match=word) as caught:
            scheduler.add(make_sequence(0, 20, wanted=8, **options))
        assert caught.value.reason == "deadline" and caught.value.retry_after == pytest.approx(0.05 if "ttft" in word else 0.1)
    assert not scheduler.has_work() and not scheduler.deadlines
    add(scheduler, make_sequence(1, 20, wanted=8, ttft_deadline_ms=250.0, deadline_ms=1100.0))


@pytest.mark.parametrize("options", [dict(ttft_deadline_ms=10.0), dict(deadline_ms=10.0)], ids=str)
def test_nothing_is_refused_by_a_few_samples(options):
    """A cold engine predicted 139 s for what took 30: its first steps say nothing about the next ones."""
    scheduler = make(rows=1)
    for _ in range(4):
        scheduler.rates.observe_step(0, 9.0)
        scheduler.rates.observe_step(10, 18.0)
    add(scheduler, make_sequence(0, 20, wanted=8, **options))


def test_short_steps_predict_no_long_ones():
    """Steps of 4 tokens take as long as steps of 16: by their cost a token, a prompt of 60 would take 1.5 s."""
    scheduler = make(rows=1, budget=64)
    for _ in range(20):
        scheduler.rates.observe_step(4, 0.1)
    add(scheduler, make_sequence(0, 60, ttft_deadline_ms=300.0))
    for _ in range(MIN_SAMPLES):
        scheduler.rates.observe_step(64, 0.2)
    add(scheduler, make_sequence(1, 60, ttft_deadline_ms=400.0))  # 120 tokens at 3.1 ms
    with pytest.raises(BusyError, match="562 ms are predicted"):
        scheduler.add(make_sequence(2, 60, ttft_deadline_ms=450.0))


def test_the_earliest_deadline_comes_first():
    scheduler = make(rows=1)
    add(scheduler, make_sequence(0, 3), make_sequence(1, 3, deadline_ms=9000.0), make_sequence(2, 3, deadline_ms=8000.0))
    assert ran(run(scheduler)) == [2]


# ---- limits of the queue ----


def test_so_many_requests_may_wait_beyond_free_rows():
    scheduler = make(rows=2, max_queued_reqs=1)
    add(scheduler, *(make_sequence(i, 3) for i in range(3)))
    with pytest.raises(BusyError, match="3 requests are waiting, the limit is 1") as caught:
        scheduler.add(make_sequence(3, 3))
    assert caught.value.reason == "max_num_queued_reqs" and len(scheduler.waiting) == 3
    run(scheduler)
    assert len(scheduler.waiting) == 1
    with pytest.raises(BusyError):
        scheduler.add(make_sequence(4, 3))


def test_so_many_tokens_may_wait():
    scheduler = make(rows=1, max_queued_tokens=20)
    add(scheduler, make_sequence(0, 30))  # a single waiting request may have any length
    with pytest.raises(BusyError, match="30 tokens are waiting, 3 more exceed the limit of 20") as caught:
        scheduler.add(make_sequence(1, 3))
    assert caught.value.reason == "max_num_queued_tokens"
    run(scheduler)
    add(scheduler, make_sequence(2, 15), make_sequence(3, 5))
    with pytest.raises(BusyError):
        scheduler.add(make_sequence(4, 1))
