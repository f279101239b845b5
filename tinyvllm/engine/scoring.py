"""Log-probabilities of a prompt's own tokens (`prompt_logprobs`): a stage of each step, one piece of one prompt at a time.

It is a stage and no tool: it computes what a request asks for, on the device and in blocks of the pool, and holds the outputs of the
request back until it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from tinyvllm.engine.requests import ActiveRequests
from tinyvllm.request import Logprob, RequestOptions, SamplingParams, Sequence
from tinyvllm.sampling.logprobs import logprobs_of
from tinyvllm.scheduler import Scheduled, Scheduler

PIECE = 128  # tokens; their logits over a vocabulary of 128 k are 64 MiB on the host


class PromptScore:
    """The scores of one prompt, computed in blocks of its own: the prefix cache has keys and values, and this needs logits.

    `logprobs` gets a dict for each token, None for the first, which follows nothing.
    """

    def __init__(self, request_id: str, prompt_token_ids: list[int], num_top: int, options: RequestOptions):
        self.request_id = request_id
        self.logprobs: list[dict[int, Logprob] | None] = [None]
        self._num_top = num_top
        self._borrows = False  # it has blocks, or waits for them
        self._blocks: list[int] = []
        self._sequence = Sequence(-1, request_id, prompt_token_ids, SamplingParams(), options=options)

    def __len__(self) -> int:
        return len(self._sequence.prompt_token_ids)

    @property
    def done(self) -> bool:
        return self._sequence.num_computed >= len(self)

    def borrow_blocks(self, scheduler: Scheduler) -> bool:
        """Borrow the blocks that the prompt needs, unless it has them; False while they are not free."""
        if not self._blocks:
            self._borrows = True
            self._blocks = scheduler.borrowed.take(scheduler.tables.most_blocks(len(self))) or []
            self._sequence.block_table = scheduler.tables.cycled(self._blocks, len(self)) if self._blocks else []
        return bool(self._blocks)

    def next_piece(self, max_tokens: int) -> Scheduled:
        start = self._sequence.num_computed
        return Scheduled(self._sequence, start, min(PIECE, max_tokens, len(self) - start), 0)

    def add(self, piece: Scheduled, logits: np.ndarray) -> None:
        """Logits float32 [T, V] of a piece; each row scores the token after its own."""
        tokens = self._sequence.token_ids(piece.start + 1, piece.start + piece.num_tokens + 1)
        self.logprobs += logprobs_of(logits[: len(tokens)], tokens, [self._num_top] * len(tokens))
        self._sequence.num_computed += piece.num_tokens

    def return_blocks(self, scheduler: Scheduler) -> None:
        """Give the blocks back, or stop waiting for them."""
        if self._borrows:
            scheduler.borrowed.give_back(self._blocks)
            self._blocks, self._sequence.block_table, self._borrows = [], [], False


class PromptScoring:
    """The prompts that wait for their scores, in their order. One of them has blocks at a time."""

    def __init__(self, requests: ActiveRequests, max_tokens: int):
        """At most `max_tokens` are computed a step."""
        self._requests, self._max_tokens = requests, max_tokens
        self._waiting: dict[str, PromptScore] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def request_ids(self) -> Collection[str]:
        """The requests that wait for scores."""
        return self._waiting.keys()

    def add(self, request_id: str, prompt_token_ids: list[int], num_top: int, options: RequestOptions) -> None:
        """Score a prompt, with the `num_top` most probable tokens at each position."""
        self._waiting[request_id] = PromptScore(request_id, prompt_token_ids, num_top, options)

    def step(self, compute: Callable[[Scheduled], np.ndarray]) -> None:
        """Compute a piece of the first prompt; hand its scores to the request when all are there.

        `compute` gives the logits float32 [T, V] of a piece. The request fails if its prompt needs more blocks than are free although
        nothing runs.
        """
        if not self._waiting:
            return
        score = next(iter(self._waiting.values()))
        with self._requests.boundary(self._requests[score.request_id], "prompt_logprobs"):
            self._compute_piece(score, compute)

    def _compute_piece(self, score: PromptScore, compute: Callable[[Scheduled], np.ndarray]) -> None:
        scheduler = self._requests.scheduler
        if score.borrow_blocks(scheduler):
            piece = score.next_piece(self._max_tokens)
            score.add(piece, compute(piece))
            if score.done:
                self.remove(score.request_id)
                self._requests.set_prompt_logprobs(score.request_id, score.logprobs)
        elif not scheduler.running:
            self.remove(score.request_id)
            error = f"prompt_logprobs: the KV cache has no room to compute the prompt of {len(score)} tokens a second time"
            self._requests.finish_request(score.request_id, "error", error)

    def remove(self, request_id: str) -> None:
        """Forget a request, if it waits here."""
        if (score := self._waiting.pop(request_id, None)) is not None:
            score.return_blocks(self._requests.scheduler)
