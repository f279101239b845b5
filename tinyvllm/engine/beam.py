"""Beam search: which hypotheses go on, which are finished, and when no running one can be better. Knows no scheduling and no tensors.

The rules are those of transformers' `generate(num_beams=...)`: of each round's (1 + end tokens) * width best continuations of all beams,
the best that have not ended run on; those that ended count as finished only among the best `width`, scored by log-probability over length
to the power of the penalty.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tinyvllm.request import (
    BeamSearchParams,
    CompletionOutput,
    Logprob,
    Receipt,
    RequestMetrics,
    RequestOptions,
    RequestOutput,
    SamplingParams,
    Sequence,
)
from tinyvllm.text.tokenizer import Tokenizer

Chosen = list[dict[int, Logprob]]  # of each token of a hypothesis


@dataclass(frozen=True)
class Beam:
    """A running hypothesis. `total` is the sum of its tokens' log-probabilities."""

    sequence: Sequence
    total: float
    logprobs: Chosen


@dataclass(frozen=True)
class Hypothesis:
    """A finished one."""

    score: float
    total: float
    token_ids: list[int]
    logprobs: Chosen
    ended: bool  # by an end-of-sequence token


@dataclass(frozen=True)
class Turn:
    """What a round makes of the sequences: new ones with the running one that they come from, tokens to be appended, and who is over."""

    forks: list[tuple[Sequence, Sequence]]
    tokens: list[tuple[Sequence, int]]
    over: list[Sequence]


@dataclass(frozen=True)
class _Candidate:
    beam: Beam
    token: int
    total: float
    ends: bool


class BeamState:
    """One beam search while it runs, in the place of a RequestState."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: BeamSearchParams,
        tokenizer: Tokenizer | None,
        eos_ids: Iterable[int],
        max_model_len: int,
        arrival: float,
        new_id: Callable[[], int],
        options: RequestOptions | None = None,
    ):
        self.request_id, self.prompt, self.prompt_token_ids, self.params = request_id, prompt, prompt_token_ids, params
        self.options = options or RequestOptions()
        self.metrics = RequestMetrics(arrival)
        self.receipt = Receipt(prompt_tokens=len(prompt_token_ids))
        self.explanation: str | None = None
        self.last_token: float | None = None
        self._tokenizer, self._new_id = tokenizer, new_id
        self._ends = frozenset() if params.ignore_eos else frozenset(eos_ids)
        self._longest = min(params.max_tokens, max_model_len - len(prompt_token_ids))
        self._kept = max(2, 1 + len(self._ends)) * params.beam_width  # candidates of a round
        self._beams = [Beam(self._sequence([]), 0.0, [])]
        self._due(arrival)
        self._candidates: dict[int, dict[int, Logprob]] = {}  # by sequence id
        self._finished: list[Hypothesis] = []  # the best first
        self._over = False
        self._reason: str | None = None
        self._error: str | None = None

    def _sequence(self, tokens: list[int]) -> Sequence:
        params = SamplingParams(temperature=0.0, max_tokens=self._longest)
        made = Sequence(self._new_id(), self.request_id, self.prompt_token_ids, params, output_token_ids=tokens, options=self.options)
        made.logprobs = self._kept
        return made

    def _due(self, arrival: float) -> None:
        limits = (limit for limit in (self.options.deadline_ms, self.options.ttft_deadline_ms) if limit is not None)
        sequence = self._beams[0].sequence
        sequence.arrival, sequence.due = arrival, arrival + min(limits, default=math.inf) / 1000

    @property
    def sequences(self) -> list[Sequence]:
        return [beam.sequence for beam in self._beams]

    @property
    def max_tokens(self) -> int | None:
        return self._longest

    @property
    def finished(self) -> bool:
        return self._over

    def append(self, sequence: Sequence, token_id: int, logprobs: dict[int, Logprob] | None) -> str | None:
        """Take what could follow a beam; what does is known when all of them have been heard."""
        assert logprobs is not None
        self._candidates[sequence.sequence_id] = logprobs
        return None

    @property
    def ready(self) -> bool:
        return not self._over and all(beam.sequence.sequence_id in self._candidates for beam in self._beams)

    def turn(self) -> Turn:
        """The next round; with nobody left to run, the search is over."""
        if self.metrics.first_token is None:
            self.metrics.first_token = time.monotonic()
        length = len(self._beams[0].sequence.output_token_ids) + 1
        ranked = self._ranked(length)
        self._finish_best(ranked[: self.params.beam_width], length)
        going = [candidate for candidate in ranked if not candidate.ends][: self.params.beam_width]
        if not going or self._complete(going[0].total, length):
            over = self.sequences
            self._end()
            return Turn([], [], over)
        turn = self._onward(going)
        self._candidates.clear()
        return turn

    def finish(self, sequence: Sequence, reason: str, error: str | None = None) -> None:
        """One of the beams cannot go on: neither can the search. What it has found so far is its result."""
        if not self._over:
            self._reason, self._error = reason, error
            length = len(sequence.output_token_ids)
            running = sorted(self._beams, key=lambda beam: -beam.total)
            for beam in running[: max(0, self.params.beam_width - len(self._finished))]:
                tokens = list(beam.sequence.output_token_ids)
                self._finished.append(Hypothesis(self._score(beam.total, max(1, length)), beam.total, tokens, beam.logprobs, False))
            self._end()

    def output(self) -> RequestOutput | None:
        """The best hypotheses, once the search is over."""
        if not self._over:
            return None
        best = self._finished[: self.params.n or self.params.beam_width]
        outputs = [self._told(index, hypothesis) for index, hypothesis in enumerate(best)]
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, outputs, True, replace(self.metrics), self.receipt.cached_tokens, None,
            self.receipt if self.options.receipt else None, self.explanation,
        )  # fmt: skip

    def _ranked(self, length: int) -> list[_Candidate]:
        """The best continuations of all beams, the best first; of equals the earlier beam's, then the smaller token."""
        candidates = [
            _Candidate(beam, token, beam.total + found.logprob, token in self._ends or length >= self._longest)
            for beam in self._beams
            for token, found in self._candidates[beam.sequence.sequence_id].items()
        ]
        return sorted(candidates, key=lambda candidate: -candidate.total)[: self._kept]

    def _score(self, total: float, length: int) -> float:
        return total / length**self.params.length_penalty

    def _finish_best(self, best: list[_Candidate], length: int) -> None:
        width = self.params.beam_width
        if self.params.early_stopping is True and len(self._finished) >= width:
            return
        for candidate in best:
            if candidate.ends:
                tokens, logprobs = self._extended(candidate)
                score = self._score(candidate.total, length)
                self._finished.append(Hypothesis(score, candidate.total, tokens, logprobs, candidate.token in self._ends))
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[width:]

    def _extended(self, candidate: _Candidate) -> tuple[list[int], Chosen]:
        beam = candidate.beam
        chosen = self._candidates[beam.sequence.sequence_id][candidate.token]
        return [*beam.sequence.output_token_ids, candidate.token], [*beam.logprobs, {candidate.token: chosen}]

    def _complete(self, best: float, length: int) -> bool:
        """Whether there are enough hypotheses, and the best running beam cannot beat the worst of them."""
        if len(self._finished) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        longest = self._longest if self.params.early_stopping == "never" and self.params.length_penalty > 0 else length
        return self._score(best, longest) <= self._finished[-1].score

    def _onward(self, going: list[_Candidate]) -> Turn:
        """The first continuation of each beam stays its sequence, further ones are forks of it."""
        forks: list[tuple[Sequence, Sequence]] = []
        tokens: list[tuple[Sequence, int]] = []
        beams: list[Beam] = []
        kept: set[int] = set()
        for candidate in going:
            parent = candidate.beam.sequence
            chosen = self._candidates[parent.sequence_id][candidate.token]
            sequence = parent
            if parent.sequence_id in kept:
                sequence = self._sequence([*parent.output_token_ids, candidate.token])
                sequence.arrival, sequence.due = parent.arrival, parent.due
                forks.append((parent, sequence))
            else:
                kept.add(parent.sequence_id)
                tokens.append((parent, candidate.token))
            beams.append(Beam(sequence, candidate.total, [*candidate.beam.logprobs, {candidate.token: chosen}]))
        over = [beam.sequence for beam in self._beams if beam.sequence.sequence_id not in kept]
        self._beams = beams
        return Turn(forks, tokens, over)

    def _end(self) -> None:
        self._over = True
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        self.metrics.finished = time.monotonic()

    def _told(self, index: int, hypothesis: Hypothesis) -> CompletionOutput:
        reason = self._reason or ("stop" if hypothesis.ended else "length")
        shown = hypothesis.token_ids[:-1] if hypothesis.ended and not self.params.include_stop_str_in_output else hypothesis.token_ids
        text = self._tokenizer.decode(shown, skip_special_tokens=True) if self._tokenizer else ""
        return CompletionOutput(
            index, text, hypothesis.token_ids, hypothesis.logprobs, reason, cumulative_logprob=hypothesis.total, error=self._error
        )
