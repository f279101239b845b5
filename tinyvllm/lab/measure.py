"""One cell: warm-up, repeats, counts and times, and the comparison of its tokens with the baseline's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tinyvllm.lab.divergence import Divergence, compare_texts
from tinyvllm.lab.prompts import LabPrompt
from tinyvllm.lab.settings import digest_text
from tinyvllm.lab.statistics import ratio, summary
from tinyvllm.lab.sweep import Cell, Sweep
from tinyvllm.lab.target import Answer, DraftCounts, Job, Limits, Target

Record = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """The outputs of a baseline cell, by repeat and job, and the perplexity of the first repeat's; both are in its record."""

    tokens: list[list[list[int | str]]]

    @staticmethod
    def of(record: Mapping[str, Any]) -> Reference:
        return Reference(record["output_tokens"])


def measure(sweep: Sweep, cell: Cell, prompts: Sequence[LabPrompt], target: Target, reference: Reference | None) -> Record:
    """The figures of a cell. `reference` is that of its baseline, None for a baseline, or without one.

    With `sweep.paired` each repeat runs its jobs without drafts first: what changes the machine's speed from minute to minute then changes
    both, and a cell that is measured a day later is compared with that day.
    """
    jobs = jobs_of(sweep, cell, prompts)
    limits = Limits(sweep.max_tokens, sweep.ignore_eos)
    pairs = sweep.paired and reference is not None
    for number in range(sweep.warmup):
        _repeat(target, cell, jobs[0], limits, f"warmup {number}")  # all jobs: each length of a chain may be a step to capture
    trials, ratios = list[_Trial](), list[float]()
    for number in range(sweep.repeats):
        plain = _repeat(target, cell.baseline, jobs[number], limits, f"repeat {number}") if pairs else None
        trials.append(_repeat(target, cell, jobs[number], limits, f"repeat {number}"))
        if plain is not None and plain.tok_s:
            ratios.append(trials[-1].tok_s / plain.tok_s)
    counts = DraftCounts()
    for trial in trials:
        counts.add(trial.counts)
    record = cell.axes() | _times(trials) | _drafting(trials, counts) | {"paired_speedup": summary(ratios) if ratios else None}
    tokens = [[list(answer.tokens) for answer in trial.answers] for trial in trials]
    record |= {"output_tokens" if reference is None else "output_digest": tokens if reference is None else _digest(tokens)}
    divergence = compare_texts(tokens if reference is None else reference.tokens, tokens)
    if sweep.quality:
        divergence = divergence.scored(target, [answer.prompt_ids for answer in trials[0].answers])
    return record | {"exact": _is_exact(cell, divergence, reference), "divergence": divergence.record()}


def jobs_of(sweep: Sweep, cell: Cell, prompts: Sequence[LabPrompt]) -> list[list[Job]]:
    """The jobs of each repeat: every prompt, and some again until the last batch is full. A seed belongs to (repeat, place)."""
    size = cell.batch_size
    number = -(-len(prompts) // size) * size
    each = [prompts[i % len(prompts)] for i in range(number)]
    return [[Job(prompt, _seed(sweep.seed, repeat, i)) for i, prompt in enumerate(each)] for repeat in range(sweep.repeats)]


def _seed(seed: int, repeat: int, place: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{repeat}/{place}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class _Trial:
    """One repeat. Seconds are sums over its batches; decode seconds count from a batch's first token to its last."""

    answers: list[Answer]
    counts: DraftCounts
    seconds: float
    decode_seconds: float

    @property
    def tok_s(self) -> float:
        """Tokens a second of decoding."""
        return self.decoded / max(self.decode_seconds, 1e-9)

    @property
    def generated(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def decoded(self) -> int:
        """Tokens after the first of each answer."""
        return sum(max(0, answer.num_tokens - 1) for answer in self.answers)


def _repeat(target: Target, cell: Cell, jobs: Sequence[Job], limits: Limits, name: str) -> _Trial:
    answers, counts = list[Answer](), DraftCounts()
    seconds = decode = 0.0
    for batch in _batches(jobs, cell.batch_size):
        some, drafted = target.run(cell, batch, limits, name)
        answers += some
        counts.add(drafted)
        last = max(answer.finished for answer in some)
        seconds += last
        decode += last - min(answer.first_token for answer in some)
    return _Trial(answers, counts, seconds, decode)


def _batches(jobs: Sequence[Job], size: int) -> Iterator[Sequence[Job]]:
    for start in range(0, len(jobs), size):
        yield jobs[start : start + size]


def _times(trials: Sequence[_Trial]) -> Record:
    """Speeds and times, each over the repeats."""
    first = [median(answer.first_token for answer in trial.answers) for trial in trials]
    return {
        "tok_s": summary([trial.tok_s for trial in trials]),
        "total_tok_s": summary([trial.generated / max(trial.seconds, 1e-9) for trial in trials]),
        "first_token_ms": summary([1000 * one for one in first]),
        "output_tokens_per_repeat": summary([trial.generated for trial in trials]),
    }


def _drafting(trials: Sequence[_Trial], counts: DraftCounts) -> Record:
    """Counts of drafts over all repeats, and what follows from them."""
    decoded, accepted, drafted = sum(trial.decoded for trial in trials), sum(counts.accepted), sum(counts.drafted)
    if counts.turns:
        tokens, drafts = ratio(decoded, counts.turns), ratio(drafted, counts.turns)
    else:  # a server's metrics count chains alone
        tokens, drafts = (1 + accepted / counts.chains, drafted / counts.chains) if counts.chains else (None, None)
    return {
        "tokens_per_step": tokens,
        "drafts_per_step": drafts,
        "acceptance": ratio(accepted, drafted),
        "positions": [{"drafted": d, "accepted": a} for d, a in zip(counts.drafted, counts.accepted)],
        "draft_ms": None if counts.draft_ms is None or not counts.steps else counts.draft_ms / counts.steps,
    }


def _is_exact(cell: Cell, divergence: Divergence, reference: Reference | None) -> bool | None:
    """Whether all tokens are the baseline's. None for a baseline, and where there were no tokens to compare."""
    return None if reference is None or divergence.difference is None else divergence.difference == 0


def _digest(tokens: Any) -> str:
    return hashlib.blake2b(digest_text(tokens).encode(), digest_size=12).hexdigest()
