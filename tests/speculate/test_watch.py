"""Text that repeats nothing is looked at in few steps; what recurs is noticed, and a drafter that says no would have had no draft."""

from __future__ import annotations

import random

import pytest

from tests.speculate.texts import draft, random_tokens, sequence
from tinyvllm.request import RequestOptions, Sequence
from tinyvllm.scheduler import Scheduled
from tinyvllm.speculate.contexts import Trail, context_key
from tinyvllm.speculate.ngram import NgramDrafter
from tinyvllm.speculate.protocol import LookupDrafter
from tinyvllm.speculate.suffix import FIRST_MATCH, SuffixDrafter
from tinyvllm.speculate.watch import FIRST_LOOK, MAX_PAUSE, PAUSE, SECOND_LOOK, TRUST, Watch, tenant_of


class Answers(NgramDrafter):
    """Recurs where it is told, and counts the looks, by (sequence id, length of its output)."""

    def __init__(self, *lengths: int):
        super().__init__()
        self.lengths, self.looks = lengths, list[tuple[int, int]]()

    def recurs(self, sequence: Sequence, tenant: str, times: int = 1) -> bool:
        self.looks.append((sequence.sequence_id, len(sequence.output_token_ids)))
        return len(sequence.output_token_ids) in self.lengths


def decode(one: Sequence) -> Scheduled:
    return Scheduled(one, len(one) - 1, 1, 1)


def answers(watch: Watch, one: Sequence, count: int) -> list[int]:
    """The lengths of the output, up to `count` tokens, at which the sequence may get drafts."""
    found = []
    for length in range(1, count + 1):
        one.output_token_ids.append(length)
        if watch.recurring([decode(one)]):
            found.append(length)
    return found


def test_looks_in_vain_have_pauses_that_grow():
    drafter = Answers()
    watch, one = Watch(drafter), sequence([1, 2, 3])
    assert answers(watch, one, 70) == []
    assert [length for _, length in drafter.looks] == [FIRST_LOOK, SECOND_LOOK, 11, 20, 33, 49, 65]
    assert watch.pause == 11 == 65 + MAX_PAUSE - 70
    watch.forget(one)
    assert len(watch) == 0


def test_while_it_recurs_each_token_is_looked_at():
    watch, one = Watch(Answers(5, 6, 7, 11)), sequence([1, 2, 3])
    assert answers(watch, one, 7) == [5, 6, 7]
    assert answers(watch, one, 1) == [] and watch.pause == PAUSE


def test_after_an_accepted_draft_some_looks_say_yes():
    drafter = Answers()
    watch, one = Watch(drafter), sequence([1, 2, 3])
    answers(watch, one, 2)
    watch.trust(one)
    assert answers(watch, one, 10) == [*range(1, TRUST + 1)] and len(drafter.looks) == 2
    watch.trust(sequence([1], sequence_id=9))


def test_each_sequence_of_a_batch_has_its_own_pauses():
    drafter = Answers()
    watch, both = Watch(drafter), [sequence([1], [5], 0), sequence([2], [7] * 30, 1)]
    for _ in range(7):
        watch.recurring([decode(one) for one in both])
        for one in both:
            one.output_token_ids.append(0)
    assert drafter.looks == [(0, 1), (1, 30), (0, 5), (1, 36)] and watch.pause == 4


def test_what_recurs_is_looked_at_alone_until_others_are_due():
    """While one sequence of a batch recurs, a step examines that one."""

    class One(Answers):
        def recurs(self, sequence: Sequence, tenant: str, times: int = 1) -> bool:
            super().recurs(sequence, tenant, times)
            return sequence.sequence_id == 3

    drafter, many = One(), [sequence([1], [5] * 9, i) for i in range(6)]
    watch, decodes, looks = Watch(drafter), [decode(one) for one in many], []
    for step in range(PAUSE + 1):
        before = len(drafter.looks)
        assert watch.recurring(decodes, same=step > 0) == [many[3]]
        looks.append(len(drafter.looks) - before)
        for one in many:
            one.output_token_ids.append(0)
    assert looks == [6] + [1] * (PAUSE - 1) + [6]
    watch.recurring(decodes, same=False)
    watch.forget(many[3])
    assert watch.recurring(decodes, same=True) == []


def test_more_must_recur_in_a_large_batch():
    drafter, text = SuffixDrafter(first_match=4), [9, 1, 2, 3, 4, 5, 6, 7, 8]
    for end, few, many in ((4, False, False), (5, True, False), (8, True, False), (9, True, True)):
        one = sequence([*text, 0], text[1:end], end)
        assert (drafter.recurs(one, ""), drafter.recurs(one, "", 2)) == (few, many), end


def test_a_batch_that_sleeps_is_not_looked_at():
    drafter, sizes = Answers(), list[int]()

    def pause(num_sequences: int) -> int:
        sizes.append(num_sequences)
        return 50 if len(sizes) % 2 else 0

    watch, many = Watch(drafter, pause), [sequence([1], [5] * 9, i) for i in range(40)]
    decodes, looks = [decode(one) for one in many], list[int]()
    for step in range(51):
        before = len(drafter.looks)
        assert watch.recurring(decodes, same=step > 0) == []
        assert watch.pause == 50 - step or step == 50
        looks.append(len(drafter.looks) - before)
        for one in many:
            one.output_token_ids.append(0)
    assert looks == [0] * 50 + [40] and sizes == [40, 40]
    watch = Watch(Answers(), lambda num_sequences: 50)
    watch.recurring(decodes)
    assert watch.sleeps and len(watch) == 0
    watch.recurring(decodes[:2])
    assert len(watch) == 2, "few sequences do not sleep"


def test_a_large_batch_is_looked_at_in_few_steps():
    """Sequences that began at different steps soon have their looks together, one in 16 tokens; somewhat more often while they join."""
    drafter, rng = Answers(), random.Random(3)
    watch, many = Watch(drafter), [sequence([1], [5] * rng.randrange(6, 60), i) for i in range(128)]
    calls: list[int] = []
    for step in range(64):
        before = len(drafter.looks)
        watch.recurring([decode(one) for one in many[: 1 + 2 * step]])
        calls.append(len(drafter.looks) - before)
        for one in many:
            one.output_token_ids.append(0)
    assert len(drafter.looks) < sum(range(1, 128, 2)) / 5
    calls.clear()
    step = 0
    while step < 64:
        before = len(drafter.looks)
        watch.recurring([decode(one) for one in many])
        calls.append(len(drafter.looks) - before)
        for one in many:
            one.output_token_ids += [0] * watch.pause
        step += watch.pause
    assert calls[1:] == [128] * len(calls[1:]) and len(calls) <= 6 and watch.pause == MAX_PAUSE


def test_a_new_sequence_of_a_large_batch_has_its_first_looks():
    drafter = Answers()
    watch, many = Watch(drafter), [sequence([1], [5] * 9, i) for i in range(64)]
    many[0].output_token_ids.clear()
    for _ in range(8):
        watch.recurring([decode(one) for one in many])
        for one in many:
            one.output_token_ids.append(0)
    assert [length for number, length in drafter.looks if number == 0] == [FIRST_LOOK, SECOND_LOOK]


@pytest.mark.parametrize("drafter", [NgramDrafter(2), NgramDrafter(4, 2), SuffixDrafter(first_match=2), SuffixDrafter(first_match=4)])
def test_a_no_means_no_draft(drafter):
    """Of text that the drafter has learned; and where it is not yet, the draft would be of a shorter match than it wants."""
    assert isinstance(drafter, LookupDrafter)
    chance, answers = random.Random(4), set()
    for number in range(30):
        one = sequence(chance.choices(range(6), k=3), sequence_id=number)
        for _ in range(40):
            recurs = drafter.recurs(one, "")
            answers.add(recurs)
            assert recurs or not draft(drafter, one, 1).tokens
            one.output_token_ids.append(chance.randrange(2 + number))
        drafter.forget(one)  # past outputs are not learned: nothing is proposed after it
        drafter.outputs._pending.clear() if isinstance(drafter, SuffixDrafter) else None
    assert answers == {True, False}


@pytest.mark.parametrize("size", [4, 8])
def test_the_key_of_a_context_is_the_trails(size):
    tokens = random_tokens(30, 5)
    for end in range(size, len(tokens)):
        assert context_key(tokens[end - size : end]) in Trail(tokens[:end]).keys


def test_past_outputs_recur_for_their_tenant():
    """At the beginning of an answer eight tokens must match, as four may be the chat template's."""
    drafter, output, template = SuffixDrafter(first_match=FIRST_MATCH), random_tokens(40, 6), [1, 2, 3, 4]
    ended = sequence([*random_tokens(9, 7), *template], output, 0)
    assert not drafter.recurs(ended, "a")
    drafter.forget(ended)
    while drafter.learn_past(16):
        pass
    other = sequence([*random_tokens(9, 8), *template], output[:1], 1)
    assert not drafter.recurs(other, "a")
    same = sequence(ended.prompt_token_ids, output[:1], 2)
    assert drafter.recurs(same, "a") and not drafter.recurs(same, "b")
    other.output_token_ids += output[1:4]
    assert drafter.recurs(other, "a") and draft(drafter, other, 4, "a").tokens == output[4:8]


@pytest.mark.parametrize("drafter", [NgramDrafter(2), SuffixDrafter(first_match=2)])
def test_a_text_of_which_much_is_new_is_brought_up_to_date(drafter):
    """In small parts, whether or not it recurs."""
    one = sequence([7, 8, 9, 7, 8])
    assert drafter.recurs(one, "") and draft(drafter, one).tokens
    one.output_token_ids += random_tokens(64, 9)
    assert not drafter.recurs(one, "")
    one.output_token_ids.append(11)
    assert drafter.recurs(one, "")
    drafter.propose([])
    draft(drafter, one)
    assert not drafter.recurs(one, "")


def test_tenants_are_apart_by_salt_and_key():
    options = [RequestOptions(), RequestOptions(cache_salt="a"), RequestOptions(key="a"), RequestOptions(cache_salt="a", key="a")]
    sequences = [sequence([1]) for _ in options]
    for one, option in zip(sequences, options, strict=True):
        one.options = option
    assert len({tenant_of(one) for one in sequences}) == 4
