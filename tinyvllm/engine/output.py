"""From sampled token ids to outputs: text as far as it is certain, the end of each continuation, what callers get.

Knows no model and no scheduling.

The rules are vLLM's: an end-of-sequence or stop token is in `token_ids` but not in `text`; a stop string is cut from the text; the text
never has half a character, nor what may still turn out to be the beginning of a stop string.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import field, replace

from tinyvllm.engine.beam import BeamState
from tinyvllm.errors import TinyvllmError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import CompletionOutput, Logprob, Receipt, RequestMetrics, RequestOptions, RequestOutput, SamplingParams, Sequence
from tinyvllm.text.detokenize import IncrementalDetokenizer, StopStrings, stop_automaton
from tinyvllm.text.tokenizer import Tokenizer

_SEEDS = 2**64


@dataclass
class _Part:
    """One continuation that is still growing, or has ended: its sequence and what its tokens have become."""

    sequence: Sequence
    detokenizer: IncrementalDetokenizer | None
    stops: StopStrings | None
    text: str = ""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    score: float = 0.0  # sum of the tokens' log-probabilities, if the request wants them
    reported: tuple[int, int] = (0, 0)  # characters and tokens that deltas have given


class RequestState:
    """One request while it runs: its n sequences, and for each of them the text so far and why it ended.

    The i-th sequence samples with `params.seed + i`, so that they differ; the caller has put a seed into `params`. Greedy ones do not
    differ: one sequence runs, and its output is that of each. `arrival` and
    `last_token_time` are in seconds of time.monotonic. Sequence ids count from `first_sequence_id`.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        eos_ids: Iterable[int],
        max_model_len: int,
        arrival: float,
        first_sequence_id: int = 0,
        options: RequestOptions | None = None,
    ):
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.options = options or RequestOptions()
        self.metrics = RequestMetrics(arrival)
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.explanation: str | None = None
        self.receipt = Receipt(prompt_tokens=len(prompt_token_ids))
        self.last_token_time: float | None = None
        self._tokenizer = tokenizer
        self._end_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        self._stop_ids = frozenset(params.stop_token_ids or ())
        room = max_model_len - len(prompt_token_ids)
        self._max_len = room if params.max_tokens is None else min(params.max_tokens, room)
        due = arrival + min(d for d in (self.options.deadline_ms, self.options.ttft_deadline_ms, math.inf) if d is not None) / 1000
        self._sequences = [
            Sequence(
                first_sequence_id + i,
                request_id,
                prompt_token_ids,
                _with_seed_of(params, i),
                i,
                options=self.options,
                arrival=arrival,
                due=due,
            )
            for i in range(params.num_distinct)
        ]
        for sequence in self._sequences:
            sequence.logprobs = (params.logprobs or 0) if params.wants_logprobs else None
        self._parts = [self._part(sequence) for sequence in self._sequences]
        self._unfinished = len(self._sequences)

    def _part(self, sequence: Sequence) -> _Part:
        detokenizer = stops = None
        if self._tokenizer is not None:
            detokenizer = IncrementalDetokenizer(self._tokenizer, self.prompt_token_ids, self.params.skip_special_tokens)
            if self.params.stop:
                stops = StopStrings(stop_automaton(tuple(self.params.stop)), self.params.include_stop_str_in_output)
        return _Part(sequence, detokenizer, stops)

    @property
    def sequences(self) -> list[Sequence]:
        return self._sequences

    @property
    def max_tokens(self) -> int | None:
        return self.params.max_tokens

    @property
    def finished(self) -> bool:
        return not self._unfinished

    def append(self, sequence: Sequence, token_id: int, logprobs: dict[int, Logprob] | None) -> str | None:
        """Take one sampled token; the reason if it was the last: "stop" or "length". `logprobs` are those of the step, by token id."""
        part, tokens = self._parts[sequence.index], sequence.output_token_ids
        assert part.finish_reason is None, f"request {self.request_id}: a token came after the end"
        tokens.append(token_id)
        if self.metrics.first_token is None:
            self.metrics.first_token = time.monotonic()
        if logprobs is not None:
            part.score += logprobs[token_id].logprob
            if self.params.logprobs is not None:
                part.logprobs.append(self._with_texts(logprobs))
        count, params = len(tokens), self.params
        ended = token_id in self._end_ids and count >= params.min_tokens
        new = part.detokenizer.add(token_id) if part.detokenizer and (not ended or params.include_stop_str_in_output) else ""
        if self._add_text(part, new):
            self._end(part, "stop")
        elif ended:
            part.stop_reason = token_id if token_id in self._stop_ids else None
            self.finish(sequence, "stop")
        elif count >= self._max_len:
            self.finish(sequence, "length")
        return part.finish_reason

    def finish(self, sequence: Sequence, reason: str, error: str | None = None) -> None:
        """End a continuation with `reason`, and add the text that was held back. Later calls keep the first reason."""
        part = self._parts[sequence.index]
        if part.finish_reason is not None:
            return
        part.error = error
        if self._add_text(part, part.detokenizer.finish() if part.detokenizer else "") and error is None:
            reason = "stop"
        elif part.stops is not None:
            part.text += part.stops.finish()
        self._end(part, reason)

    def output(self) -> RequestOutput | None:
        """A copy of the output so far, or of what is new in it; None if the caller wants only the final one and it is not there yet."""
        kind, params = self.params.output_kind, self.params
        if not self.finished and (kind == "final_only" or params.chooses):
            return None
        self.metrics.preemptions = sum(sequence.num_preemptions for sequence in self.sequences)
        parts = self._best() if params.chooses else list(enumerate(self._parts))
        outputs = [self._delta(index, part) for index, part in parts] if kind == "delta" else [self._whole(i, part) for i, part in parts]
        if len(self._parts) < params.n:  # greedy continuations are equal, and one was computed
            outputs = [one and replace(one, index=index, token_ids=one.token_ids.copy()) for one in outputs for index in range(params.n)]
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, [o for o in outputs if o is not None], self.finished,
            self.metrics.copy(),
            self.sequences[0].num_cached, self.prompt_logprobs, self.receipt if self.finished and self.options.receipt else None,
            self.explanation,
        )  # fmt: skip

    def _best(self) -> list[tuple[int, _Part]]:
        """The n parts of the best mean log-probability, numbered in this order."""
        ranked = sorted(self._parts, key=lambda part: -part.score / max(1, len(part.sequence.output_token_ids)))
        return list(enumerate(ranked[: self.params.n]))

    def _whole(self, index: int, part: _Part) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text=part.text,
            token_ids=part.sequence.output_token_ids.copy(),
            logprobs=None if self.params.logprobs is None else part.logprobs.copy(),
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
            cumulative_logprob=part.score if self.params.wants_logprobs else None,
            error=part.error,
        )

    def _delta(self, index: int, part: _Part) -> CompletionOutput | None:
        """What is new in a part since its last delta; None if nothing is."""
        characters, tokens = part.reported
        new = part.sequence.output_token_ids[tokens:]
        if characters < 0 or (not new and part.finish_reason is None):
            return None
        part.reported = (len(part.text), tokens + len(new)) if part.finish_reason is None else (-1, 0)
        return CompletionOutput(
            index=index,
            text=part.text[characters:],
            token_ids=new,
            logprobs=None if self.params.logprobs is None else part.logprobs[tokens:],
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
            cumulative_logprob=part.score if self.params.wants_logprobs else None,
            error=part.error,
        )

    def _add_text(self, part: _Part, text: str) -> bool:
        """Add new text as far as it is certain; True if it completed a stop string, which then is in `stop_reason`.

        Text of the first min_tokens tokens is certain at once: no stop string may begin in it.
        """
        if part.stops is None or len(part.sequence.output_token_ids) <= self.params.min_tokens:
            part.text += text
            return False
        safe, matched = part.stops.add(text) if text else ("", None)
        part.text += safe
        if matched is not None:
            part.stop_reason = matched
        return matched is not None

    def _end(self, part: _Part, reason: str) -> None:
        part.finish_reason = reason
        self._unfinished -= 1
        if self.finished:
            self.metrics.finished = time.monotonic()

    def with_token_texts(self, prompt: list[dict[int, Logprob] | None]) -> list[dict[int, Logprob] | None]:
        """Log-probabilities of a prompt's tokens, with the texts of the tokens."""
        return [None if logprobs is None else self._with_texts(logprobs) for logprobs in prompt]

    def _with_texts(self, logprobs: dict[int, Logprob]) -> dict[int, Logprob]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return logprobs
        return {i: p if p.decoded_token is not None else replace(p, decoded_token=tokenizer.token_text(i)) for i, p in logprobs.items()}


def _with_seed_of(params: SamplingParams, index: int) -> SamplingParams:
    """`params` with the seed of the index-th continuation; the seeds wrap around at 2**64."""
    if params.seed is None or index == 0:
        return params
    seed = params.seed + index
    return params.with_seed(seed if seed < _SEEDS else seed - _SEEDS)


ActiveRequest = RequestState | BeamState  # what an engine runs


def failed_output(request: ActiveRequest, error: TinyvllmError) -> RequestOutput:
    """The last output of a request that `error` has ended: as many continuations as it wants, empty. Reads nothing that may be broken."""
    count = request.params.n or 1
    parts = [CompletionOutput(index, "", [], finish_reason="error", error=str(error)) for index in range(count)]
    metrics = RequestMetrics(request.metrics.arrival, request.metrics.first_token, time.monotonic(), scheduled=request.metrics.scheduled)
    return RequestOutput(request.request_id, request.prompt, request.prompt_token_ids, parts, True, metrics, failure=error)
