"""Reused steps of decodes: the same object, as long as no sequence starts, ends, or has other than one token to compute."""

from __future__ import annotations

import pytest

from tests.scheduler.builders import make, make_sequence, ran, run
from tinyvllm.scheduler.drafts import add_drafts, count_confirmed


def decoding(lengths=(5, 7, 8), **limits):
    """Sequences after their prompts, and the schedule of their last step."""
    scheduler = make(**{"rows": 4, "size": 4, "blocks": 32, "caching": True, **limits})
    for n, tokens in enumerate(lengths):
        scheduler.add(make_sequence(n, [100 * n + i for i in range(tokens)]))
    run(scheduler)
    return scheduler, run(scheduler)


def test_a_reused_step_is_the_last_ones_object():
    scheduler, first = decoding()
    starts = [entry.start for entry in first.entries]
    assert not first.reused and starts == [5, 7, 8]
    for turn in range(1, 10):
        plan = run(scheduler)
        assert plan is first and plan.reused and [entry.start for entry in plan.entries] == [start + turn for start in starts]
        assert ran(type(plan)(plan.changed)) == [n for n, start in enumerate(starts) if (start + turn) % 4 == 0]
        for entry in plan.entries:
            assert len(entry.sequence.block_table) == scheduler.pool.blocks_for(entry.start + 1)
    assert [entry.sequence.num_published for entry in first.entries] == [entry.start // 4 for entry in first.entries], "found by others"


def test_what_is_generated_on_the_way_is_found():
    scheduler, _ = decoding(lengths=(5,))
    for _ in range(8):
        run(scheduler)
    (sequence,) = scheduler.running
    other = make_sequence(9, sequence.token_ids(0, 13))
    scheduler.add(other)
    run(scheduler)
    assert other.num_cached == 12


@pytest.mark.parametrize("what", ["arrives", "ends", "two tokens", "no token", "fork", "did not run"])
def test_anything_else_is_scheduled_again(what):
    scheduler, first = decoding()
    sequence = scheduler.running[1]
    match what:
        case "arrives":
            scheduler.add(make_sequence(9, 3))
        case "ends":
            scheduler.finish(sequence, "stop")
        case "two tokens":
            sequence.output_token_ids.append(7)
        case "no token":
            sequence.output_token_ids.pop()
        case "fork":
            scheduler.fork(sequence, make_sequence(9, sequence.token_ids(0, len(sequence))))
        case "did not run":  # the step failed, and the state of the device is unknown
            assert scheduler.schedule() is first
    plan = run(scheduler)
    assert plan is not first and not plan.reused
    expected = {
        "arrives": [0, 1, 2, 9],
        "ends": [0, 2],
        "two tokens": [0, 2, 1],
        "no token": [0, 2],
        "fork": [0, 1, 2, 9],
        "did not run": [0, 1, 2],
    }
    assert ran(plan) == expected[what]


def test_a_queue_that_cannot_come_in_changes_nothing():
    scheduler, first = decoding(rows=3)
    scheduler.add(make_sequence(9, 3))
    assert run(scheduler) is first and len(scheduler.waiting) == 1
    scheduler.add(make_sequence(10, 3, priority=-1))
    assert run(scheduler) is not first, "it makes way for one of a higher priority"


def test_want_of_blocks_preempts_as_ever():
    scheduler, first = decoding(lengths=(6, 6, 6), blocks=7)
    assert first.entries[0].start == 6 and run(scheduler) is first
    plan = run(scheduler)
    assert plan is not first and [s.sequence_id for s in plan.preempted] == [2] and ran(plan) == [0, 1]


def test_keys_are_served_by_reused_steps():
    scheduler, _ = decoding()
    before = dict(scheduler.waiting._served)
    for _ in range(5):
        run(scheduler)
    assert scheduler.waiting._served[""] - before[""] == 15


def test_several_rounds_cross_more_borders():
    scheduler, plan = decoding(lengths=(5, 7, 8))
    for _ in range(3):
        plan = scheduler.schedule()
        assert scheduler.reserve(plan, 6) == 6
        before = [entry.start for entry in plan.entries]
        scheduler.advance(plan, 6)
        for entry in plan.entries:
            entry.sequence.output_token_ids += [7] * 6
        again = scheduler.schedule()
        crossed = [n for n, start in enumerate(before) if (start + 6) // 4 != start // 4]
        assert again is plan and again.reused and sorted(set(ran(type(plan)(again.changed)))) == crossed
        assert [entry.sequence.num_published for entry in plan.entries] == [entry.start // 4 for entry in plan.entries]


@pytest.mark.parametrize("accepted", [(0, 0, 0), (3, 0, 1), (2, 2, 2)])
def test_after_drafts_the_schedule_is_the_same_but_the_runner_lays_it_out_again(accepted):
    """Each sequence has advanced by its own count; nothing is scheduled from the start for that."""
    scheduler, first = decoding()
    assert run(scheduler) is first and first.reused
    plan = scheduler.schedule()
    starts = [entry.start for entry in plan.entries]
    drafted = add_drafts(scheduler, plan, {entry.sequence.sequence_id: [7, 7, 7] for entry in plan.entries})
    assert drafted is not plan and [len(entry.drafts) for entry in drafted.entries] == [3, 3, 3]
    scheduler.advance(drafted)
    for entry, count in zip(drafted.entries, accepted, strict=True):
        entry.sequence.output_token_ids += [7] * count + [8]
        count_confirmed(entry)
    after = run(scheduler)
    assert after is first and not after.reused
    assert [entry.start for entry in after.entries] == [start + count + 1 for start, count in zip(starts, accepted, strict=True)]
    for entry in after.entries:
        assert len(entry.sequence.block_table) >= scheduler.pool.blocks_for(entry.start + 1)
        assert entry.sequence.num_published == entry.start // 4, "found by others"
    starts = [entry.start for entry in after.entries]
    for turn in range(1, 6):
        assert run(scheduler) is first and first.reused and [entry.start for entry in first.entries] == [start + turn for start in starts]
        assert ran(type(first)(first.changed)) == [n for n, start in enumerate(starts) if (start + turn) % 4 == 0]


def test_a_step_with_drafts_that_did_not_run_is_scheduled_again():
    scheduler, first = decoding()
    add_drafts(scheduler, scheduler.schedule(), {1: [7]})
    plan = scheduler.schedule()
    assert plan is not first and [entry.start for entry in plan.entries] == [6, 8, 9] and not any(entry.drafts for entry in plan.entries)
