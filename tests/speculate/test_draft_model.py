"""The draft model by itself: its drafts are its own continuation of the text, whatever was accepted before, and its blocks are bounded."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.speculate.texts import draft, random_tokens, sequence
from tinyvllm.config.engine import EngineConfig
from tinyvllm.request import SamplingParams, Sequence
from tinyvllm.speculate.draft_model import MAX_ROWS, DraftModelDrafter
from tinyvllm.speculate.protocol import DraftRequest

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=5)


@pytest.fixture(scope="module")
def runner(draft_folder):
    from tinyvllm.runner.runner import Runner

    return Runner(EngineConfig(model=str(draft_folder), num_blocks=24, max_num_seqs=4, max_model_len=128), "CPU")


@pytest.fixture(scope="module")
def another(draft_folder):
    """The same model with other blocks."""
    from tinyvllm.runner.runner import Runner

    return Runner(EngineConfig(model=str(draft_folder), num_blocks=24, max_num_seqs=4, max_model_len=128), "CPU")


@pytest.fixture
def drafter(runner, another):
    made = DraftModelDrafter(runner, 4, max_tokens=64)
    made.reference = DraftModelDrafter(another, 4)
    yield made
    assert made.num_free_blocks + sum(len(copy.block_table) for copy in made._copies.values()) == runner.pool.num_blocks


def story(number: int, length: int, params: SamplingParams = GREEDY) -> Sequence:
    """A sequence with a prompt of random tokens."""
    made = sequence(random_tokens(length, number, 3000), sequence_id=number)
    made.params = replace(params, seed=number) if params.seed is not None else params
    return made


def fresh(drafter: DraftModelDrafter, text: Sequence, count: int) -> list[int]:
    """The drafts for a text of a drafter that has not had it before, and has no prefix of it."""
    drafter = drafter.reference
    drafter._prefix.reset()
    other = sequence(text.prompt_token_ids, text.output_token_ids, 1000 + text.sequence_id)
    other.params = text.params
    while not (tokens := draft(drafter, other, count).tokens):
        pass
    drafter.forget(other)
    return tokens


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_are_its_own_continuation(drafter, params):
    """One draft at a time, each accepted, are the drafts of one call."""
    text = story(1, 20, params)
    while not (first := draft(drafter, text, 6).tokens):
        pass
    for expected in first:
        assert draft(drafter, text, 1).tokens == [expected]
        text.output_token_ids.append(expected)
    assert len(first) == 6


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_whatever_was_accepted_the_drafts_are_those_of_the_text(drafter, params):
    """Accepted drafts stay in the cache, rejected ones are overwritten; several sequences, with pauses, in any combination."""
    rng = random.Random(4)
    texts = [story(number, 5 + 7 * number, params) for number in range(3)]
    for _ in range(14):
        chosen = [text for text in texts if rng.random() < 0.7]
        requests = [DraftRequest(text, rng.choice((1, 2, 3, 5))) for text in chosen]
        for request, drafted in zip(requests, drafter.propose(requests), strict=True):
            text = request.sequence
            assert not drafted.tokens or drafted.tokens == fresh(drafter, text, request.max_drafts)
            accepted = rng.randint(0, len(drafted.tokens))
            text.output_token_ids += [*drafted.tokens[:accepted], rng.randrange(3000)]
        for text in texts:
            if text not in chosen:
                text.output_token_ids += random_tokens(rng.choice((1, 2, 2 * MAX_ROWS)), len(text), 3000)


def test_no_other_thread_starts_the_passes(drafter, monkeypatch):
    """`propose` waits for all of them: a change of threads and back would only add to it."""
    from tinyvllm.bridge import capture

    text = story(3, 12)
    expected = fresh(drafter, text, 4)
    monkeypatch.setattr(capture, "_launcher", lambda: pytest.fail("the launcher's thread was asked"))
    assert draft(drafter, text, 4).tokens == expected
    drafter.forget(text)


def test_asking_twice_gives_the_same(drafter):
    text = story(2, 10, SAMPLED)
    while not (first := draft(drafter, text).tokens):
        pass
    assert draft(drafter, text).tokens == first


def test_a_long_prompt_is_computed_over_several_calls(drafter):
    """64 tokens a call; meanwhile the other sequence gets its drafts."""
    long, short = story(0, 110), story(1, 3)
    sizes = [[len(each.tokens) for each in drafter.propose([DraftRequest(long, 2), DraftRequest(short, 2)])] for _ in range(3)]
    assert sizes[0] == [0, 2] and sizes[-1] == [2, 2]


def test_without_blocks_a_sequence_gets_no_drafts_and_others_do(drafter):
    """24 blocks of 16 tokens."""
    texts = [story(number, 110) for number in range(4)]
    requests = [DraftRequest(text, 3) for text in texts]
    for _ in range(10):
        drafts = drafter.propose(requests)
    assert [len(each.tokens) for each in drafts] == [3, 3, 3, 0]
    drafter.forget(texts[0])
    for _ in range(4):
        last = drafter.propose(requests[1:])
    assert [len(each.tokens) for each in last] == [3, 3, 3]
    for text in texts:
        drafter.forget(text)
    assert drafter.num_free_blocks == 24


def test_more_sequences_than_rows_or_blocks_take_turns(drafter):
    """Those that are not asked for lose their copies first, the least recently used one before others."""
    texts = [story(number, 60) for number in range(8)]
    for text in texts * 2:
        while not (tokens := draft(drafter, text, 2).tokens):
            pass
        assert tokens == fresh(drafter, text, 2)
    assert len(drafter._copies) <= 4


def test_no_drafts_beyond_the_context_of_the_draft_model(drafter):
    text = story(3, 124)
    for _ in range(5):
        last = draft(drafter, text, 5)
    assert not last.tokens, "124 tokens and 5 are more than 128"
    for _ in range(5):
        last = draft(drafter, text, 4)
    assert len(last.tokens) == 4


def test_tokens_that_the_draft_model_lacks_do_no_harm(drafter):
    text = sequence([5, 4000, 6, 7], [8, 9999], 3)
    text.params = GREEDY
    assert len(draft(drafter, text, 3).tokens) == 3
    text.output_token_ids += [5000, 3]
    assert draft(drafter, text, 3).tokens == fresh(drafter, text, 3)


def test_penalties_do_not_change_drafts(drafter):
    plain, penalised = story(1, 12, SAMPLED), story(2, 12, SAMPLED)
    penalised.prompt_token_ids[:] = plain.prompt_token_ids
    penalised.params = replace(plain.params, repetition_penalty=1.9, min_tokens=5, presence_penalty=1.0)
    assert fresh(drafter, plain, 4) == fresh(drafter, penalised, 4)


# --- its prefix cache


@pytest.fixture
def computed(drafter, monkeypatch):
    """The tokens that each of the draft model's steps computes, but for draws in a row."""
    counts: list[int] = []
    prepare = drafter.runner.prepare
    monkeypatch.setattr(drafter.runner, "prepare", lambda schedule: counts.append(schedule.num_tokens) or prepare(schedule))
    return counts


def drafts_of(drafter: DraftModelDrafter, text: Sequence, count: int, tenant: str = "") -> list[int]:
    while not (tokens := draft(drafter, text, count, tenant).tokens):
        pass
    return tokens


def next_turn(text: Sequence, number: int, more: int) -> Sequence:
    """A prompt of the whole conversation, and something new."""
    made = story(number, 1)
    made.prompt_token_ids = text.token_ids(0, len(text)) + random_tokens(more, 99, 3000)
    return made


def test_the_next_turn_computes_what_is_new(drafter, computed):
    """Of 40 + 12 tokens 48 are in full blocks: those of accepted drafts, too, and of none that were rejected."""
    first = story(0, 40)
    first.output_token_ids += drafts_of(drafter, first, 11)
    first.output_token_ids += [(draft(drafter, first, 2).tokens[0] + 1) % 3000]
    drafter.forget(first)
    assert drafter.num_free_blocks == 24
    computed.clear()
    second = next_turn(first, 1, 8)
    tokens = drafts_of(drafter, second, 4)
    assert computed == [60 - 48 - 1, 1], "what is new, and the last token, whose step draws the drafts"
    assert tokens == fresh(drafter, second, 4)
    drafter.forget(second)


def test_two_sequences_with_one_prefix_write_blocks_of_their_own(drafter, computed):
    """At the same time: what the first has computed of its prompt is found while it runs."""
    one, two = story(0, 60), story(1, 60)
    two.prompt_token_ids[:50] = one.prompt_token_ids[:50]
    drafts_of(drafter, one, 3)
    computed.clear()
    for _ in range(6):
        for text in (one, two):
            tokens = drafts_of(drafter, text, 3)
            assert tokens == fresh(drafter, text, 3)
            text.output_token_ids += [tokens[0], tokens[1], (tokens[2] + 1) % 3000]
        if len(one.output_token_ids) == 3:
            assert max(computed) == 60 - 48 - 1
    shared = set(drafter._copies[0].block_table) & set(drafter._copies[1].block_table)
    assert len(shared) == 3 and [drafter._blocks.reference_count(block) for block in shared] == [2] * 3
    drafter.forget(one)
    drafter.forget(two)
    assert drafter.num_free_blocks == 24


def test_tenants_share_no_blocks_of_the_draft_model(drafter, computed):
    """Nor learn by its speed of each other's texts."""
    first = story(0, 40)
    drafts_of(drafter, first, 2, "a")
    drafter.forget(first)
    for tenant, most in (("b", 39), ("a", 7)):
        computed.clear()
        again = story(0, 40)
        drafts_of(drafter, again, 2, tenant)
        assert max(computed) == most
        drafter.forget(again)


def test_cached_blocks_are_room_for_others(drafter):
    """Ended texts of more than the 24 blocks, one after another."""
    for number in range(8):
        text = story(number, 90)
        drafts_of(drafter, text, 2)
        drafter.forget(text)
        assert drafter.num_free_blocks == 24 and drafter._blocks.num_cached <= 24
    assert drafter._prefix.evictions


def test_a_prompt_that_is_computed_in_part_is_found_in_part(drafter):
    """64 tokens a call, of 110."""
    long = story(0, 110)
    assert not draft(drafter, long, 2).tokens
    drafter.forget(long)
    assert drafter._blocks.num_cached == 4
    again = story(0, 110)
    assert drafts_of(drafter, again, 4) == fresh(drafter, again, 4)


def test_the_block_of_a_prompts_last_token_is_not_shared(drafter):
    """It is computed for its logits, and a shared block is not written."""
    one, two = story(0, 60), story(1, 48)
    two.prompt_token_ids[:] = one.prompt_token_ids[:48]
    drafts_of(drafter, one, 3)
    assert drafts_of(drafter, two, 3) == fresh(drafter, two, 3)
    shared = set(drafter._copies[0].block_table) & set(drafter._copies[1].block_table)
    assert len(shared) == 2
    drafter.forget(one)
    drafter.forget(two)
