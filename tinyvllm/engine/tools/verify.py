"""`verify`: run prompts through a loaded model's kernels and through the reference, and judge the difference.

All kinds of steps occur: chunks of several prompts at once, chunks together with decodes, decodes together, two of which share their first
blocks, and a decode alone. All passes get the same tokens, the reference's own greedy ones: one near tie does not end the comparison.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import asdict, field
from typing import Any

import numpy as np

from tinyvllm.engine.engine import Engine
from tinyvllm.engine.prompt import Prompt, encode_prompt
from tinyvllm.errors import ArgumentError, ModelError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import SamplingParams, Sequence
from tinyvllm.runner.verify import Comparison, PlaceError
from tinyvllm.runner.weight_plan import widest_tolerance
from tinyvllm.sampling.divergence import divergence, log_softmax
from tinyvllm.scheduler import Scheduled

PROMPTS = (
    "Once upon a time there was a little fox that lived at the edge of a forest. Every morning the fox went down to the river, and",
    "The capital of France is",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return",
)
LIMIT = 1e-2  # nats: a larger mean divergence of the logits means other answers


@dataclass(frozen=True)
class Report:
    """The result of `verify`. `kl` has nats for every position; `first` is the first place beyond the tolerance, None if there is none.

    `culprits` are the ops whose kernel, replaced by the reference, brings that place back within the tolerance.
    """

    places: list[PlaceError]
    tolerance: float
    format: str
    kl: list[float]
    agreeing: int  # positions at which the most probable token is the same
    kernels: dict[str, str]
    first: str | None = None
    culprits: list[str] = field(default_factory=list)

    @property
    def kl_mean(self) -> float:
        return float(np.mean(self.kl))

    @property
    def fine(self) -> bool:
        return self.first is None and self.kl_mean <= LIMIT

    def record(self) -> dict[str, Any]:
        """The report for JSON; values that are not finite (a NaN, where the reference has numbers) become None."""
        places = [{name: _finite(value) for name, value in asdict(place).items()} for place in self.places]
        return {
            "fine": self.fine, "first": self.first, "culprits": self.culprits, "tolerance": self.tolerance, "format": self.format,
            "places": places, "kl_mean": _finite(self.kl_mean), "kl_max": _finite(max(self.kl)), "kl_limit": LIMIT,
            "kl": [_finite(value) for value in self.kl], "top1_agreement": self.agreeing / len(self.kl), "kernels": self.kernels,
        }  # fmt: skip


def verify(engine: Engine, prompts: Items[Prompt] = PROMPTS, steps: int = 8, tolerance: float | None = None) -> Report:
    """Compare an engine's kernels with the reference on these prompts and `steps` decode steps after them. Nothing else may run.

    `tolerance` of a layer's own error; None takes that of the weights' format. ArgumentError for a prompt that does not fit, ModelError
    if the reference itself gives no finite logits.
    """
    if steps < 0:
        raise ArgumentError(f"verify: steps must be 0 or more, got {steps}")
    sequences = _sequences(engine, prompts, steps)
    comparison = Comparison(engine.runner, sum(len(sequence.block_table) for sequence in sequences))
    _run(comparison, sequences, len(prompts), steps, engine.config.max_num_batched_tokens)
    format, limit = widest_tolerance(engine.runner.weight_formats, engine.runner.weight_layout)
    limit = limit if tolerance is None else tolerance
    places = comparison.errors()
    reference, kernels = (np.concatenate([getattr(seen, name).logits for seen in comparison.steps]) for name in ("reference", "kernels"))
    first, kl = _first(places, limit), divergence(log_softmax(reference), log_softmax(kernels))
    return Report(
        places, limit, format, kl.tolist(), int((reference.argmax(1) == kernels.argmax(1)).sum()),
        comparison.kernels, first, [] if first is None else _culprits(comparison, first, limit),
    )  # fmt: skip


def _sequences(engine: Engine, prompts: Items[Prompt], steps: int) -> list[Sequence]:
    """One for each prompt, with blocks for all steps, and one that shares the full blocks of the longest and continues differently,
    but in models with recurrent states.

    The blocks of the sequences alternate, as in a pool that has been in use.
    """
    size = engine.config.block_size
    if not 0 < len(prompts) < engine.config.max_num_seqs:
        raise ArgumentError(f"verify: {len(prompts)} prompts; expected 1 to {engine.config.max_num_seqs - 1}, or raise --max-num-seqs")
    texts = [encode_prompt(engine.tokenizer, text).token_ids for text in prompts]
    sequences = [Sequence(i, f"prompt {i}", ids, SamplingParams(), row=i) for i, ids in enumerate(texts)]
    longest = max(texts, key=len)
    shared = 0 if engine.runner.state_slots else len(longest) // size  # a recurrent state is not in blocks
    if shared:
        ids = [*longest[: shared * size], longest[0]]
        sequences.append(Sequence(len(texts), "the shared prompt", ids, SamplingParams(), num_computed=shared * size))
    _check_room(sequences, engine.runner.max_model_len - steps - 2, steps)
    width = max(-(-(len(sequence) + steps + 2) // size) for sequence in sequences)
    for i, sequence in enumerate(sequences):
        sequence.block_table = [i + block * len(sequences) for block in range(width)]
    if shared:
        sequences[-1].block_table[:shared] = sequences[texts.index(longest)].block_table[:shared]
    return sequences


def _check_room(sequences: list[Sequence], room: int, steps: int) -> None:
    for sequence in sequences:
        if not 0 < len(sequence) <= room:
            raise ArgumentError(
                f"verify: {sequence.request_id} has {len(sequence)} tokens; expected 1 to {room}, so that {steps} steps fit after it; "
                "shorten it or raise --max-model-len"
            )


def _run(comparison: Comparison, sequences: list[Sequence], prompts: int, steps: int, budget: int) -> None:
    """Chunks of all prompts but the last; chunks of the last and of the sharing sequence with decodes; decodes of all; one decode."""
    early, late = sequences[: prompts - 1], sequences[prompts - 1 :]
    for group in _chunks(early, budget):
        _step(comparison, group)
    for group in _chunks(late, budget - len(early)):
        _step(comparison, [*map(_decode, early), *group])
    for _ in range(steps):
        _step(comparison, [_decode(sequence) for sequence in sequences])
    if steps and len(sequences) > 1:
        _step(comparison, [_decode(sequences[0])])


def _chunks(sequences: list[Sequence], budget: int) -> list[list[Scheduled]]:
    """The tokens of the prompts that are not in the cache yet, in steps of up to `budget` tokens."""
    steps: list[list[Scheduled]] = []
    left = 0
    for sequence in sequences:
        start = sequence.num_computed
        while start < len(sequence):
            if not left:
                steps.append([])
                left = budget
            count = min(left, len(sequence) - start)
            steps[-1].append(Scheduled(sequence, start, count, int(start + count == len(sequence))))
            start, left = start + count, left - count
    return steps


def _decode(sequence: Sequence) -> Scheduled:
    return Scheduled(sequence, len(sequence) - 1, 1, 1)


def _step(comparison: Comparison, entries: list[Scheduled]) -> None:
    """Run a step; a sequence whose tokens are all computed gets the reference's most probable next one."""
    logits = comparison.step(entries)
    if not np.isfinite(logits).all():
        raise ModelError("verify: the reference itself gives no finite logits; the model's weights or configuration are broken")
    row = 0
    for entry in [*(e for e in entries if e.num_tokens == 1), *(e for e in entries if e.num_tokens > 1)]:
        row += entry.num_tokens
        if entry.num_logits:
            entry.sequence.output_token_ids.append(int(logits[row - 1].argmax()))


def _first(places: list[PlaceError], tolerance: float) -> str | None:
    return next((place.name for place in places if not place.own <= tolerance), None)


def _culprits(comparison: Comparison, first: str, tolerance: float) -> list[str]:
    """Ops of the model whose kernel alone causes the difference at this place."""
    culprits = []
    for stem in comparison.kernels:
        place = next(place for place in comparison.without(stem) if place.name == first)
        if place.own <= tolerance:
            culprits.append(stem)
    return culprits


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value
