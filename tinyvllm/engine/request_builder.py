"""Builds the running form of a request: checks it against the model, draws its seed, and numbers its sequences."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import field

from tinyvllm.engine.beam import BeamState
from tinyvllm.engine.output import ActiveRequest, RequestState
from tinyvllm.errors import RequestError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import ALL_LOGPROBS, MAX_LOGPROB_ENTRIES, MAX_LOGPROBS, BeamSearchParams, RequestOptions, SamplingParams
from tinyvllm.request.limits import brief
from tinyvllm.text.tokenizer import Tokenizer


@dataclass
class RequestBuilder:
    """`seed` is the first of the seeds that requests without one get; None draws each. `clock` gives arrivals in seconds."""

    vocab_size: int
    max_model_len: int
    tokenizer: Tokenizer | None
    eos_ids: Iterable[int]
    seed: int | None
    clock: Callable[[], float]
    _next_id: int = field(default=0, init=False)

    def build(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams | BeamSearchParams,
        prompt: str | None,
        options: RequestOptions,
    ) -> ActiveRequest:
        """The request as it runs; RequestError for token ids outside the vocabulary."""
        if bad := next((t for t in prompt_token_ids if not 0 <= t < self.vocab_size), None):
            raise RequestError(f"request {request_id}: token id {brief(bad)} is out of vocabulary, which has {self.vocab_size} tokens")
        if isinstance(params, BeamSearchParams):
            return BeamState(
                request_id, prompt, prompt_token_ids, params, self.tokenizer, self.eos_ids, self.max_model_len, self.clock(),
                self._new_sequence_id, options,
            )  # fmt: skip
        self._check_ids(request_id, params)
        self._check_logprobs(request_id, params, len(prompt_token_ids))
        if params.seed is None:
            seed = secrets.randbits(63) if self.seed is None else (self.seed + self._next_id) % 2**64
            params = params.with_seed(seed)
        first = self._next_id
        self._next_id += params.width
        return RequestState(
            request_id, prompt, prompt_token_ids, params, self.tokenizer, self.eos_ids, self.max_model_len, self.clock(),
            first_sequence_id=first, options=options,
        )  # fmt: skip

    def _check_ids(self, request_id: str, params: SamplingParams) -> None:
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            if bad := next((t for t in getattr(params, name) or () if t >= self.vocab_size), None):
                raise RequestError(f"request {request_id}: {name} has token id {bad}, the vocabulary has {self.vocab_size} tokens")

    def _check_logprobs(self, request_id: str, params: SamplingParams, prompt_tokens: int) -> None:
        """RequestError if log-probabilities of the whole vocabulary would be too many."""
        room = self.max_model_len - prompt_tokens
        if room < 1:
            return  # the scheduler refuses the prompt
        outputs = params.width * (room if params.max_tokens is None else min(params.max_tokens, room))
        for name, positions in (("logprobs", outputs), ("prompt_logprobs", prompt_tokens)):
            if getattr(params, name) == ALL_LOGPROBS and positions * self.vocab_size > MAX_LOGPROB_ENTRIES:
                raise RequestError(
                    f"request {request_id}: {name}=-1 lists {self.vocab_size} tokens at each of {positions} positions, more than "
                    f"{MAX_LOGPROB_ENTRIES} in all; ask for fewer tokens, or for up to {MAX_LOGPROBS} alternatives"
                )

    def _new_sequence_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1
