"""Requests that arrive together with one prefix: one computes it, the others are admitted after it."""

from __future__ import annotations

import pytest

from tests.scheduler.builders import all_free, make, make_sequence, ran, run
from tinyvllm.request import Status

COMMON = list(range(1000, 1400))  # 100 blocks of 4 tokens; 64 tokens are worth waiting for


def shared_prefix_lens(number: int, common: int = 96, own: int = 6, **options):
    return make_sequence(number, COMMON[:common] + [10 * number + i for i in range(own)], **options)


def crowd(budget: int = 256):
    return make(rows=8, budget=budget, longest=512, blocks=400, caching=True)


def computed(scheduler, steps: int) -> list[dict[int, int]]:
    """Tokens of each sequence by steps."""
    plans = []
    for _ in range(steps):
        plan = run(scheduler)
        plans.append({entry.sequence.sequence_id: entry.num_tokens for entry in plan.entries})
    return plans


def test_a_common_beginning_is_computed_once():
    scheduler = crowd()
    sequences = [shared_prefix_lens(n) for n in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    assert computed(scheduler, 2) == [{0: 102}, {0: 1, 1: 6, 2: 6, 3: 6}]
    assert [s.num_cached for s in sequences] == [0, 96, 96, 96] and scheduler.prefix.hits == 3 * 96
    assert sequences[1].block_table[:24] == sequences[0].block_table[:24], "shared, not copied"


def test_a_long_beginning_in_chunks_is_waited_for_to_its_end():
    scheduler = crowd(budget=100)
    for n in range(3):
        scheduler.add(shared_prefix_lens(n, common=400))
    plans = computed(scheduler, 5)
    assert plans[:4] == [{0: 100}] * 4, "what no other can use goes to the one that all wait for"
    assert plans[4] == {0: 6, 1: 6, 2: 6}


def test_others_pass_those_that_wait_for_a_beginning():
    scheduler = crowd(budget=100)
    for n in (0, 1):
        scheduler.add(shared_prefix_lens(n, common=400))
    scheduler.add(make_sequence(2, 5))
    assert computed(scheduler, 2)[1] == {0: 95, 2: 5} and len(scheduler.waiting) == 1, "counted, and not in the way"
    assert [s.sequence_id for s in scheduler.waiting] == [1] and scheduler.waiting.num_tokens == 406


@pytest.mark.parametrize("why", ["too little in common", "another salt", "none has the first block"])
def test_a_sequence_with_nothing_to_wait_for_is_admitted(why):
    scheduler = crowd()
    scheduler.add(shared_prefix_lens(0))
    scheduler.add(
        {
            "too little in common": lambda: shared_prefix_lens(1, common=60),
            "another salt": lambda: shared_prefix_lens(1, cache_salt="mine"),
            "none has the first block": lambda: make_sequence(1, COMMON[4:] + [5] * 6),
        }[why]()
    )
    assert sorted(computed(scheduler, 1)[0]) == [0, 1]


def test_none_waits_for_one_of_lower_rank():
    """Or an urgent prompt would wait for sequences that hold back the one that computes its prefix."""
    scheduler = crowd(budget=40)
    scheduler.add(shared_prefix_lens(0))
    run(scheduler)
    scheduler.add(shared_prefix_lens(1, priority=-1))
    assert 1 in ran(run(scheduler)) and not scheduler.waiting.num_deferred


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_leader_that_ends_leaves_it_to_the_next(reason):
    scheduler = crowd(budget=100)
    sequences = [shared_prefix_lens(n, common=400) for n in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    computed(scheduler, 2)
    assert scheduler.waiting.num_deferred == 2
    scheduler.finish(sequences[0], reason)
    plans = computed(scheduler, 6)
    assert plans[0] == {1: 100} and sequences[1].num_cached == (200 if reason == "abort" else 100), "what is broken is not found again"
    assert sequences[2].num_cached == 400
    for sequence in sequences[1:]:
        scheduler.finish(sequence, "abort")
    assert all_free(scheduler) and not scheduler.has_work()


def test_a_leader_that_is_preempted_leaves_it_to_the_first_that_comes():
    scheduler = make(rows=4, budget=100, longest=512, blocks=140, caching=True)
    sequences = [shared_prefix_lens(n, common=400, priority=1) for n in range(2)]
    for sequence in sequences:
        scheduler.add(sequence)
    computed(scheduler, 2)
    assert scheduler.waiting.num_deferred == 1
    scheduler.add(make_sequence(9, list(range(400)), priority=0))
    run(scheduler)
    assert sequences[0].status is Status.WAITING and sequences[0].num_preemptions == 1
    for _ in range(60):
        plan = run(scheduler)
        for entry in plan.entries:
            if len(entry.sequence.output_token_ids) == 8:
                scheduler.finish(entry.sequence, "length")
        if not scheduler.has_work():
            break
    assert not scheduler.has_work() and all_free(scheduler), "none waits for a leader that is gone"


def test_one_that_waits_for_a_beginning_can_end():
    scheduler = crowd(budget=100)
    sequences = [shared_prefix_lens(n, common=400, ttft_deadline_ms=50.0 if n == 2 else None) for n in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    computed(scheduler, 2)
    assert scheduler.waiting.num_deferred == 2
    scheduler.finish(sequences[1], "abort")
    scheduler.deadlines.clock.now += 1
    assert scheduler.schedule().expired == [sequences[2]] and len(scheduler.waiting) == scheduler.waiting.num_deferred == 0
