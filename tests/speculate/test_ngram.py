"""Prompt lookup: the longest n-gram against a scan of the text, its edges, its bounds."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.speculate.texts import draft, random_tokens, sequence
from tinyvllm.errors import ArgumentError
from tinyvllm.speculate import DraftRequest
from tinyvllm.speculate.ngram import NgramDrafter
from tinyvllm.speculative import MAX_LOOKUP

few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def scanned(text: list[int], longest: int, shortest: int, count: int) -> list[int]:
    """What prompt lookup drafts, by looking at every position."""
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                period = text[end:]
                return [period[i % len(period)] for i in range(count)]
    return []


@given(few_tokens, few_tokens, st.integers(1, 5), st.integers(0, 4), st.integers(1, 6))
def test_the_longest_ngram_is_found_at_every_position(prompt, output, shortest, more, count):
    drafter, growing = NgramDrafter(shortest + more, shortest), sequence(prompt)
    for token in output:
        assert draft(drafter, growing, count).tokens == scanned(growing.token_ids(0, len(growing)), shortest + more, shortest, count)
        growing.output_token_ids.append(token)


def test_several_tokens_a_step_give_the_drafts_of_one_a_step():
    text = random_tokens(300, 1, vocabulary=4)
    slow, fast = sequence(text[:20]), sequence(text[:20], sequence_id=1)
    drafter = NgramDrafter(4, 2)
    for start in range(20, 300, 7):
        for token in text[start : start + 7]:
            slow.output_token_ids.append(token)
            expected = draft(drafter, slow)
        fast.output_token_ids += text[start : start + 7]
        assert draft(drafter, fast) == expected


def test_no_ngram_no_draft():
    assert not draft(NgramDrafter(3, 2), sequence(list(range(50)))).tokens
    assert not draft(NgramDrafter(3, 2), sequence([7])).tokens


def test_bounds_default_as_vllm_has_them():
    assert NgramDrafter().propose([]) == []
    text = sequence([1, 2, 3, 4, 9, 1, 2, 3, 4])
    assert not draft(NgramDrafter(), text).tokens, "five tokens are the default"
    assert draft(NgramDrafter(lookup_max=4), text).tokens == draft(NgramDrafter(lookup_min=4), text).tokens == [9, 1, 2, 3]
    assert not draft(NgramDrafter(lookup_max=5), text).tokens, "the other bound is the same"


@pytest.mark.parametrize("bounds", [(0, 0), (2, 3), (MAX_LOOKUP + 1, 1), (3, 0), (-1, None), (None, -1)])
def test_bounds_that_no_text_can_meet_are_refused(bounds):
    with pytest.raises(ArgumentError, match="prompt_lookup_m"):
        NgramDrafter(*bounds)


def test_memory_is_bounded_and_the_last_ngrams_stay():
    limit = 200_000
    drafter, texts = NgramDrafter(3, 2, max_bytes=limit), [sequence(random_tokens(4000, i), sequence_id=i) for i in range(5)]
    for _ in range(20):
        drafter.propose([DraftRequest(text, 4) for text in texts])
        assert drafter.nbytes <= limit
    alone = sequence(random_tokens(4000, 9), sequence_id=9)
    for text in texts:
        drafter.forget(text)
    assert drafter.nbytes == 0
    alone.output_token_ids += alone.prompt_token_ids[-200:-150]
    while not draft(drafter, alone).tokens:
        assert drafter.nbytes <= limit
    assert draft(drafter, alone, 8).tokens == alone.prompt_token_ids[-150:-142]


def test_a_long_prompt_is_indexed_in_slices_over_all_sequences():
    drafter = NgramDrafter(2, 2, call_tokens=100)
    long, short = sequence(random_tokens(250, 3)), sequence([1, 2, 3, 1, 2], sequence_id=1)
    long.output_token_ids += long.prompt_token_ids[:2]
    for call in range(3):
        drafts = drafter.propose([DraftRequest(long, 2), DraftRequest(short, 2)])
        assert [bool(each.tokens) for each in drafts] == [call == 2] * 2
    assert drafts[1].tokens == [3, 1]
    assert drafts[0].tokens == long.prompt_token_ids[2:4]


def test_asking_twice_changes_nothing():
    drafter, text = NgramDrafter(2, 1), sequence([5, 6, 7, 5, 6])
    assert draft(drafter, text) == draft(drafter, text)
    assert draft(drafter, text).tokens == [7, 5, 6, 7], "past its end the text repeats"


def test_a_sequence_of_equal_tokens():
    assert draft(NgramDrafter(32, 1), sequence([3] * 5000), 8).tokens == []  # not indexed yet
    drafter, text = NgramDrafter(32, 1), sequence([3] * 1000)
    assert draft(drafter, text, 8).tokens == [3] * 8
