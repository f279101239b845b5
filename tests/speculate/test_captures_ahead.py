"""Which captures warm-up makes for drafters that read hidden states: what steps of few sequences need with any number of drafts."""

from __future__ import annotations

from collections.abc import Sequence as Row
from itertools import product
from typing import Any

import pytest

from tinyvllm.runner.prepare import decode_bucket, power_bucket, usual_shapes
from tinyvllm.runner.warmup import PLAIN_DRAWS
from tinyvllm.speculate.last_states import FEW_SEQUENCES, Guessing, LastStates
from tinyvllm.speculate.protocol import StateRows


class Listed(LastStates):
    """Captures nothing, and lists what it would."""

    def __init__(self, max_drafts: int, max_num_seqs: int):
        super().__init__(max_drafts, max_num_seqs)
        self.kept: list[tuple[int, int]] = []
        self.guessed: list[tuple[int, int, Any]] = []

    def _keep(self, states: Any, rows: Row[StateRows]) -> None: ...

    def _capture_keep(self, states: Any, shape: Any, R: int) -> None:
        if not shape.chunks:
            self.kept.append((shape.decodes, R))

    def _guess(self, batch: Guessing) -> Any:
        self.guessed.append((batch.bucket, batch.K, batch.flags))


@pytest.mark.parametrize(("K", "max_num_seqs"), [(1, 1), (3, 2), (5, 8), (8, 64)])
def test_few_sequences_have_captures_of_every_number_of_drafts(K: int, max_num_seqs: int) -> None:
    drafter, tokens = Listed(K, max_num_seqs), 64 * (K + 1)
    for shape in usual_shapes(max_num_seqs, tokens, max_num_seqs * K):
        drafter.capture(shape, object())  # type: ignore[arg-type]
    kept, guessed = set(drafter.kept), set(drafter.guessed)
    assert len(kept) == len(drafter.kept) and len(guessed) == len(drafter.guessed), "each is captured once"
    few = range(1, min(FEW_SEQUENCES, max_num_seqs) + 1)
    for n in few:
        assert {(power_bucket(rows), decode_bucket(n)) for rows in range(n + 1, n * (K + 1) + 1)} <= kept
        wanted = {drafter._count(k) for k in range(1, K + 1)}
        assert {(decode_bucket(n), k, flags) for k, flags in product(wanted, PLAIN_DRAWS)} <= guessed
    for n in range(1, max_num_seqs + 1):
        assert (power_bucket(n * (K + 1)), decode_bucket(n)) in kept and (decode_bucket(n), decode_bucket(n)) in kept
        assert {(decode_bucket(n), K, flags) for flags in PLAIN_DRAWS} <= guessed
    assert len(guessed) <= 2 * (len(few) * K + len({decode_bucket(n) for n in range(1, max_num_seqs + 1)}))
