"""A target without a model: seeded logits, drafts with scripted acceptance, and a virtual clock that a cost curve drives.

The logits of a token depend on the token before it alone, and the noise of a draw on (seed, position), as in the engine. A draft is the
drawn token with the scripted probability of its position, given that those before it were right; else it is another token, a probable one
more often than not, so that lossy policies have something to accept. Acceptance is decided by the policies themselves.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinyvllm.errors import ArgumentError, nearest
from tinyvllm.lab.costs import StepCosts
from tinyvllm.lab.settings import digest_text
from tinyvllm.lab.sweep import Cell, DrafterSpec, FakeSettings
from tinyvllm.lab.target import Answer, DraftCounts, Job, Limits

_SHARPNESS = 2.0  # standard deviation of the logits
_NOISES = 251  # different noises; a seed chooses where its positions begin


@dataclass
class _Run:
    """One sequence of a batch."""

    seed: int
    prompt_ids: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    first_token: float = 0.0
    finished: float = 0.0

    @property
    def last(self) -> int:
        return self.tokens[-1] if self.tokens else self.prompt_ids[-1]


class FakeTarget:
    """Settings in, answers out; nothing depends on the time of day or on the order of cells."""

    reports_tokens = True

    def __init__(self, settings: FakeSettings):
        self._settings, self._rates = settings, dict(settings.acceptance)
        chance = np.random.default_rng(settings.seed)
        V = settings.vocabulary
        self._logits = (chance.standard_normal((V, V)) * _SHARPNESS).astype(np.float32)
        self._noise = chance.gumbel(size=(_NOISES, V)).astype(np.float32)
        self._order = self._logits.argsort(1)[:, ::-1]  # tokens by probability, of each row

    def about(self) -> Mapping[str, Any]:
        s = self._settings
        return {"target": "fake", "fake": digest_text([s.vocabulary, s.acceptance, s.costs.pairs(), s.draft_ms, s.seed])}

    def about_drafter(self, drafter: DrafterSpec) -> Mapping[str, Any]:
        return {}

    def check(self, cells: Sequence[Cell]) -> None:
        drafters = {cell.drafter for cell in cells if cell.drafter.speculates}
        if model := next((spec for spec in drafters if "model" in dict(spec.options)), None):
            raise ArgumentError(
                f"fake: the drafter {model.label!r} has a model, which only an engine runs; leave fake out, or name one of its acceptance"
            )
        for label in {spec.label for spec in drafters}:
            if label not in self._rates:
                raise ArgumentError(f"fake: acceptance of the drafter {label!r} is missing{nearest(label, self._rates)}")

    def run(self, cell: Cell, jobs: Sequence[Job], limits: Limits, trial: str) -> tuple[list[Answer], DraftCounts]:
        runs = [_Run(job.seed, self._ids(job)) for job in jobs]
        counts = DraftCounts(draft_ms=0.0)
        clock = self._settings.costs(sum(len(run.prompt_ids) for run in runs))
        for run in runs:
            run.tokens.append(self._draw(run.last, run.seed, 0, cell.temperature))
            run.first_token = run.finished = clock
        while running := [run for run in runs if len(run.tokens) < limits.max_tokens]:
            clock += self._step(cell, running, limits, counts)
            for run in running:
                run.finished = clock
        return [Answer(run.prompt_ids, tuple(run.tokens), run.first_token / 1000, run.finished / 1000) for run in runs], counts

    def _step(self, cell: Cell, running: Sequence[_Run], limits: Limits, counts: DraftCounts) -> float:
        """Milliseconds of a step that verifies a chain of every sequence."""
        rows = 0
        for run in running:
            drafts = self._drafts(cell, run, limits.max_tokens - len(run.tokens) - 1)
            contexts = [run.last, *drafts]
            drawn = [self._draw(t, run.seed, len(run.tokens) + i, cell.temperature) for i, t in enumerate(contexts)]
            accepted, token = cell.policy.accept(drafts, drawn, self._logits[contexts])
            run.tokens += [*drafts[:accepted], token]
            counts.add_chain(len(drafts), accepted)
            rows += len(contexts)
        counts.turns = (counts.turns or 0) + len(running)
        counts.steps += 1
        drafting = self._settings.draft_ms if cell.drafter.speculates else 0.0
        counts.draft_ms = (counts.draft_ms or 0.0) + drafting
        return self._settings.costs(rows) + drafting

    def _drafts(self, cell: Cell, run: _Run, room: int) -> list[int]:
        if not cell.drafter.speculates:
            return []
        rates = self._rates[cell.drafter.label]
        number = min(len(rates) if cell.k is None else cell.k, room)
        chance = np.random.default_rng([run.seed, len(run.tokens), zlib.crc32(cell.drafter.label.encode())])
        drafts: list[int] = []
        context = run.last
        for i, (hit, other) in enumerate(chance.random((number, 2))):
            token = self._draw(context, run.seed, len(run.tokens) + i, cell.temperature)
            if hit >= rates[min(i, len(rates) - 1)]:
                token = self._wrong(context, token, other)
            drafts.append(token)
            context = token
        return drafts

    def _wrong(self, context: int, token: int, share: float) -> int:
        """Another token than the drawn one: more often than not one of the most probable."""
        rank = int(share * share * len(self._order))
        other = int(self._order[context, rank])
        return other if other != token else int(self._order[context, rank + 1 if rank + 1 < len(self._order) else 0])

    def _draw(self, context: int, seed: int, position: int, temperature: float) -> int:
        row = self._logits[context]
        if temperature:
            row = row / np.float32(temperature) + self._noise[(31 * seed + position) % _NOISES]
        return int(row.argmax())

    def _ids(self, job: Job) -> tuple[int, ...]:
        prompt = job.prompt
        if prompt.token_ids is not None:
            return tuple(token % self._settings.vocabulary for token in prompt.token_ids)
        text = prompt.text or digest_text(prompt.conversation())
        return tuple(byte % self._settings.vocabulary for byte in text.encode()[-64:])

    def costs(self, rows: Sequence[int]) -> StepCosts:
        return StepCosts.of([(n, self._settings.costs(n)) for n in rows])

    def logits(self, prompt_ids: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        return self._logits[[prompt_ids[-1], *tokens[:-1]]]

    def close(self) -> None:
        pass
