"""Admission control: refuses requests that cannot run, that exceed the limits of the queue, or that would miss a deadline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from tinyvllm.errors import BusyError, RequestError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import Sequence
from tinyvllm.scheduler.prefixes import SequencePrefixes
from tinyvllm.scheduler.queue import WaitingQueue, rank_of
from tinyvllm.scheduler.rates import Rates
from tinyvllm.scheduler.schedule import SchedulerLimits
from tinyvllm.scheduler.tables import BlockTables


@dataclass(frozen=True)
class AdmissionControl:
    """A view of a scheduler's state at one moment, which it does not change. `pinned` are the blocks that segments hold."""

    limits: SchedulerLimits
    tables: BlockTables
    prefixes: SequencePrefixes
    waiting: WaitingQueue
    running: list[Sequence]
    pinned: Mapping[int, int]
    rates: Rates

    def check(self, sequence: Sequence) -> None:
        """RequestError for a request that can never run, BusyError for one that must not wait or would be late."""
        self._refuse_impossible(sequence)
        self._refuse_busy(sequence)
        self._refuse_late(sequence)

    def predicted_wait(self, sequence: Sequence | None) -> float:
        """Seconds until the first token of `sequence` (or of a short prompt), if it were added now, by the rates of the last steps."""
        rates = self.rates
        return self._wait(sequence, lambda tokens: rates.prefill_token or 0.0, rates.decode_step or 0.0)

    def _wait(self, sequence: Sequence | None, prefill_token: Callable[[int], float], decode_step: float) -> float:
        """The same by given rates: seconds of a prompt token in steps of that many, and of a step of decodes."""
        rank = rank_of(sequence) if sequence else (0, math.inf, 1 << 62)
        tokens = len(sequence) if sequence else 1
        if sequence:
            tokens -= self.tables.groups.num_tokens(len(self.prefixes.find(sequence)))
        ahead = [other for other in self.waiting if rank_of(other) < rank]
        tokens += sum(len(other) - other.num_computed for other in (*ahead, *self.running))
        wait = tokens * prefill_token(min(tokens, self.limits.max_batched_tokens))
        num_late = len(ahead) + 1 - self._num_free_rows  # how many running sequences must end first
        if num_late > 0 and self.running:
            remaining = sorted(self._tokens_left(other) for other in self.running)
            turns, nth = divmod(num_late - 1, len(remaining))
            wait += (remaining[nth] + turns * remaining[-1]) * decode_step
        return wait

    @property
    def _num_free_rows(self) -> int:
        return self.limits.max_num_seqs - len(self.running)

    def _tokens_left(self, sequence: Sequence) -> int:
        room, wanted = self.limits.max_model_len - len(sequence), sequence.params.max_tokens
        return room if wanted is None else min(room, wanted - len(sequence.output_token_ids))

    def _refuse_impossible(self, sequence: Sequence) -> None:
        limits, pool, tokens = self.limits, self.tables.pool, len(sequence)
        if not tokens:
            raise RequestError(f"request {sequence.request_id}: the prompt is empty; give it at least one token")
        if tokens > limits.max_model_len - 1:
            raise RequestError(
                f"request {sequence.request_id}: the prompt has {tokens} tokens, max_model_len={limits.max_model_len} allows at most "
                f"{limits.max_model_len - 1}; shorten the prompt or raise max_model_len"
            )
        needed = self.tables.most_blocks(tokens + 1)
        if needed > pool.num_blocks:
            raise RequestError(
                f"request {sequence.request_id}: a prompt of {tokens} tokens and one more need {needed} KV blocks, the cache has "
                f"{pool.num_blocks} of {pool.block_size} tokens; shorten the prompt or enlarge the cache"
            )
        available = pool.num_blocks - len(self.pinned)
        if needed > available and needed - self._num_pinned(sequence) > available:
            raise RequestError(
                f"request {sequence.request_id}: a prompt of {tokens} tokens and one more need {needed} KV blocks, segments leave "
                f"{available} of {pool.num_blocks}; release a segment or enlarge the cache"
            )

    def _num_pinned(self, sequence: Sequence) -> int:
        """How many pinned blocks a sequence begins with."""
        return sum(block in self.pinned for block in self.prefixes.find(sequence))

    def _refuse_busy(self, sequence: Sequence) -> None:
        limits, waiting = self.limits, self.waiting
        requests, tokens = limits.max_queued_reqs, limits.max_queued_tokens
        if requests is not None and len(waiting) >= requests + self._num_free_rows:
            raise BusyError(
                f"request {sequence.request_id}: {len(waiting)} requests are waiting, the limit is {requests}; try again later",
                self.predicted_wait(sequence),
                "max_num_queued_reqs",
            )
        if tokens is not None and waiting and waiting.num_tokens + len(sequence) > tokens:
            raise BusyError(
                f"request {sequence.request_id}: {waiting.num_tokens} tokens are waiting, {len(sequence)} more exceed the limit of "
                f"{tokens}; try again later",
                self.predicted_wait(sequence),
                "max_num_queued_tokens",
            )

    def _refuse_late(self, sequence: Sequence) -> None:
        options = sequence.options
        if options.ttft_deadline_ms is None and options.deadline_ms is None:
            return
        decode_step = self.rates.certain_decode_step
        first = self._wait(sequence, self.rates.certain_prefill_token, decode_step)
        last = first + (sequence.params.max_tokens or 0) * decode_step
        for name, allowed, predicted in (("ttft_deadline_ms", options.ttft_deadline_ms, first), ("deadline_ms", options.deadline_ms, last)):
            if allowed is not None and predicted * 1000 > allowed:
                raise BusyError(
                    f"request {sequence.request_id}: {name}={allowed:g} cannot be met, {predicted * 1000:.0f} ms are predicted; allow more "
                    "time or try again later",
                    predicted - allowed / 1000,
                    "deadline",
                )
