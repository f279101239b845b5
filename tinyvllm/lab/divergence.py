"""How far the outputs of a cell are from those without speculation: tokens that differ, perplexity, KL divergence.

    token difference  positions at which two outputs of a job differ, with the length that one has more, over the positions of the longer
    perplexity        exp of the mean negative log-probability that the target gives to the output's tokens, at temperature 1
    KL divergence     of the target's distribution after the cell's tokens from that after the baseline's, at the same position of the same
                      job: how far the tokens so far have moved the model. Mean over the positions that both outputs have, in nats

Where all tokens are equal, the divergence is 0 and the perplexity the baseline's by construction; then only one of the texts is scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tinyvllm.engine.tools.token_scores import score
from tinyvllm.lab.statistics import ratio
from tinyvllm.lab.target import Target

Tokens = Sequence[Sequence[int | str]]  # of each job


@dataclass(frozen=True)
class Divergence:
    """`difference` and the counts are over all repeats, the scores over the first one. None: not known."""

    reference: Tokens
    tokens: Tokens
    difference: float | None
    differing_outputs: float | None
    first_difference: float | None  # mean position of the first different token, of the outputs that differ
    perplexity: float | None = None
    reference_perplexity: float | None = None
    kl: float | None = None
    kl_max: float | None = None

    def scored(self, target: Target, prompts: Sequence[Sequence[int]]) -> Divergence:
        """With perplexity and KL divergence by the target's logits, where it gives logits."""
        nll, reference_nll, kl = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
        for prompt, ours, theirs in zip(prompts, self.tokens, self.reference, strict=True):
            logits = _logits(target, prompt, ours)
            expected = logits if ours == theirs else _logits(target, prompt, theirs)
            if logits is None or expected is None:
                return self
            both = min(len(ours), len(theirs))
            nll.append(score(logits, logits, _ids(ours)).nll)
            reference_nll.append(score(expected, expected, _ids(theirs)).nll)
            kl.append(score(expected[:both], logits[:both], _ids(ours[:both])).kl)
        if not sum(map(len, kl)):
            return self
        far = np.concatenate(kl)
        perplexity, before = _perplexity(nll), _perplexity(reference_nll)
        return replace(self, perplexity=perplexity, reference_perplexity=before, kl=float(far.mean()), kl_max=float(far.max()))

    def record(self) -> dict[str, Any]:
        """As a line of the results has it."""
        names = ("difference", "differing_outputs", "first_difference", "perplexity", "reference_perplexity", "kl", "kl_max")
        return {name: getattr(self, name) for name in names}


def compare_texts(reference: Sequence[Tokens], tokens: Sequence[Tokens]) -> Divergence:
    """The difference between the outputs of each repeat and job; of words where there are no ids."""
    different = positions = 0
    firsts: list[int] = []
    number = 0
    for before, after in zip(reference, tokens, strict=True):
        for theirs, ours in zip(before, after, strict=True):
            both = min(len(ours), len(theirs))
            at = [i for i in range(both) if ours[i] != theirs[i]]
            extra = max(len(ours), len(theirs)) - both
            different += len(at) + extra
            positions += both + extra
            number += 1
            if at or extra:
                firsts.append(at[0] if at else both)
    mean = sum(firsts) / len(firsts) if firsts else None
    return Divergence(reference[0], tokens[0], ratio(different, positions), ratio(len(firsts), number), mean)


def _logits(target: Target, prompt: Sequence[int], tokens: Sequence[int | str]) -> np.ndarray | None:
    """Float32 [n, V], None where the target has none."""
    if not target.reports_tokens or not tokens:
        return None
    return target.logits(prompt, [int(token) for token in tokens])


def _ids(tokens: Sequence[int | str]) -> np.ndarray:
    return np.array([int(token) for token in tokens], np.int64)


def _perplexity(parts: Sequence[np.ndarray]) -> float:
    return float(np.exp(np.concatenate(parts).mean()))
