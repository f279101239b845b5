"""Steps of an engine for controllers: scripted acceptance and cost, no model, no clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.speculate.texts import sequence
from tinyvllm.speculate.controller import FixedController
from tinyvllm.speculate.protocol import Controller, Draft, DraftRequest

RIGHT, WRONG = 1, 2  # every token that comes is RIGHT

Script = Callable[[random.Random, int, int], Draft]  # the draft of a sequence (number, length, ...)


def constant(acceptance: float, confidence: float | None = None) -> Callable[[random.Random, int, int, int], Draft]:
    """Each draft is right with that chance if those before it are."""

    def script(rng: random.Random, number: int, length: int, count: int) -> Draft:
        tokens = [RIGHT if rng.random() < acceptance else WRONG for _ in range(count)]
        return Draft(tokens, [] if confidence is None else [confidence] * count)

    return script


@dataclass
class Simulation:
    """`num_sequences` that run for some steps. `cost(rows)` is in seconds; a drafter needs `call_cost` for a call and `pass_cost` for each
    draft position."""

    controller: Controller | None
    script: Callable[[random.Random, int, int, int], Draft]
    cost: Callable[[int], float]
    num_sequences: int = 1
    pass_cost: float = 0.0
    call_cost: float = 0.0
    noise: float = 0.0
    seed: int = 1
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    verified: int = 0
    proposed: int = 0
    counts: list[int] = field(default_factory=list)  # verified drafts of each step

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._sequences = [sequence([0], sequence_id=i) for i in range(self.num_sequences)]

    def run(self, steps: int) -> Simulation:
        for _ in range(steps):
            self._run_step()
        return self

    def _run_step(self) -> None:
        chosen, drafts = {}, {}
        if self.controller is not None:
            limits = self.controller.limits(self._sequences, self.num_sequences)
            requests = [DraftRequest(s, n) for s, n in zip(self._sequences, limits, strict=True) if n]
            drafts = {
                r.sequence.sequence_id: self.script(self._rng, r.sequence.sequence_id, len(r.sequence), r.max_drafts) for r in requests
            }
            self.proposed += sum(len(draft.tokens) for draft in drafts.values())
            if requests and self.pass_cost:
                passes = max(r.max_drafts for r in requests)
                took = self.call_cost + self.pass_cost * passes
                self.seconds += took
                self.controller.observe_proposal(passes, took)
            if any(draft.tokens for draft in drafts.values()):
                counts = self.controller.choose(requests, list(drafts.values()), self.num_sequences)
                chosen = {r.sequence.sequence_id: n for r, n in zip(requests, counts, strict=True)}
        rows = self.num_sequences + sum(chosen.values())
        for each in self._sequences:
            count = chosen.get(each.sequence_id, 0)
            verified = drafts[each.sequence_id].tokens[:count] if count else []
            accepted = next((i for i, token in enumerate(verified) if token != RIGHT), len(verified))
            each.output_token_ids += [RIGHT] * (accepted + 1)
            self.tokens += accepted + 1
            if count:
                self.controller.observe(each, count, accepted)
        took = self.cost(rows)
        self.seconds, self.steps = self.seconds + took, self.steps + 1
        self.verified += rows - self.num_sequences
        self.counts.append(rows - self.num_sequences)
        if self.controller is not None:
            spike = 10.0 if self.noise and self._rng.random() < 0.02 else 1.0
            self.controller.observe_step(
                self.num_sequences, rows - self.num_sequences, took * spike * (1 + self.noise * self._rng.random())
            )

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def best_fixed(drafts: Iterable[int], steps: int, **settings) -> float:
    """The highest rate of no drafts and of the fixed numbers, in hindsight."""
    return max(Simulation(FixedController(k) if k else None, **settings).run(steps).rate for k in (0, *drafts))
