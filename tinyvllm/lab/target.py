"""What a sweep measures: an engine, a fake model, or a server over HTTP. Each is a `Target`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from tinyvllm.lab.costs import StepCosts
from tinyvllm.lab.prompts import LabPrompt
from tinyvllm.lab.sweep import Cell, DrafterSpec


@dataclass(frozen=True)
class Job:
    """One request of a trial: a prompt and its seed, which is the same in every cell."""

    prompt: LabPrompt
    seed: int


@dataclass(frozen=True)
class Limits:
    """What every request of a sweep has in common."""

    max_tokens: int
    ignore_eos: bool


@dataclass(frozen=True)
class Answer:
    """The output of one job. Seconds count from the moment its batch was sent.

    tokens  token ids, or words of the text where a server gives no ids
    count   tokens, where `tokens` are words
    """

    prompt_ids: tuple[int, ...]
    tokens: tuple[int | str, ...]
    first_token: float
    finished: float
    count: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) if self.count is None else self.count


@dataclass
class DraftCounts:
    """What became of drafts. By position in their chain: how many were verified, and how many of them were accepted.

    chains    sequences with drafts, summed over steps
    turns     sequences that took part in a step of decodes, summed over steps; None where that is not known
    draft_ms  milliseconds that drafting took, summed over `steps` steps; None where that is not known
    """

    chains: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    turns: int | None = 0
    steps: int = 0
    draft_ms: float | None = None

    def add_chain(self, num_drafts: int, num_accepted: int) -> None:
        """One chain of `num_drafts` drafts, of which the first `num_accepted` were accepted."""
        longer = num_drafts - len(self.drafted)
        self.drafted += [0] * longer
        self.accepted += [0] * longer
        self.chains += num_drafts > 0
        for i in range(num_drafts):
            self.drafted[i] += 1
            self.accepted[i] += i < num_accepted

    def add(self, other: DraftCounts) -> None:
        """Add the counts of another trial."""
        longer = len(other.drafted) - len(self.drafted)
        self.drafted += [0] * longer
        self.accepted += [0] * longer
        for i, (drafted, accepted) in enumerate(zip(other.drafted, other.accepted)):
            self.drafted[i] += drafted
            self.accepted[i] += accepted
        self.chains += other.chains
        self.turns = None if self.turns is None or other.turns is None else self.turns + other.turns
        self.steps += other.steps
        if other.draft_ms is not None:
            self.draft_ms = (self.draft_ms or 0.0) + other.draft_ms


class Target(Protocol):
    """A model under measurement. Methods raise a TinyvllmError for a cell that cannot run, which costs that cell."""

    reports_tokens: bool  # `Answer.tokens` are ids

    def about(self) -> Mapping[str, Any]:
        """What identifies it in the results: another value is another measurement."""
        ...

    def about_drafter(self, drafter: DrafterSpec) -> Mapping[str, Any]:
        """What identifies the drafter in addition to its settings: the files of its model. Empty where it has none."""
        ...

    def check(self, cells: Sequence[Cell]) -> None:
        """ArgumentError for a cell that it can never run. Loads nothing."""
        ...

    def run(self, cell: Cell, jobs: Sequence[Job], limits: Limits, trial: str) -> tuple[list[Answer], DraftCounts]:
        """Run jobs as one batch. Nothing that was learned in a trial of another name may help this one."""
        ...

    def costs(self, rows: Sequence[int]) -> StepCosts | None:
        """Milliseconds of a step by rows, as far as it can be measured."""
        ...

    def logits(self, prompt_ids: Sequence[int], tokens: Sequence[int]) -> np.ndarray | None:
        """Float32 [n, V] without penalties: the logits of each of the n tokens after the prompt. None where the target gives none."""
        ...

    def close(self) -> None: ...
