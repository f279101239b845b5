"""Sequences of given tokens for drafters, and how they are asked."""

from __future__ import annotations

import random

from tinyvllm.request import SamplingParams, Sequence
from tinyvllm.speculate import Draft, Drafter, DraftRequest


def sequence(prompt: list[int], output: list[int] | None = None, sequence_id: int = 0) -> Sequence:
    """A sequence with its output so far."""
    return Sequence(sequence_id, str(sequence_id), list(prompt), SamplingParams(), output_token_ids=list(output or []))


def draft(drafter: Drafter, sequence: Sequence, max_drafts: int = 4, tenant: str = "") -> Draft:
    """The draft of one sequence alone."""
    (result,) = drafter.propose([DraftRequest(sequence, max_drafts, tenant)])
    assert len(result.tokens) <= max_drafts
    return result


def random_tokens(count: int, seed: int, vocabulary: int = 50_000) -> list[int]:
    """Tokens without a pattern."""
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(count)]
