"""Log-probabilities of a prompt's own tokens, a piece a step, beside whatever is running."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tinyvllm.request import Logprob, SamplingParams, Sequence
from tinyvllm.sampling.logprobs import logprobs_of
from tinyvllm.scheduler import Scheduled, Scheduler

PIECE = 128  # tokens; their logits over a vocabulary of 128 k are 64 MiB on the host


class PromptScore:
    """One prompt on its way, in blocks of its own: what the prefix cache has is keys and values, and this wants logits.

    `logprobs` gets a dict for each token, None for the first, which nothing comes before.
    """

    def __init__(self, request_id: str, prompt_token_ids: list[int], top: int):
        self.request_id = request_id
        self.logprobs: list[dict[int, Logprob] | None] = [None]
        self._top = top
        self._asked = False  # for blocks
        self._sequence = Sequence(-1, request_id, prompt_token_ids, SamplingParams())

    def __len__(self) -> int:
        return len(self._sequence.prompt_token_ids)

    @property
    def done(self) -> bool:
        return self._sequence.num_computed >= len(self)

    def begin(self, scheduler: Scheduler) -> bool:
        """Borrow the blocks that the prompt needs, if that has not been done; whether they are there."""
        if not self._sequence.block_table:
            self._asked = True
            self._sequence.block_table = scheduler.borrowed.take(scheduler.pool.blocks_for(len(self))) or []
        return bool(self._sequence.block_table)

    def next_piece(self, most: int) -> Scheduled:
        start = self._sequence.num_computed
        return Scheduled(self._sequence, start, min(PIECE, most, len(self) - start), 0)

    def take(self, piece: Scheduled, logits: np.ndarray) -> None:
        """Logits float32 [T, V] of a piece, each row those of the token behind it."""
        tokens = self._sequence.token_ids(piece.start + 1, piece.start + piece.num_tokens + 1)
        self.logprobs += logprobs_of(logits[: len(tokens)], tokens, [self._top] * len(tokens))
        self._sequence.num_computed += piece.num_tokens

    def end(self, scheduler: Scheduler) -> None:
        """Give the blocks back, or ask for them no more."""
        if self._asked:
            scheduler.borrowed.give_back(self._sequence.block_table)
            self._sequence.block_table, self._asked = [], False


class Scores:
    """The prompts that wait for their scores, the first to ask first. One of them has blocks at a time."""

    def __init__(self, scheduler: Scheduler, most: int):
        """`most` tokens are computed a step."""
        self._scheduler, self._most = scheduler, most
        self._waiting: dict[str, PromptScore] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def add(self, request_id: str, prompt_token_ids: list[int], top: int) -> None:
        self._waiting[request_id] = PromptScore(request_id, prompt_token_ids, top)

    def step(self, compute: Callable[[Scheduled], np.ndarray]) -> PromptScore | None:
        """A piece of the first one's, by what `compute` gives of it: logits float32 [T, V]. It is returned when it is over.

        It is `done` then, or was given up: it needs more blocks than are free though nobody runs.
        """
        score = next(iter(self._waiting.values()))
        if score.begin(self._scheduler):
            piece = score.next_piece(self._most)
            score.take(piece, compute(piece))
            if not score.done:
                return None
        elif self._scheduler.running:
            return None
        self.end(score.request_id)
        return score

    def end(self, request_id: str) -> None:
        """Nobody wants this one's any more, if anybody did."""
        if (score := self._waiting.pop(request_id, None)) is not None:
            score.end(self._scheduler)
