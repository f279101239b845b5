"""Forks of a computed prompt and of running beams: what they share, what is copied when, and which sequence waits for which."""

from __future__ import annotations

import pytest

from tests.scheduler.builders import all_free, make, make_sequence, ran, run
from tinyvllm.request import Status
from tinyvllm.scheduler import Schedule, Scheduled


def family(scheduler, tokens: int, count: int, first: int = 0, **options):
    sequences = [make_sequence(first + i, tokens, **options) for i in range(count)]
    scheduler.add(sequences[0], sequences[1:])
    return sequences


def test_a_prompt_is_computed_once_for_all_its_continuations():
    scheduler = make(blocks=8, size=4)
    parent, child, other = family(scheduler, 10, 3)
    plan = run(scheduler)
    assert ran(plan) == [0] and plan.num_tokens == 10
    assert child.status is Status.RUNNING and child.num_computed == 9, "the last token is computed again, for its own draw"
    assert child.block_table[:2] == other.block_table[:2] == parent.block_table[:2] and scheduler.pool.num_free == 3
    assert len({parent.block_table[2], child.block_table[2], other.block_table[2]}) == 3
    plan = run(scheduler)
    assert sorted(plan.copies) == sorted((parent.block_table[2], s.block_table[2]) for s in (child, other)) and ran(plan) == [0, 1, 2]
    assert run(scheduler).copies == []
    for sequence in (parent, other, child):
        scheduler.finish(sequence, "stop")
    scheduler.schedule()
    assert all_free(scheduler)


def test_a_prompt_that_ends_with_a_block_is_copied_too():
    """The child computes the last token again, and the block that holds it is the parent's."""
    scheduler = make(size=4)
    parent, child = family(scheduler, 8, 2)
    run(scheduler)
    assert child.num_computed == 7 and child.block_table[0] == parent.block_table[0] and child.block_table[1] != parent.block_table[1]


def test_continuations_without_rows_wait_and_compute_for_themselves():
    scheduler = make(rows=2, caching=True)
    parent, child, late = family(scheduler, 10, 3)
    run(scheduler)
    assert child.status is Status.RUNNING and list(scheduler.waiting) == [late]
    scheduler.finish(child, "stop")
    plan = run(scheduler)
    assert [(e.sequence.sequence_id, e.start) for e in plan.entries] == [(0, 10), (2, 8)], "its blocks are found"


@pytest.mark.parametrize("reason", ["abort", "length", "deadline"])
def test_continuations_of_one_that_ended_before_its_prompt_was_computed_compute_it_themselves(reason: str):
    scheduler = make(budget=6)
    parent, child, other = family(scheduler, 10, 3)
    run(scheduler)
    scheduler.finish(parent, reason)
    assert list(scheduler.waiting) == [child, other]
    run(scheduler)
    run(scheduler)
    assert child.num_computed == 10 and not child.finished
    scheduler.finish(other, "abort")
    scheduler.finish(child, "stop")
    assert all_free(scheduler) and not scheduler.has_work()


def test_a_continuation_may_end_before_there_is_anything_to_fork():
    scheduler = make(budget=6)
    parent, child, other = family(scheduler, 10, 3)
    run(scheduler)
    scheduler.finish(child, "abort")
    run(scheduler)
    assert scheduler.running == [parent, other] and child.finish_reason == "abort"


def test_a_parent_that_is_preempted_still_forks_when_it_comes_back():
    scheduler = make(budget=8, blocks=6, size=4)
    older = make_sequence(0, 3)
    scheduler.add(older)
    run(scheduler)
    parent, child = family(scheduler, 14, 2, first=1)
    assert run(scheduler).num_tokens == 8
    older.output_token_ids += [7] * 14
    assert [run(scheduler).preempted for _ in range(2)] == [[], [parent]]
    scheduler.finish(older, "stop")
    run(scheduler)
    run(scheduler)
    assert child.num_computed == 13 and child.status is Status.RUNNING


def test_a_fork_that_ends_before_its_copy_takes_the_copy_with_it():
    """Or the copy would come into a block that is another's by then."""
    scheduler = make(size=4)
    parent, child = family(scheduler, 10, 2)
    run(scheduler)
    scheduler.finish(child, "abort")
    plan = run(scheduler)
    assert plan.copies == []
    scheduler.finish(parent, "stop")
    assert all_free(scheduler)


def test_what_is_to_be_copied_is_not_given_away_before():
    """Its owner ends with its first token; what comes back from the host in the same step moves before the copies."""
    scheduler = make(rows=3, blocks=7, size=4, hosted=8, preemption="swap")
    older = make_sequence(0, 3)
    scheduler.add(older)
    run(scheduler)
    parent, child = family(scheduler, 10, 2, first=1)
    swapped = make_sequence(9, 6)
    swapped.host_table, swapped.num_swapped = scheduler.host.allocate(2), 5
    run(scheduler)
    scheduler.finish(parent, "stop")
    scheduler.finish(older, "stop")
    scheduler.add(swapped)
    plan = scheduler.schedule()
    assert ran(plan) == [2, 9] and len(plan.swap_in) == 2
    ((source, target),) = plan.copies
    assert target == child.block_table[2] and source not in {block for _, block in plan.swap_in}
    assert source not in swapped.block_table and scheduler.pool.reference_count(source) == 1
    scheduler.advance(plan)
    scheduler.schedule()
    assert scheduler.pool.reference_count(source) == 0


def test_a_fork_that_is_swapped_out_before_its_copy_takes_what_was_to_be_copied():
    scheduler = make(rows=3, blocks=6, size=4, hosted=8, preemption="swap")
    parent, child = family(scheduler, 10, 2)
    run(scheduler)
    source = parent.block_table[2]
    parent.output_token_ids += [7] * 11  # 22 tokens: 6 blocks, and the child holds one
    plan = scheduler.schedule()
    assert plan.preempted == [child] and plan.copies == []
    assert [block for block, _ in plan.swap_out] == [*parent.block_table[:2], source]
    assert scheduler.pool.reference_count(source) == 1


def test_a_fork_of_a_fork_before_its_copy_copies_from_its_source():
    scheduler = make(size=4)
    parent, child = family(scheduler, 10, 2)
    run(scheduler)
    grandchild = make_sequence(5, 10)
    scheduler.fork(child, grandchild)
    plan = scheduler.schedule()
    assert {source for source, _ in plan.copies} == {parent.block_table[2]} and len(plan.copies) == 2


# ---- beams: each waits until all have been heard ----


def beams(scheduler, tokens: int, count: int):
    """Sequences that have computed all that they know: heard, with nothing to do."""
    sequences = [make_sequence(i, tokens) for i in range(count)]
    for sequence in sequences:
        scheduler.add(sequence)
    while any(s.num_computed < len(s) for s in sequences):
        scheduler.advance(scheduler.schedule())
    return sequences


def test_a_sequence_with_nothing_to_compute_keeps_its_place_and_takes_no_tokens():
    scheduler = make()
    first, second = beams(scheduler, 6, 2)
    third = make_sequence(2, 5)
    scheduler.add(third)
    assert ran(run(scheduler)) == [2] and scheduler.running == [first, second, third]
    second.output_token_ids.append(7)
    assert ran(run(scheduler)) == [1, 2]


def heard_until(scheduler, wanted, steps: int = 20) -> None:
    """Steps whose tokens are not appended, as while beams wait."""
    for _ in range(steps):
        if wanted():
            return
        scheduler.advance(scheduler.schedule())
    raise AssertionError("the sequence that all others wait for is not admitted")


def test_beams_that_do_not_fit_together_make_way_for_the_one_that_all_wait_for():
    """Two beams of 3 blocks in 4: one is heard, goes, and does not come in again before the other has been heard."""
    scheduler = make(blocks=4, size=4)
    first, second = (make_sequence(i, 10) for i in range(2))
    scheduler.add(first)
    scheduler.advance(scheduler.schedule())
    scheduler.add(second)
    heard_until(scheduler, lambda: second.num_computed == 10)
    assert first.status is Status.WAITING and first.num_computed == 0 and scheduler.has_work()
    assert scheduler.waiting.num_tokens == 0
    first.output_token_ids.append(7)
    second.output_token_ids.append(7)
    heard: set[int] = set()

    def both() -> bool:
        heard.update(s.sequence_id for s in (first, second) if s.num_computed == 11)
        return len(heard) == 2

    heard_until(scheduler, both)
    scheduler.finish(first, "stop")
    scheduler.finish(second, "stop")
    assert all_free(scheduler) and not scheduler.has_work() and scheduler.waiting.num_tokens == 0


def test_a_paused_beam_can_end_and_be_a_parent():
    scheduler = make(blocks=4, size=4)
    first, second = (make_sequence(i, 10) for i in range(2))
    scheduler.add(first)
    scheduler.advance(scheduler.schedule())
    scheduler.add(second)
    heard_until(scheduler, lambda: second.num_computed == 10)
    child = make_sequence(2, 10, output=1)
    scheduler.fork(first, child)
    assert child.status is Status.WAITING and list(scheduler.waiting) == [child], "nothing of its parent is there to share"
    scheduler.finish(first, "stop")
    scheduler.finish(second, "stop")
    heard_until(scheduler, lambda: child.num_computed == 11)
    scheduler.finish(child, "stop")
    assert all_free(scheduler) and not scheduler.has_work()


def test_forks_come_under_the_deadline_of_their_parent():
    scheduler = make()
    parent = make_sequence(0, 6, deadline_ms=1000.0)
    scheduler.add(parent)
    scheduler.advance(scheduler.schedule())
    child = make_sequence(1, 6, output=1, deadline_ms=1000.0)
    scheduler.fork(parent, child)
    scheduler.finish(parent, "stop")
    scheduler.deadlines.clock.now += 1.5
    assert scheduler.schedule().expired == [child] and all_free(scheduler) and not scheduler.deadlines


def test_forks_in_a_step_of_several_rounds_share_the_prompt_alone():
    scheduler = make(size=4)
    parent, child = family(scheduler, 1, 2)
    plan = scheduler.schedule()
    assert scheduler.reserve(plan, 4) == 4
    scheduler.advance(plan, 4)
    assert child.num_computed == 0 and parent.num_computed == 4
    parent.output_token_ids += [7] * 4
    assert scheduler.follow(Schedule([Scheduled(parent, 0, 1, 1)])) is None, "a forked sequence runs as well now"
