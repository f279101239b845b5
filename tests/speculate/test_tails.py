"""A text that repeats nothing is not learned; what recurs is found as by a scan, within bounds, and drafts are as if all were learned."""

from __future__ import annotations

import random

import pytest

from tests.speculate.texts import draft, random_tokens, sequence
from tinyvllm.speculate import DraftRequest
from tinyvllm.speculate.suffix import SuffixDrafter
from tinyvllm.speculate.tails import Tails


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_what_recurs_is_found_as_by_a_scan(length):
    """Also where the same bytes begin within a token."""
    rng, seen = random.Random(length), set()
    for number in range(40):
        prompt = rng.choices([0, 1, 256, 65536, 16777216], k=rng.randrange(1, 20))
        tails, growing = Tails(), sequence(prompt, sequence_id=number)
        for _ in range(20):
            text = growing.token_ids(0, len(growing))
            expected = text[-length:] in [text[end - length : end] for end in range(length, len(text))]
            assert tails.recur(growing, length) == expected
            seen.add(expected)
            growing.output_token_ids.append(rng.choice([0, 1, 256, 65536, 16777216]))
    assert seen == {True, False}


def test_crafted_text_is_taken_for_one_that_recurs():
    """Each occurrence within a token would cost another search."""
    crafted = sequence([0x01010101, 0x01010102] * 40 + [0x02010101, 0x01010101])
    assert Tails().recur(crafted, 2)


def test_a_long_prompt_is_taken_over_in_parts():
    tails, prompt = Tails(call_tokens=30), random_tokens(50, 1)
    text = sequence([*prompt, *prompt[:2]])
    assert not tails.recur(text, 2) and tails.recur(text, 2)
    tails.forget(text)
    assert len(tails) == 0


def test_a_text_is_learned_when_its_end_recurs_and_then_drafted_as_if_it_always_was():
    lazy, eager, prompt = SuffixDrafter(first_match=4), SuffixDrafter(), random_tokens(100, 2)
    copying = sequence(prompt)
    for count, token in enumerate(prompt[20:40]):
        drafted = draft(lazy, copying, 8)
        if count < 4:
            assert not drafted.tokens and lazy.nbytes == 0
        else:
            expected = draft(eager, copying, 8)
            assert (drafted.tokens, drafted.confidences) == (expected.tokens, expected.confidences) and drafted.tokens
        copying.output_token_ids.append(token)
    lazy.forget(copying)
    lazy.propose([])
    assert lazy.outputs.nbytes and not len(lazy._tails)


def test_past_outputs_are_found_without_the_text_being_learned():
    lazy, output = SuffixDrafter(first_match=4), random_tokens(60, 3)
    ended = sequence([1, 2, 3], output, 0)
    draft(lazy, ended, tenant="a")
    lazy.forget(ended)
    lazy.propose([])
    again = sequence([9, 8, 7], output[:20], 1)
    for _ in range(5):
        assert draft(lazy, again, 4, tenant="a").tokens == output[len(again) - 3 : len(again) + 1]
        again.output_token_ids.append(output[len(again) - 3])
    assert not draft(lazy, again, 4, tenant="b").tokens


def test_a_sequence_that_lost_tokens_is_an_error():
    drafter, text = SuffixDrafter(first_match=4), sequence([1, 2, 3], [4])
    drafter.propose([DraftRequest(text, 2)])
    text.output_token_ids.clear()
    with pytest.raises(ValueError, match="3 tokens; its text knows 4"):
        drafter.propose([DraftRequest(text, 2)])
