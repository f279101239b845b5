"""The rules of beam search on invented log-probabilities: which beams continue, which are finished, and the end. No model, no scheduler."""

from __future__ import annotations

import itertools
import math

import pytest

from tinyvllm.engine.beam import BeamRound, BeamState
from tinyvllm.request import BeamSearchParams, Logprob, Sequence

END = 9
Table = dict[tuple[int, ...], dict[int, float]]


def start(width: int, longest: int = 4, **options) -> BeamState:
    ids = itertools.count()
    return BeamState("r", None, [1, 2], BeamSearchParams(width, longest, **options), None, (END,), 64, 0.0, lambda: next(ids))


def play(state: BeamState, table: Table) -> BeamRound:
    """A round: each beam is told what could follow it, in any order; its tokens and forks are then as the engine would have them."""
    for sequence in reversed(state.sequences):
        assert not state.ready
        following = table[tuple(sequence.output_token_ids)]
        found = {token: Logprob(math.log(p), rank) for rank, (token, p) in enumerate(following.items(), 1)}
        assert state.append(sequence, next(iter(found)), found) is None
    assert state.ready
    changes = state.next_round()
    for sequence, token in changes.tokens:
        sequence.output_token_ids.append(token)
    return changes


def tokens(sequences: list[Sequence]) -> list[list[int]]:
    return [sequence.output_token_ids for sequence in sequences]


TABLE: Table = {
    (): {3: 0.5, 4: 0.3, END: 0.15, 5: 0.05},
    (3,): {3: 0.4, 4: 0.35, END: 0.2, 5: 0.05},
    (4,): {END: 0.9, 3: 0.06, 4: 0.03, 5: 0.01},
    (3, 3): {END: 0.6, 3: 0.2, 4: 0.15, 5: 0.05},
    (3, 4): {3: 0.5, END: 0.3, 4: 0.1, 5: 0.1},
    (3, 5): {3: 0.5, END: 0.3, 4: 0.1, 5: 0.1},
    (3, 3, 3): {3: 0.97, 4: 0.01, 5: 0.01, END: 0.01},
    (3, 4, 3): {3: 0.97, 4: 0.01, 5: 0.01, END: 0.01},
}


def test_the_first_continuation_keeps_the_sequence_and_others_are_forks():
    state = start(2)
    (first,) = state.sequences
    changes = play(state, TABLE)
    ((parent, child),) = changes.forks
    assert parent is first and tokens(state.sequences) == [[3], [4]] and child.output_token_ids == [4] and changes.ended == []
    changes = play(state, TABLE)  # both of [3]: 0.2 and 0.175, and [4, END] is 0.27
    assert tokens(state.sequences) == [[3, 3], [3, 4]] and changes.ended == [child] and len(changes.forks) == 1


def test_an_end_counts_only_among_the_best_of_the_width():
    state = start(2)
    play(state, TABLE)
    assert not state._finished, "[END] was the third"
    play(state, TABLE)
    assert [(h.token_ids, h.ended) for h in state._finished] == [([4, END], True)]


@pytest.mark.parametrize(
    ("stopping", "penalty", "rounds", "best"),
    [
        (True, 2.0, 3, [[3, 3, END], [4, END]]),  # two are finished, whatever could still come
        (False, 1.0, 3, [[4, END], [3, 3, END]]),  # by its present length no running beam beats the worst of them
        ("never", 1.0, 4, [[3, 4, 3, 3], [4, END]]),  # by the longest it may get to one could, and does
        (False, 2.0, 4, [[3, 4, 3, 3], [3, 3, 3, 3]]),  # length counts for more
        (False, 0.0, 3, [[4, END], [3, 3, END]]),  # length counts for nothing
    ],
)
def test_the_end_of_a_search(stopping, penalty, rounds, best):
    state = start(2, early_stopping=stopping, length_penalty=penalty)
    count = 0
    while not state.finished:
        changes, count = play(state, TABLE), count + 1
    assert count == rounds and changes.ended and changes.tokens == changes.forks == []
    output = state.output()
    assert output is not None and [part.token_ids for part in output.outputs] == best
    for part in output.outputs:
        chain = [TABLE[tuple(part.token_ids[:i])][token] for i, token in enumerate(part.token_ids)]
        assert part.cumulative_logprob == pytest.approx(math.log(math.prod(chain)))
        assert [found[token].logprob for token, found in zip(part.token_ids, part.logprobs)] == pytest.approx([math.log(p) for p in chain])
        assert part.finish_reason == ("stop" if part.token_ids[-1] == END else "length")


def test_ends_are_ignored_where_that_is_asked():
    state = start(2, ignore_eos=True)
    play(state, TABLE)
    changes = play(state, TABLE)
    assert tokens(state.sequences) == [[4, END], [3, 3]] and not changes.ended


def test_fewer_are_given_than_run():
    state = start(2, n=1)
    while not state.finished:
        play(state, TABLE)
    output = state.output()
    assert output is not None and len(output.outputs) == 1


@pytest.mark.parametrize("reason", ["abort", "deadline", "length"])
def test_one_that_is_cut_short_gives_what_it_has(reason):
    state = start(2)
    play(state, TABLE)
    play(state, TABLE)
    assert state.output() is None
    for sequence in state.sequences:
        state.finish(sequence, reason)
    output = state.output()
    assert output is not None and [part.token_ids for part in output.outputs] == [[4, END], [3, 3]]
    assert {part.finish_reason for part in output.outputs} == {reason}


def test_a_search_that_was_never_heard_ends_empty():
    state = start(2)
    state.finish(state.sequences[0], "error", "it broke")
    output = state.output()
    assert output is not None
    (part,) = output.outputs
    assert (part.token_ids, part.finish_reason, part.error) == ([], "error", "it broke")
