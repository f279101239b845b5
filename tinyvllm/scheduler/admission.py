"""Whom the scheduler takes into its queue: what could never run, must not wait, or would be late is refused with the reason."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tinyvllm.errors import BusyError, RequestError
from tinyvllm.request import Sequence
from tinyvllm.scheduler.queue import rank_of

if TYPE_CHECKING:
    from tinyvllm.scheduler.scheduler import Scheduler


class AdmissionControl:
    """A scheduler's. Looks at what it has and changes nothing."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def check(self, sequence: Sequence) -> None:
        """RequestError for what could never run, BusyError for what must not wait or would be late."""
        self._refuse_impossible(sequence)
        self._refuse_busy(sequence)
        self._refuse_late(sequence)

    def _refuse_impossible(self, sequence: Sequence) -> None:
        limits, pool, tokens = self._scheduler.limits, self._scheduler.pool, len(sequence)
        if not tokens:
            raise RequestError(f"request {sequence.request_id}: the prompt is empty; give it at least one token")
        if tokens > limits.max_model_len - 1:
            raise RequestError(
                f"request {sequence.request_id}: a prompt of {tokens} tokens is beyond the {limits.max_model_len - 1} that max_model_len="
                f"{limits.max_model_len} leaves it; shorten the prompt or raise max_model_len"
            )
        needed = pool.blocks_for(tokens + 1)
        if needed > pool.num_blocks:
            raise RequestError(
                f"request {sequence.request_id}: a prompt of {tokens} tokens and one more need {needed} KV blocks, the cache has "
                f"{pool.num_blocks} of {pool.block_size} tokens; shorten the prompt or enlarge the cache"
            )
        left = pool.num_blocks - len(self._scheduler.pinned)
        if needed > left and needed - self._num_pinned(sequence) > left:
            raise RequestError(
                f"request {sequence.request_id}: a prompt of {tokens} tokens and one more need {needed} KV blocks, chunks leave {left} of "
                f"{pool.num_blocks}; release a chunk or enlarge the cache"
            )

    def _num_pinned(self, sequence: Sequence) -> int:
        """How many of the blocks that chunks hold a sequence begins with."""
        prefix, pinned = self._scheduler.prefix, self._scheduler.pinned
        return sum(block in pinned for block in prefix.find(self._scheduler.known_hashes(sequence))) if prefix else 0

    def _refuse_busy(self, sequence: Sequence) -> None:
        limits, waiting = self._scheduler.limits, self._scheduler.waiting
        requests, tokens = limits.max_queued_reqs, limits.max_queued_tokens
        if requests is not None and len(waiting) >= requests + self._scheduler.num_free_rows:
            raise BusyError(
                f"request {sequence.request_id}: {len(waiting)} requests wait already, the limit is {requests}; try again later",
                self.predicted_wait(sequence),
                "max_num_queued_reqs",
            )
        if tokens is not None and waiting and waiting.num_tokens + len(sequence) > tokens:
            raise BusyError(
                f"request {sequence.request_id}: {waiting.num_tokens} tokens wait already, {len(sequence)} more are beyond the "
                f"limit of {tokens}; try again later",
                self.predicted_wait(sequence),
                "max_num_queued_tokens",
            )

    def _refuse_late(self, sequence: Sequence) -> None:
        options = sequence.options
        if options.ttft_deadline_ms is None and options.deadline_ms is None:
            return
        first = self.predicted_wait(sequence)
        last = first + (sequence.params.max_tokens or 0) * (self._scheduler.rates.decode_step or 0.0)
        for name, allowed, predicted in (("ttft_deadline_ms", options.ttft_deadline_ms, first), ("deadline_ms", options.deadline_ms, last)):
            if allowed is not None and predicted * 1000 > allowed:
                raise BusyError(
                    f"request {sequence.request_id}: {name}={allowed:g} cannot be met, {predicted * 1000:.0f} ms are predicted; allow more "
                    "or try again later",
                    predicted - allowed / 1000,
                    "deadline",
                )

    def predicted_wait(self, sequence: Sequence | None) -> float:
        """Seconds until the first token of `sequence` (or of a short prompt), if it were added now, by the rates of the last steps."""
        scheduler, rates = self._scheduler, self._scheduler.rates
        rank = rank_of(sequence) if sequence else (0, math.inf, 1 << 62)
        tokens = len(sequence) if sequence else 1
        if sequence and scheduler.prefix:
            tokens -= scheduler.prefix.known(scheduler.known_hashes(sequence)) * scheduler.pool.block_size
        ahead = [other for other in scheduler.waiting if rank_of(other) < rank]
        tokens += sum(len(other) - other.num_computed for other in (*ahead, *scheduler.running))
        wait = tokens * (rates.prefill_token or 0.0)
        late = len(ahead) + 1 - scheduler.num_free_rows  # how many of those that run must end first
        if late > 0 and scheduler.running:
            left = sorted(self._tokens_left(other) for other in scheduler.running)
            turns, nth = divmod(late - 1, len(left))
            wait += (left[nth] + turns * left[-1]) * (rates.decode_step or 0.0)
        return wait

    def _tokens_left(self, sequence: Sequence) -> int:
        room, wanted = self._scheduler.limits.max_model_len - len(sequence), sequence.params.max_tokens
        return room if wanted is None else min(room, wanted - len(sequence.output_token_ids))
