"""Beam search: which hypotheses continue, which are finished, and when no running one can win. Knows no scheduling and no tensors.

The rules are those of transformers' `generate(num_beams=...)`: of each round's (1 + end tokens) * width best continuations of all beams,
the best that have not ended continue; those that ended count as finished only among the best `width`, scored by log-probability over
length to the power of the penalty.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from tinyvllm.lazy_dataclass import dataclass
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

TokenLogprobs = list[dict[int, Logprob]]  # one for each token of a hypothesis


@dataclass(frozen=True)
class Beam:
    """A running hypothesis. `total` is the sum of its tokens' log-probabilities."""

    sequence: Sequence
    total: float
    logprobs: TokenLogprobs


@dataclass(frozen=True)
class Hypothesis:
    """A finished hypothesis."""

    score: float
    total: float
    token_ids: list[int]
    logprobs: TokenLogprobs
    ended: bool  # by an end-of-sequence token


@dataclass(frozen=True)
class BeamRound:
    """The changes of one round: forks (parent, child), tokens to append to sequences that continue, and sequences that end."""

    forks: list[tuple[Sequence, Sequence]]
    tokens: list[tuple[Sequence, int]]
    ended: list[Sequence]


@dataclass(frozen=True)
class _Candidate:
    beam: Beam
    token: int
    total: float
    ends: bool


class BeamState:
    """One beam search while it runs: for an engine the same as a RequestState."""

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
        self.last_token_time: float | None = None
        self._tokenizer, self._new_id = tokenizer, new_id
        self._end_ids = frozenset() if params.ignore_eos else frozenset(eos_ids)
        self._max_len = max(1, min(params.max_tokens, max_model_len - len(prompt_token_ids)))  # the scheduler refuses what leaves no token
        self._num_candidates = max(2, 1 + len(self._end_ids)) * params.beam_width  # candidates of a round
        self._beams = [Beam(self._sequence([]), 0.0, [])]
        self._set_deadline(arrival)
        self._candidates: dict[int, dict[int, Logprob]] = {}  # by sequence id
        self._finished: list[Hypothesis] = []  # the best first
        self._done = False
        self._reason: str | None = None
        self._error: str | None = None

    def _sequence(self, tokens: list[int]) -> Sequence:
        params = SamplingParams(temperature=0.0, max_tokens=self._max_len)
        sequence = Sequence(self._new_id(), self.request_id, self.prompt_token_ids, params, output_token_ids=tokens, options=self.options)
        sequence.logprobs = self._num_candidates
        return sequence

    def _set_deadline(self, arrival: float) -> None:
        limits = (limit for limit in (self.options.deadline_ms, self.options.ttft_deadline_ms) if limit is not None)
        sequence = self._beams[0].sequence
        sequence.arrival, sequence.due = arrival, arrival + min(limits, default=math.inf) / 1000

    @property
    def sequences(self) -> list[Sequence]:
        return [beam.sequence for beam in self._beams]

    @property
    def max_tokens(self) -> int | None:
        return self._max_len

    @property
    def finished(self) -> bool:
        return self._done

    def append(self, sequence: Sequence, token_id: int, logprobs: dict[int, Logprob] | None) -> str | None:
        """Take the candidates for the next token of one beam. Which token follows is decided when all beams have theirs: None."""
        assert logprobs is not None
        self._candidates[sequence.sequence_id] = logprobs
        return None

    def has_candidates(self, sequence: Sequence) -> bool:
        """Whether a beam has its candidates for the next token, and waits for the others."""
        return sequence.sequence_id in self._candidates

    @property
    def ready(self) -> bool:
        """Whether all running beams have their candidates."""
        return not self._done and all(beam.sequence.sequence_id in self._candidates for beam in self._beams)

    def next_round(self) -> BeamRound:
        """Choose the next beams; if none is left, or none can win, the search is done."""
        if self.metrics.first_token is None:
            self.metrics.first_token = time.monotonic()
        length = len(self._beams[0].sequence.output_token_ids) + 1
        ranked = self._ranked(length)
        self._finish_best(ranked[: self.params.beam_width], length)
        continuing = [candidate for candidate in ranked if not candidate.ends][: self.params.beam_width]
        if not continuing or self._is_decided(continuing[0].total, length):
            ended = self.sequences
            self._end()
            return BeamRound([], [], ended)
        changes = self._continue(continuing)
        self._candidates.clear()
        return changes

    def finish(self, sequence: Sequence, reason: str, error: str | None = None) -> None:
        """End the search because one of its beams ended; the best hypotheses so far are its result."""
        if not self._done:
            self._reason, self._error = reason, error
            length = len(sequence.output_token_ids)
            running = sorted(self._beams, key=lambda beam: -beam.total)
            for beam in running[: max(0, self.params.beam_width - len(self._finished))]:
                tokens = list(beam.sequence.output_token_ids)
                self._finished.append(Hypothesis(self._score(beam.total, max(1, length)), beam.total, tokens, beam.logprobs, False))
            self._end()

    def output(self) -> RequestOutput | None:
        """The best hypotheses, once the search is done; None before."""
        if not self._done:
            return None
        best = self._finished[: self.params.n or self.params.beam_width]
        outputs = [self._completion(index, hypothesis) for index, hypothesis in enumerate(best)]
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, outputs, True, replace(self.metrics), self.receipt.cached_tokens, None,
            self.receipt if self.options.receipt else None, self.explanation,
        )  # fmt: skip

    def _ranked(self, length: int) -> list[_Candidate]:
        """The best continuations of all beams, the best first; among equals the earlier beam, then the smaller token id."""
        candidates = [
            _Candidate(beam, token, beam.total + found.logprob, token in self._end_ids or length >= self._max_len)
            for beam in self._beams
            for token, found in self._candidates[beam.sequence.sequence_id].items()
        ]
        return sorted(candidates, key=lambda candidate: -candidate.total)[: self._num_candidates]

    def _score(self, total: float, length: int) -> float:
        return float(total / length**self.params.length_penalty)

    def _finish_best(self, best: list[_Candidate], length: int) -> None:
        width = self.params.beam_width
        if self.params.early_stopping is True and len(self._finished) >= width:
            return
        for candidate in best:
            if candidate.ends:
                tokens, logprobs = self._extended(candidate)
                score = self._score(candidate.total, length)
                self._finished.append(Hypothesis(score, candidate.total, tokens, logprobs, candidate.token in self._end_ids))
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[width:]

    def _extended(self, candidate: _Candidate) -> tuple[list[int], TokenLogprobs]:
        beam = candidate.beam
        chosen = self._candidates[beam.sequence.sequence_id][candidate.token]
        return [*beam.sequence.output_token_ids, candidate.token], [*beam.logprobs, {candidate.token: chosen}]

    def _is_decided(self, best: float, length: int) -> bool:
        """Whether there are enough finished hypotheses, and the best running beam cannot beat the worst of them."""
        if len(self._finished) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        max_len = self._max_len if self.params.early_stopping == "never" and self.params.length_penalty > 0 else length
        return self._score(best, max_len) <= self._finished[-1].score

    def _continue(self, candidates: list[_Candidate]) -> BeamRound:
        """The best continuation of each beam keeps its sequence, the others become forks of it."""
        forks: list[tuple[Sequence, Sequence]] = []
        tokens: list[tuple[Sequence, int]] = []
        beams: list[Beam] = []
        kept: set[int] = set()
        for candidate in candidates:
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
        ended = [beam.sequence for beam in self._beams if beam.sequence.sequence_id not in kept]
        self._beams = beams
        return BeamRound(forks, tokens, ended)

    def _end(self) -> None:
        self._done = True
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        self.metrics.finished = time.monotonic()

    def _completion(self, index: int, hypothesis: Hypothesis) -> CompletionOutput:
        reason = self._reason or ("stop" if hypothesis.ended else "length")
        shown = hypothesis.token_ids[:-1] if hypothesis.ended and not self.params.include_stop_str_in_output else hypothesis.token_ids
        text = self._tokenizer.decode(shown, skip_special_tokens=True) if self._tokenizer else ""
        logprobs = [self._with_text(one) for one in hypothesis.logprobs]
        return CompletionOutput(
            index, text, hypothesis.token_ids, logprobs, reason, cumulative_logprob=hypothesis.total, error=self._error
        )  # fmt: skip

    def _with_text(self, logprobs: dict[int, Logprob]) -> dict[int, Logprob]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return logprobs
        return {token: replace(found, decoded_token=tokenizer.token_text(token)) for token, found in logprobs.items()}
