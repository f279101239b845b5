"""Preemption by swap: when it is taken, what moves, what comes back; borrowed blocks."""

from __future__ import annotations

import pytest

from tests.scheduler.builders import all_free, make, make_sequence, ran, run
from tinyvllm.request import Status


def pressed(**options):
    """Two of 2 blocks in 6, the first of which then wants 5."""
    scheduler = make(blocks=6, size=4, block_bytes=1000, **options)
    first, second = make_sequence(0, 6), make_sequence(1, 6)
    scheduler.add(first)
    scheduler.add(second)
    run(scheduler)
    first.output_token_ids += [7] * 11
    return scheduler, first, second


def test_what_is_swapped_out_comes_back_where_it_was():
    scheduler, first, second = pressed(hosted=4, preemption="swap")
    table = list(second.block_table)
    plan = run(scheduler)
    assert plan.preempted == [second] and [block for block, _ in plan.swap_out] == table and scheduler.num_swaps == 1
    assert second.num_swapped == 6 and second.host_table == [host for _, host in plan.swap_out] and scheduler.host.num_free == 2
    scheduler.finish(first, "stop")
    hosted = list(second.host_table)
    plan = run(scheduler)
    assert [(e.sequence.sequence_id, e.start, e.num_tokens) for e in plan.entries] == [(1, 6, 1)]
    assert plan.swap_in == list(zip(hosted, second.block_table, strict=True)) and scheduler.host.num_free == 4
    scheduler.finish(second, "stop")
    assert all_free(scheduler)


def test_an_end_while_swapped_out_frees_the_hosts_blocks():
    scheduler, first, second = pressed(hosted=4, preemption="swap")
    run(scheduler)
    scheduler.finish(second, "abort")
    assert scheduler.host.num_free == 4 and second.host_table == []


@pytest.mark.parametrize(
    ("options", "token_seconds", "swaps"),
    [
        (dict(hosted=4), 0.1, True),
        (dict(hosted=4), 1e-9, False),  # again is cheaper than two copies
        (dict(hosted=4), None, False),  # nothing was measured
        (dict(hosted=1), 0.1, False),  # no room
        (dict(), 0.1, False),
        (dict(hosted=4, preemption="recompute"), 0.1, False),
        (dict(hosted=4, preemption="swap"), 1e-9, True),
        (dict(hosted=1, preemption="swap"), 1e-9, False),
    ],
)
def test_the_cheaper_way_is_taken_unless_one_is_forced(options, token_seconds, swaps):
    scheduler, _, second = pressed(**options)
    if token_seconds is not None:
        scheduler.rates.observe_step(10, 10 * token_seconds)
    scheduler.rates.observe_copy(1000, 0.001)  # 2 copies of 2 blocks of 1000 bytes: 4 ms
    plan = run(scheduler)
    assert plan.preempted == [second] and bool(plan.swap_out) == swaps and bool(second.num_swapped) == swaps


def test_what_the_prefix_cache_still_has_is_not_brought_back():
    scheduler = make(blocks=9, size=4, hosted=8, preemption="swap", caching=True)
    first, second = make_sequence(0, 6), make_sequence(1, [9] * 14)
    scheduler.add(first)
    scheduler.add(second)
    run(scheduler)
    first.output_token_ids += [7] * 15
    plan = run(scheduler)
    assert plan.preempted == [second] and len(plan.swap_out) == 4
    hosted = list(second.host_table)
    scheduler.finish(first, "stop")
    plan = run(scheduler)
    found = len(second.block_table) - len(plan.swap_in)
    assert 0 < found < 4, "some of its blocks were evicted, and not all"
    assert [host for host, _ in plan.swap_in] == hosted[found:] and plan.entries[0].start == 14
    assert scheduler.host.num_free == 8


# ---- borrowed blocks ----


def test_no_sequence_ends_for_want_of_borrowed_blocks():
    scheduler = make(blocks=4, size=4)
    lent = scheduler.borrowed.take(3)
    sequence = make_sequence(0, 10)
    scheduler.add(sequence)
    plan = run(scheduler)
    assert plan.empty and not sequence.finished and scheduler.has_work()
    scheduler.borrowed.give_back(lent)
    assert ran(run(scheduler)) == [0]


def test_a_sequence_that_needs_borrowed_blocks_waits_for_them():
    scheduler = make(blocks=4, size=4)
    sequence = make_sequence(0, 4)
    scheduler.add(sequence)
    run(scheduler)
    lent = scheduler.borrowed.take(3)
    for _ in range(3):
        plan = run(scheduler)
        assert not plan.exhausted and not sequence.finished
    assert sequence.status is Status.WAITING
    scheduler.borrowed.give_back(lent)
    assert ran(run(scheduler)) == [0] and not sequence.finished


def test_wanted_blocks_are_withheld_from_admission():
    scheduler = make(rows=4, blocks=6, size=4)
    first = make_sequence(0, 11)
    scheduler.add(first)
    run(scheduler)
    assert scheduler.borrowed.take(4) is None and scheduler.pool.num_free == 3
    scheduler.add(make_sequence(1, 3))
    assert ran(run(scheduler)) == [0]
    scheduler.finish(first, "stop")
    lent = scheduler.borrowed.take(4)
    assert lent is not None and ran(run(scheduler)) == [1]
    scheduler.borrowed.give_back(lent)


def test_a_withdrawn_wish_keeps_none_out():
    scheduler = make(rows=4, blocks=6, size=4)
    scheduler.add(make_sequence(0, 11))
    run(scheduler)
    assert scheduler.borrowed.take(4) is None
    scheduler.borrowed.give_back([])
    scheduler.add(make_sequence(1, 3))
    assert ran(run(scheduler)) == [0, 1]
