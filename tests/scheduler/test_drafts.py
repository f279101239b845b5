"""Drafts in a schedule of sequences with recurrent states."""

from __future__ import annotations

from tests.scheduler.builders import make, make_sequence, run
from tinyvllm.scheduler.drafts import add_drafts


def test_drafts_end_before_the_place_of_a_copy_and_at_what_states_keep():
    """A copy is made after a token that is no draft, or it would be found before it is there."""
    counts = []
    for copy_at in (0, 13, 14, 15, 16, 17, 40):
        scheduler = make(budget=32, max_drafts=3)
        sequence = make_sequence(1, 13)
        scheduler.add(sequence)
        run(scheduler)
        sequence.copy_at = copy_at
        (entry,) = add_drafts(scheduler, scheduler.schedule(), {1: [7] * 9}).entries
        assert entry.start == 13
        counts.append(len(entry.drafts))
    assert counts == [3, 3, 3, 0, 1, 2, 3]
