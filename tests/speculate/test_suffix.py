"""Suffix decoding: counts against a scan of the text, confidences, past outputs of a tenant, bounds."""

from __future__ import annotations

import tracemalloc

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.speculate.texts import draft, random_tokens, sequence
from tinyvllm.speculate import DraftRequest
from tinyvllm.speculate.contexts import ESCAPE, LENGTHS, MAX_BRANCHES, ContextCounts, Trail
from tinyvllm.speculate.suffix import PENDING_TOKENS, SuffixDrafter

few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=50)


def scanned(text: list[int]) -> tuple[int, float] | None:
    """The most frequent token after the longest context that occurred before, and its confidence, by looking at every position."""
    padded = [-1] * LENGTHS[0] + text
    for length, escape in zip(LENGTHS, ESCAPE, strict=True):
        context = padded[-length:]
        following = [padded[end] for end in range(LENGTHS[0] + 1, len(padded)) if padded[end - length : end] == context]
        if following:
            last = {token: place for place, token in enumerate(following)}
            token = max(last, key=lambda token: (following.count(token), last[token]))
            return token, following.count(token) / (len(following) + escape)
    return None


@given(few_tokens, few_tokens)
def test_counts_are_those_of_a_scan_at_every_position(prompt, output):
    drafter, growing = SuffixDrafter(min_survival=0.0), sequence(prompt)
    for token in output:
        expected = scanned(growing.token_ids(0, len(growing)))
        drafted = draft(drafter, growing, 1)
        assert list(zip(drafted.tokens, drafted.confidences, strict=True)) == ([] if expected is None else [expected])
        growing.output_token_ids.append(token)


@given(few_tokens)
def test_a_later_draft_token_is_the_one_after_the_text_with_the_drafts_before(text):
    """The counts stay those of the text: a draft is no evidence."""
    longer = draft(SuffixDrafter(min_survival=0.0), sequence(text), 5).tokens
    for count in range(len(longer)):
        assert draft(SuffixDrafter(min_survival=0.0), sequence(text), count + 1).tokens == longer[: count + 1]


def test_copied_text_is_drafted_with_high_confidence():
    prompt = random_tokens(400, 1)
    copying = sequence(prompt, prompt[100:120])
    drafted = draft(SuffixDrafter(), copying, 8)
    assert drafted.tokens == prompt[120:128]
    assert min(drafted.confidences) > 0.9


@pytest.mark.parametrize("length", [each - 1 for each in LENGTHS])
def test_the_longer_context_decides(length):
    """Equal text of that many tokens with different tokens before it, which decide how it continues."""
    common = list(range(100, 100 + length))
    prompt = [1, *common, 7, 2, *common, 8, 3, *common, 9]
    for first, last in ((1, 7), (2, 8), (3, 9)):
        assert draft(SuffixDrafter(), sequence(prompt, [first, *common])).tokens[0] == last


def test_a_draft_ends_where_its_chance_gets_low():
    text = [1, 2, 5, 1, 2, 6, 1, 2, 7, 1, 2]
    confidence = draft(SuffixDrafter(min_survival=0.0), sequence(text), 8).confidences
    assert confidence[0] == pytest.approx(1 / 6), "one of three, and three for the short context"
    assert not draft(SuffixDrafter(min_survival=0.2), sequence(text), 8).tokens
    repeated = SuffixDrafter(min_survival=0.3)
    drafted = draft(repeated, sequence(random_tokens(50, 2) * 3), 200)
    chance = 1.0
    for each in drafted.confidences:
        chance *= each
    assert 0.3 <= chance < 0.4


def test_many_branches_are_bounded_but_their_context_counts_them():
    text = [token for follower in range(100, 140) for token in (1, 2, follower)] + [1, 2]
    (confidence,) = draft(SuffixDrafter(min_survival=0.0), sequence(text), 1).confidences
    assert confidence == pytest.approx(1 / (40 + ESCAPE[-1]))
    assert MAX_BRANCHES < 40


def finish(drafter: SuffixDrafter, prompt: list[int], output: list[int], tenant: str, sequence_id: int) -> None:
    """A request of a tenant from its first drafts to its end."""
    ended = sequence(prompt, output, sequence_id)
    draft(drafter, ended, tenant=tenant)
    drafter.forget(ended)
    drafter.propose([])  # learns it


def test_past_outputs_serve_their_tenant_only():
    drafter, output = SuffixDrafter(), random_tokens(60, 3)
    finish(drafter, [1, 2, 3], output, "a", 0)
    begun = sequence([9, 8, 7], output[:20], 1)
    assert draft(drafter, begun, tenant="a").tokens == output[20:24]
    for other, tenant in enumerate(("b", "", "A"), start=2):
        assert not draft(drafter, sequence([9, 8, 7], output[:20], other), tenant=tenant).tokens


def test_a_prompt_is_not_a_past_output():
    drafter, prompt = SuffixDrafter(), random_tokens(60, 4)
    finish(drafter, prompt, [5], "a", 0)
    assert not draft(drafter, sequence(prompt[:30], sequence_id=1), tenant="a").tokens


def test_the_end_of_the_prompt_is_a_context_of_the_first_output_token():
    drafter, end = SuffixDrafter(), random_tokens(16, 5)
    finish(drafter, [*random_tokens(30, 6), *end], [41, 42, 43], "a", 0)
    drafted = draft(drafter, sequence([*random_tokens(30, 7), *end], sequence_id=1), tenant="a")
    assert drafted.tokens[:3] == [41, 42, 43]


def test_the_own_text_comes_before_past_outputs():
    drafter = SuffixDrafter()
    finish(drafter, [1], [*range(10, 30), 77], "a", 0)
    assert draft(drafter, sequence([*range(10, 30), 66, *range(10, 30)], sequence_id=1), 1, "a").tokens == [66]


def test_an_output_that_was_never_asked_for_has_no_tenant_and_is_not_learned():
    drafter, output = SuffixDrafter(), random_tokens(60, 8)
    drafter.forget(sequence([1], output, 0))
    drafter.propose([])
    assert drafter.outputs.nbytes == 0
    slow = SuffixDrafter(call_tokens=10)
    finish(slow, random_tokens(50, 9), output, "a", 1)  # ends before it is learned up to its end
    for _ in range(10):
        slow.propose([])
    assert draft(slow, sequence(output[:9], sequence_id=2), tenant="a").tokens
    assert not draft(slow, sequence(output[:9], sequence_id=3)).tokens


def test_the_least_recently_used_tenant_goes_first():
    drafter = SuffixDrafter(output_bytes=400_000)  # 500 tokens
    outputs = {tenant: random_tokens(150, seed) for seed, tenant in enumerate("abcd")}
    for number, tenant in enumerate("abc"):
        finish(drafter, [1], outputs[tenant], tenant, number)
    assert drafter.outputs.of("a") is not None  # used
    finish(drafter, [1], outputs["d"], "d", 3)
    assert [tenant for tenant in "abcd" if drafter.outputs.of(tenant) is not None] == ["a", "c", "d"]
    assert drafter.outputs.nbytes <= 400_000


def test_outputs_that_wait_to_be_learned_are_bounded():
    drafter = SuffixDrafter(call_tokens=16)
    for number in range(5):
        ended = sequence([1, 2], [number] * (PENDING_TOKENS // 2), number)
        draft(drafter, ended, tenant="a")
        drafter.forget(ended)
    assert sum(len(tokens) for _, _, tokens in drafter.outputs._pending) <= PENDING_TOKENS


@pytest.mark.parametrize("vocabulary", [1, 3, 50_000])
def test_the_bytes_that_are_counted_bound_those_that_are_used(vocabulary):
    tokens = random_tokens(5000, 10, vocabulary)
    tracemalloc.start()
    try:
        counts = ContextCounts(1 << 30)
        counts.learn(Trail(), tokens)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used <= counts.nbytes + 20_000


def test_memory_is_bounded_and_the_last_contexts_stay():
    limit = 1_000_000  # 1250 tokens
    drafter, texts = SuffixDrafter(text_bytes=limit), [sequence(random_tokens(4000, i), sequence_id=i) for i in range(5)]
    for _ in range(15):
        drafter.propose([DraftRequest(text, 4) for text in texts])
        assert drafter.nbytes <= limit
    for text in texts:
        drafter.forget(text)
    assert drafter._texts.nbytes == 0
    alone = sequence(random_tokens(4000, 9), sequence_id=9)
    alone.output_token_ids += alone.prompt_token_ids[-200:-150]
    while not (drafted := draft(drafter, alone, 8)).tokens:
        assert drafter._texts.nbytes <= limit
    assert drafted.tokens == alone.prompt_token_ids[-150:-142]


def test_a_context_that_recurs_survives_the_generations():
    """Counts move to the young generation with their context."""
    counts, trail = ContextCounts(100_000), Trail()
    phrase = [1, 2, 3, 4]
    for round in range(40):
        counts.learn(trail, phrase + random_tokens(20, round))
    key = Trail(phrase[:3]).keys[-1]
    token, count, total = counts.best(key)
    assert (token, count, total) == (4, 40, 40)
    assert counts.nbytes <= 110_000


def test_a_long_prompt_is_learned_in_slices():
    """One call learns a bounded number of tokens, of all sequences, so that the first step after a long prompt is not late."""
    drafter, long = SuffixDrafter(call_tokens=1000), sequence(random_tokens(4500, 12))
    long.output_token_ids += long.prompt_token_ids[:20]
    calls = 1
    while not (drafted := draft(drafter, long)).tokens:
        calls += 1
    assert calls == 5
    assert drafted.tokens == long.prompt_token_ids[20:24]


def test_asking_twice_changes_nothing():
    drafter, text = SuffixDrafter(), sequence([5, 6, 7, 8, 9, 5, 6, 7, 8])
    assert draft(drafter, text) == draft(drafter, text)


def test_a_sequence_that_lost_tokens_is_an_error():
    drafter, text = SuffixDrafter(), sequence([1, 2, 3], [4])
    draft(drafter, text)
    text.output_token_ids.clear()
    with pytest.raises(ValueError, match="3 tokens; its index knows 4"):
        draft(drafter, text)
