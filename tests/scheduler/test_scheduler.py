"""Which sequences run, with how many tokens, in which blocks: the scheduler's rules one by one. test_machine.py has all of them at once."""

from __future__ import annotations

import random

import pytest

from tests.scheduler.builders import run
from tinyvllm.cache.blocks import BlockPool
from tinyvllm.errors import ArgumentError, RequestError
from tinyvllm.request import SamplingParams, Sequence, Status
from tinyvllm.scheduler import Schedule, Scheduler, SchedulerLimits

PARAMS = SamplingParams()


def make(rows: int = 4, budget: int = 16, longest: int = 64, blocks: int = 32, size: int = 4) -> Scheduler:
    return Scheduler(SchedulerLimits(rows, budget, longest), BlockPool(blocks, size))


def make_sequence(number: int, tokens: int) -> Sequence:
    return Sequence(number, f"r{number}", list(range(tokens)), PARAMS)


def add(scheduler: Scheduler, *lengths: int) -> list[Sequence]:
    sequences = [make_sequence(number, tokens) for number, tokens in enumerate(lengths)]
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


def rows_of(plan: Schedule) -> list[tuple[int, int, int, int]]:
    return [(entry.sequence.sequence_id, entry.start, entry.num_tokens, entry.num_logits) for entry in plan.entries]


# ---- add ----


def test_refuses_a_prompt_beyond_the_context():
    scheduler = make(longest=8)
    add(scheduler, 7)
    with pytest.raises(RequestError, match="prompt has 8 tokens, max_model_len=8 allows at most 7"):
        scheduler.add(make_sequence(1, 8))
    assert len(scheduler.waiting) == 1


def test_refuses_a_prompt_beyond_the_whole_cache():
    scheduler = make(blocks=3, size=4)
    add(scheduler, 11)
    with pytest.raises(RequestError, match="prompt of 12 tokens and one more need 4 KV blocks, the cache has 3 of 4 tokens"):
        scheduler.add(make_sequence(1, 12))
    assert len(scheduler.waiting) == 1


def test_refuses_an_empty_prompt():
    scheduler = make()
    with pytest.raises(RequestError, match="empty"):
        scheduler.add(make_sequence(0, 0))
    assert not scheduler.has_work()


@pytest.mark.parametrize(
    ("limits", "name"), [((0, 8, 8), "max_num_seqs"), ((4, 3, 8), "max_batched_tokens=3"), ((1, 1, 1), "max_model_len")]
)
def test_refuses_limits_that_contradict(limits: tuple[int, int, int], name: str):
    with pytest.raises(ArgumentError, match=name):
        SchedulerLimits(*limits)


# ---- one step ahead ----


def ahead(scheduler: Scheduler) -> Schedule:
    """A step of decodes that has been advanced and whose tokens were not read."""
    plan = scheduler.schedule()
    assert all(entry.num_tokens == 1 for entry in plan.entries)
    scheduler.advance(plan)
    return plan


def test_a_step_of_decodes_is_followed_without_its_tokens():
    scheduler = make(size=4)
    sequences = add(scheduler, 3, 2)
    run(scheduler)
    plan = ahead(scheduler)
    following = scheduler.follow(plan)
    assert following is not None and rows_of(following) == [(0, 4, 1, 1), (1, 3, 1, 1)]
    assert [len(sequence.block_table) for sequence in sequences] == [2, 1], "a block for the token after the boundary"
    scheduler.advance(following)
    for sequence in sequences:
        sequence.output_token_ids += [7, 7]
    assert rows_of(scheduler.schedule()) == [(0, 5, 1, 1), (1, 4, 1, 1)]


def test_steps_ahead_do_not_keep_out_what_could_be_admitted():
    scheduler = make(rows=2)
    add(scheduler, 3)
    run(scheduler)
    plan = ahead(scheduler)
    scheduler.add(make_sequence(1, 3))
    assert scheduler.follow(plan) is None, "a row is free"
    full = make(rows=1)
    add(full, 3, 3)
    run(full)
    assert full.follow(ahead(full)) is not None, "none could be admitted"


@pytest.mark.parametrize("reason", ["ended", "blocks", "longest"])
def test_what_must_be_looked_at_is_not_followed(reason: str):
    scheduler = make(rows=2, longest=6 if reason == "longest" else 64, blocks=2 if reason == "blocks" else 32, size=4)
    sequences = add(scheduler, 3, 3) if reason != "longest" else add(scheduler, 4)
    run(scheduler)
    plan = ahead(scheduler)
    if reason == "ended":
        scheduler.finish(sequences[0], "abort")
    assert scheduler.follow(plan) is None
    assert sum(len(sequence.block_table) for sequence in sequences) + scheduler.pool.num_free == scheduler.pool.num_blocks


# ---- which sequences run ----


def test_decodes_in_groups_for_steps_in_flight():
    """With a step in flight its sequences are passed over, and none is preempted, also where the cache is too small for all."""
    scheduler = make(rows=5, budget=40, blocks=11, size=4)
    sequences = add(scheduler, *[7] * 5)
    run(scheduler)
    scheduler.groups = 2
    first = scheduler.schedule()
    scheduler.advance(first)
    scheduler.in_flight = 1
    second = scheduler.schedule()
    scheduler.advance(second)
    assert [len(plan.entries) for plan in (first, second)] == [3, 2]
    assert {entry.sequence for plan in (first, second) for entry in plan.entries} == {*sequences}
    scheduler.pool.allocate(1)
    for sequence in sequences:
        sequence.output_token_ids.append(1)
    assert scheduler.schedule().empty, "each needs a block"
    scheduler.in_flight = 0
    assert scheduler.schedule().preempted


def test_nothing_to_do():
    plan = make().schedule()
    assert plan.empty and plan.num_tokens == 0


def test_a_prompt_then_one_token_a_step():
    scheduler = make()
    (sequence,) = add(scheduler, 6)
    assert sequence.row == -1 and scheduler.has_work()
    plan = run(scheduler)
    assert rows_of(plan) == [(0, 0, 6, 1)] and plan.num_tokens == 6
    assert sequence.status is Status.RUNNING and sequence.row == 0 and sequence.num_computed == 6 and len(sequence.block_table) == 2
    plan = run(scheduler)
    assert rows_of(plan) == [(0, 6, 1, 1)] and not plan.empty
    run(scheduler)
    assert len(sequence.block_table) == 2  # token 7 fills the second block
    run(scheduler)
    assert len(sequence.block_table) == 3


def test_long_prompts_come_in_chunks_and_only_the_last_samples():
    scheduler = make(budget=10)
    (sequence,) = add(scheduler, 25)
    plan = run(scheduler)
    assert rows_of(plan) == [(0, 0, 10, 0)] and len(sequence.block_table) == 3  # blocks for this chunk, not for the prompt
    assert rows_of(run(scheduler)) == [(0, 10, 10, 0)]
    assert rows_of(run(scheduler)) == [(0, 20, 5, 1)]
    assert rows_of(run(scheduler)) == [(0, 25, 1, 1)]


def test_a_chunk_of_one_token_is_no_decode():
    scheduler = make(rows=1, budget=1)
    add(scheduler, 2)
    assert rows_of(run(scheduler)) == [(0, 0, 1, 0)]
    assert rows_of(run(scheduler)) == [(0, 1, 1, 1)]


def test_decodes_then_the_running_prefill_then_the_queue():
    scheduler = make(budget=8)
    add(scheduler, 3, 14, 2, 1)
    assert rows_of(run(scheduler)) == [(0, 0, 3, 1), (1, 0, 5, 0)]
    assert rows_of(run(scheduler)) == [(0, 3, 1, 1), (1, 5, 5, 0), (2, 0, 2, 1)], "a quarter is left to waiting ones"
    # The single token of sequence 3 counts among the decodes: a step that holds nothing else fits a captured decode.
    assert rows_of(run(scheduler)) == [(0, 4, 1, 1), (2, 2, 1, 1), (3, 0, 1, 1), (1, 10, 4, 1)]
    assert rows_of(run(scheduler)) == [(0, 5, 1, 1), (1, 14, 1, 1), (2, 3, 1, 1), (3, 1, 1, 1)]


def test_a_short_prompt_does_not_wait_for_all_long_ones_before_it():
    scheduler = make(budget=16, longest=256, blocks=200)
    add(scheduler, 200, 200, 200, 3)
    steps = 0
    while not any(s.output_token_ids for s in scheduler.running):
        plan, steps = run(scheduler), steps + 1
        assert sum(tokens for _, _, tokens, _ in rows_of(plan)) == 16, "the whole budget is used"
    assert steps == 4 and scheduler.running[3].output_token_ids


def test_unclaimed_tokens_go_to_the_long_prompt():
    scheduler = make(rows=2, budget=16, longest=256, blocks=20, size=8)
    add(scheduler, 150, 150)
    assert rows_of(run(scheduler)) == [(0, 0, 16, 0)]
    assert rows_of(run(scheduler)) == [(0, 16, 16, 0)], "the second has no room for its blocks"


def test_a_younger_decode_comes_before_an_older_chunk():
    scheduler = make(budget=8)
    first, _ = add(scheduler, 3, 2)
    run(scheduler)
    first.output_token_ids += [7] * 5  # as a speculator would: six tokens to compute
    assert rows_of(run(scheduler)) == [(1, 2, 1, 1), (0, 3, 6, 1)]


def test_chunks_share_what_decodes_leave_and_the_younger_may_get_nothing():
    scheduler = make(rows=4, budget=6)
    sequences = add(scheduler, 1, 1, 1, 1)
    run(scheduler)
    for sequence in sequences[:3]:
        sequence.output_token_ids += [7] * 3
    assert rows_of(run(scheduler)) == [(3, 1, 1, 1), (0, 1, 4, 1), (1, 1, 1, 0)]


def test_admission_is_first_come_first_served():
    scheduler = make(rows=4, budget=16, blocks=8, size=4)
    add(scheduler, 15, 20, 2)
    run(scheduler)
    # Sequence 1 wants 5 blocks and one to spare, 4 are free. Sequence 2 would fit, and waits after it.
    assert rows_of(run(scheduler)) == [(0, 15, 1, 1)]
    assert [sequence.sequence_id for sequence in scheduler.waiting] == [1, 2]


def test_admission_wants_the_whole_prompt_and_one_block_to_spare():
    for blocks, admitted in ((6, [0]), (7, [0, 1])):  # 2 of sequence 0, 4 of sequence 1, and 1
        scheduler = make(budget=16, blocks=blocks, size=4)
        add(scheduler, 8, 16)
        assert [entry.sequence.sequence_id for entry in scheduler.schedule().entries] == admitted


def test_alone_it_needs_no_block_to_spare():
    scheduler = make(budget=16, blocks=2, size=4)
    (sequence,) = add(scheduler, 7)
    run(scheduler)
    assert sequence.num_computed == 7 and scheduler.pool.num_free == 0


def test_rows_are_given_lowest_first_and_come_back():
    scheduler = make(rows=3, budget=16)
    a, b, c, d, e = add(scheduler, 1, 1, 1, 1, 1)
    run(scheduler)
    assert [sequence.row for sequence in (a, b, c, d, e)] == [0, 1, 2, -1, -1]
    scheduler.finish(b, "stop")
    scheduler.finish(a, "stop")
    assert a.row == b.row == -1
    run(scheduler)
    assert [sequence.row for sequence in (c, d, e)] == [2, 0, 1]


# ---- finish ----


def test_finish_frees_at_once_and_keeps_the_first_reason():
    scheduler = make(blocks=4)
    a, _ = add(scheduler, 6, 15)
    run(scheduler)
    scheduler.finish(a, "stop")
    scheduler.finish(a, "abort")
    assert a.finish_reason == "stop" and a.finished and a.block_table == [] and a.row == -1
    assert scheduler.pool.num_free == 4 and scheduler.running == []
    assert rows_of(run(scheduler)) == [(1, 0, 15, 1)]


def test_abort_while_waiting():
    scheduler = make(rows=1)
    a, b, c = add(scheduler, 2, 2, 2)
    run(scheduler)
    scheduler.finish(b, "abort")
    assert list(scheduler.waiting) == [c] and scheduler.running == [a] and b.finish_reason == "abort"


def test_abort_between_schedule_and_advance():
    scheduler = make()
    a, b = add(scheduler, 3, 3)
    plan = scheduler.schedule()
    scheduler.finish(a, "abort")
    scheduler.advance(plan)
    assert a.num_computed == 0 and b.num_computed == 3
    scheduler.finish(b, "abort")
    assert scheduler.pool.num_free == scheduler.pool.num_blocks and not scheduler.has_work()


def test_a_block_that_another_holds_outlives_its_sequence():
    scheduler = make(blocks=4)
    (sequence,) = add(scheduler, 6)
    run(scheduler)
    kept = sequence.block_table[:1]
    scheduler.pool.share(kept)
    scheduler.finish(sequence, "stop")
    assert scheduler.pool.num_free == 3 and scheduler.pool.reference_count(kept[0]) == 1


# ---- blocks run out ----


def test_the_youngest_is_preempted_keeps_its_output_and_comes_back_first():
    scheduler = make(rows=4, budget=16, blocks=5, size=4)
    a, b, c = add(scheduler, 7, 3, 8)
    assert rows_of(run(scheduler)) == [(0, 0, 7, 1), (1, 0, 3, 1)]  # 3 blocks; c needs the other 2, and one to spare
    for _ in range(2):
        run(scheduler)
    assert (len(a.block_table), len(b.block_table), scheduler.pool.num_free) == (3, 2, 0)
    while len(a) <= 12:
        assert run(scheduler).preempted == []
    plan = run(scheduler)  # a's 13th token
    assert plan.preempted == [b] and rows_of(plan) == [(0, 12, 1, 1)]
    assert b.status is Status.WAITING and b.block_table == [] and b.num_computed == 0 and b.num_preemptions == 1 and b.row == -1
    assert list(scheduler.waiting) == [b, c] and len(b.output_token_ids) == 6
    scheduler.finish(a, "stop")
    assert rows_of(run(scheduler)) == [(1, 0, 9, 1)]  # prompt and output in one go
    assert len(b.output_token_ids) == 7


def test_several_preempted_keep_their_order():
    scheduler = make(rows=4, budget=64, blocks=6, size=4)
    a, b, c = add(scheduler, 4, 4, 4)
    run(scheduler)
    a.output_token_ids += [7] * 15  # a needs 4 blocks more and 3 are free: c goes; then b needs one, and goes itself
    plan = scheduler.schedule()
    assert plan.preempted == [c, b] and rows_of(plan) == [(0, 4, 16, 1)]
    assert list(scheduler.waiting) == [b, c] and scheduler.running == [a]


def test_the_last_in_rank_preempts_itself_for_a_block():
    scheduler = make(rows=2, budget=16, blocks=4, size=4)
    a, b = add(scheduler, 5, 4)
    run(scheduler)
    a.output_token_ids += [7] * 3
    run(scheduler)  # a grows to 3 blocks (9 tokens), b to none: its 5th token finds no block
    assert b.num_preemptions == 1 and a.num_preemptions == 0
    assert list(scheduler.waiting) == [b] and scheduler.running == [a]


def test_none_is_admitted_in_a_step_that_preempts():
    scheduler = make(rows=4, budget=64, blocks=10, size=4)
    a, b, c = add(scheduler, 4, 16, 4)
    run(scheduler)
    a.output_token_ids += [7] * 19  # 6 blocks: c goes
    b.output_token_ids += [7] * 30  # outgrows the cache and leaves 4 blocks, where c would fit again
    plan = scheduler.schedule()
    assert plan.preempted == [c] and plan.exhausted == [b] and rows_of(plan) == [(0, 4, 20, 1)]
    assert list(scheduler.waiting) == [c] and scheduler.pool.num_free == 4
    scheduler.advance(plan)
    a.output_token_ids.append(7)
    scheduler.finish(a, "stop")
    assert rows_of(run(scheduler)) == [(2, 0, 5, 1)]


def test_alone_and_out_of_blocks_it_is_finished_and_reported():
    scheduler = make(rows=2, budget=16, blocks=2, size=4)
    a, _ = add(scheduler, 7, 3)
    run(scheduler)
    run(scheduler)
    plan = scheduler.schedule()
    assert plan.exhausted == [a] and a.finish_reason == "length" and a.finished and a.block_table == []
    assert rows_of(plan) == [(1, 0, 3, 1)]  # its blocks serve the next in the same step


def test_what_outgrew_the_cache_preempts_none():
    scheduler = make(rows=2, budget=64, blocks=4, size=4)
    a, _ = add(scheduler, 4, 3)
    run(scheduler)
    a.output_token_ids += [7] * 15
    plan = scheduler.schedule()
    assert plan.exhausted == [a] and plan.preempted == [] and rows_of(plan) == [(1, 3, 1, 1)]


def test_what_outgrew_the_cache_while_waiting_does_not_block_the_queue():
    scheduler = make(rows=2, budget=16, blocks=4, size=4)
    a, _ = add(scheduler, 4, 3)
    a.output_token_ids += [7] * 13
    plan = scheduler.schedule()
    assert plan.exhausted == [a] and rows_of(plan) == [(1, 0, 3, 1)]


def test_alone_with_blocks_held_elsewhere_it_is_finished_not_hung():
    scheduler = make(rows=2, budget=16, blocks=2, size=4)
    scheduler.pool.allocate(1)
    (sequence,) = add(scheduler, 4)
    run(scheduler)
    plan = scheduler.schedule()
    assert plan.exhausted == [sequence] and plan.empty and not scheduler.has_work()
    (sequence,) = add(scheduler, 7)
    plan = scheduler.schedule()
    assert plan.exhausted == [sequence] and plan.empty


# ---- what the caller may get wrong ----


def test_a_sequence_without_a_token_to_compute_is_passed_over():
    scheduler = make()
    (sequence,) = add(scheduler, 3)
    scheduler.advance(scheduler.schedule())
    assert scheduler.schedule().empty and scheduler.running == [sequence]
    sequence.output_token_ids.append(7)
    assert rows_of(scheduler.schedule()) == [(0, 3, 1, 1)]


def test_advancing_twice_is_an_assertion():
    scheduler = make()
    add(scheduler, 3)
    plan = scheduler.schedule()
    scheduler.advance(plan)
    with pytest.raises(AssertionError, match="advanced twice"):
        scheduler.advance(plan)


def test_a_step_that_failed_is_scheduled_again():
    scheduler = make(budget=8)
    add(scheduler, 3, 14)
    assert rows_of(scheduler.schedule()) == rows_of(scheduler.schedule()) == [(0, 0, 3, 1), (1, 0, 5, 0)]


# ---- several rounds ----


def decoding(scheduler: Scheduler, *lengths: int) -> Schedule:
    """A schedule of these sequences with a token each: their prompts have run."""
    add(scheduler, *lengths)
    while (plan := scheduler.schedule()).entries and not all(entry.num_tokens == entry.num_logits == 1 for entry in plan.entries):
        scheduler.advance(plan)
        for entry in plan.entries:
            if entry.num_logits:
                entry.sequence.output_token_ids.append(7)
    return plan


@pytest.mark.parametrize(
    ("lengths", "blocks", "wanted", "given", "tables"),
    [
        ((2,), 32, 1, 1, [1]),  # position 2 has its block
        ((2,), 32, 2, 2, [1]),  # positions 2 and 3
        ((2,), 32, 3, 3, [2]),
        ((2, 7), 32, 8, 8, [3, 4]),
        ((2, 7), 7, 8, 8, [3, 4]),  # just enough
        ((2, 7), 5, 8, 5, [2, 3]),
        ((3, 7), 4, 8, 1, [1, 2]),  # the one that needs a block at once
    ],
)
def test_reserve_gives_blocks_for_as_many_rounds_as_there_are(lengths, blocks, wanted, given, tables):
    scheduler = make(blocks=blocks, size=4)
    plan = decoding(scheduler, *lengths)
    assert scheduler.reserve(plan, wanted) == given
    held = [len(entry.sequence.block_table) for entry in plan.entries]
    assert held == tables and scheduler.pool.num_free == blocks - sum(held)
    for entry in plan.entries:
        assert (entry.start + given - 1) // 4 < len(entry.sequence.block_table)
    assert not plan.preempted and not any(sequence.num_preemptions for sequence in scheduler.running)


def test_rounds_advance_by_as_many_tokens():
    scheduler = make(size=4)
    plan = decoding(scheduler, 2, 7)
    assert scheduler.reserve(plan, 6) == 6
    scheduler.finish(plan.entries[1].sequence, "abort")
    scheduler.advance(plan, 6)
    first = plan.entries[0].sequence
    assert first.num_computed == 8 and plan.entries[1].sequence.num_computed == 0
    first.output_token_ids += [7] * 6
    assert rows_of(scheduler.schedule()) == [(0, 8, 1, 1)] and len(first.block_table) == 3


@pytest.mark.parametrize("seed", range(6))
def test_random_reserves_give_what_no_other_has(seed: int):
    """Never a block too few for the rounds given, none given twice; all that was asked for, or at least an equal share of what is free."""
    rng = random.Random(seed)
    for _ in range(60):
        size, blocks, count = rng.randint(1, 6), rng.randint(4, 30), rng.randint(1, 5)
        scheduler = make(rows=count, budget=64, longest=200, blocks=blocks, size=size)
        plan = decoding(scheduler, *(rng.randint(1, max(1, size * blocks // count - size)) for _ in range(count)))
        if plan.empty:
            continue
        wanted = rng.randint(1, 20)
        free, left = scheduler.pool.num_free, min(len(entry.sequence.block_table) * size - entry.start for entry in plan.entries)
        needed = sum(scheduler.pool.blocks_for(entry.start + wanted) - len(entry.sequence.block_table) for entry in plan.entries)
        given = scheduler.reserve(plan, wanted)
        assert 1 <= given <= wanted
        tables = [block for sequence in scheduler.running for block in sequence.block_table]
        assert len(set(tables)) == len(tables) and scheduler.pool.num_free + len(tables) == blocks
        assert all(entry.start + given <= len(entry.sequence.block_table) * size for entry in plan.entries)
        assert given == wanted if needed <= free else given >= min(wanted, left + free // len(plan.entries) * size)
