"""Guessed tokens against those that the model draws."""

import numpy as np

from tests.ops.inputs import int32, realized
from tinyvllm.ops.accept_drafts import accept_drafts

DRAFTS = [[5, 6, 7], [5, 6, 7], [1, 6, 7], [5, 6, 7], [5, 6, 7]]
CHOSEN = [[5, 6, 7, 8], [5, 6, 1, 9], [5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]]
LENGTHS = [3, 3, 3, 2, 0]


def test_the_longest_prefix_that_agrees_and_what_follows_it():
    drafts, chosen, lengths = (realized(np.array(a, np.int32)) for a in (DRAFTS, CHOSEN, LENGTHS))
    accepted, following = accept_drafts(drafts, chosen, lengths, int32(5))
    assert accepted.numpy().tolist() == [3, 2, 0, 2, 0]
    assert following.numpy().tolist() == [8, 1, 5, 7, 5]
