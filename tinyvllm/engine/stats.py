"""What a step took and what it cost whom: feeds the metrics, the receipts of requests that asked, and the rates that waits are told by."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinyvllm.metrics import EngineMetrics, FinishedRequest, NoMetrics, StepStats
from tinyvllm.request import RequestOutput
from tinyvllm.scheduler import Schedule, Scheduled, Scheduler

if TYPE_CHECKING:
    from tinyvllm.engine.output import ActiveRequest


@dataclass(frozen=True)
class Costs:
    """Bytes: of the weights that a step streams, and of one token's keys and values in all layers. Bytes a second: of memory."""

    weights: int
    token: int
    bandwidth: Callable[[], float]


class EngineStats:
    """One engine's. `begin`, then `spent` behind each phase, then `end`: what is between belongs to the phase that is named next."""

    def __init__(self, metrics: EngineMetrics | NoMetrics, costs: Costs, scheduler: Scheduler):
        self.metrics, self.costs, self.scheduler = metrics, costs, scheduler
        self.stats = StepStats()
        self.num_tokens = 0  # generated since the start
        self._last = self._begun = 0.0
        self._seen = (0, 0, 0)  # prefix queries, hits and evictions when the last step ended
        self._swaps = 0
        self._rounds = 1  # of this step
        self._asking: list[tuple[Scheduled, ActiveRequest]] = []  # who has asked for a receipt, of the last schedule's
        self._billed: dict[ActiveRequest, None] = {}  # whose receipts this step goes on, each once

    def begin(self) -> None:
        self.stats = StepStats()
        self._rounds = 1
        self._last = self._begun = time.perf_counter()

    def spent(self, phase: str) -> None:
        """What has passed since the last call was `phase`: schedule, prepare, run, sample or output."""
        now = time.perf_counter()
        setattr(self.stats, phase, getattr(self.stats, phase) + now - self._last)
        self._last = now

    def moved(self, schedule: Schedule, seconds: float, block_bytes: int) -> None:
        """Blocks went to the host and back in so many seconds."""
        out, back = len(schedule.swap_out) * block_bytes, len(schedule.swap_in) * block_bytes
        self.stats.swapped_out += out
        self.stats.swapped_in += back
        self.scheduler.rates.observe_copy(out + back, seconds)

    def preempted(self, schedule: Schedule) -> None:
        swapped = self.scheduler.num_swaps - self._swaps
        self._swaps = self.scheduler.num_swaps
        self.stats.swapped += swapped
        self.stats.recomputed += len(schedule.preempted) - swapped

    def launched(self, schedule: Schedule, owners: Mapping[int, ActiveRequest], rounds: int) -> None:
        """A step of `schedule` runs, `rounds` times over, for `owners`, by the ids of sequences."""
        self._rounds = rounds
        if not schedule.reused:  # else everybody is who he was in the last step
            self._admitted(schedule, owners)
        B = len(schedule.entries)
        for entry, owner in self._asking:
            receipt = owner.receipt
            if owner not in self._billed:
                receipt.steps += rounds
                receipt.batch_sizes[B] = receipt.batch_sizes.get(B, 0) + rounds
            receipt.bytes_moved += rounds * (self.costs.weights / B + (entry.start + 2 * entry.num_tokens) * self.costs.token)
            self._billed[owner] = None

    def _admitted(self, schedule: Schedule, owners: Mapping[int, ActiveRequest]) -> None:
        decodes = sum(entry.num_logits == entry.num_tokens == 1 for entry in schedule.entries)
        self.stats.prompt_tokens += schedule.num_tokens - decodes
        now, self._asking = time.monotonic(), []
        for entry in schedule.entries:
            owner = owners[entry.sequence.sequence_id]
            if owner.metrics.scheduled is None:
                owner.metrics.scheduled = now
            if owner.options.receipt:
                self._asking.append((entry, owner))

    def waited(self, owner: ActiveRequest, count: int) -> None:
        """A sequence of this request got `count` tokens now."""
        self.num_tokens += count
        self.stats.generated_tokens += count
        if isinstance(self.metrics, NoMetrics):
            return
        now, before = time.monotonic(), owner.last_token
        owner.last_token = now
        if before is None:
            self.stats.waits_first.append(now - owner.metrics.arrival)
        else:
            self.stats.waits_next += [(now - before) / count] * count

    def end(self) -> None:
        """The step is over."""
        stats, scheduler = self.stats, self.scheduler
        pool, prefix = scheduler.pool, scheduler.prefix
        stats.running, stats.waiting, stats.deferred = len(scheduler.running), len(scheduler.waiting), scheduler.waiting.num_deferred
        stats.blocks_used = pool.num_blocks - pool.num_free
        stats.blocks_cached = pool.num_evictable
        stats.blocks_free = pool.num_free - pool.num_evictable
        stats.tokens_held = min(sum(s.num_computed for s in scheduler.running), stats.blocks_used * pool.block_size)
        if prefix is not None:
            seen = prefix.queries, prefix.hits, prefix.evictions
            stats.queried_tokens, stats.cached_tokens, stats.evictions = (now - then for now, then in zip(seen, self._seen, strict=True))
            self._seen = seen
        if stats.run:
            scheduler.rates.observe_step(stats.prompt_tokens, (time.perf_counter() - self._begun) / self._rounds)
        for owner in self._billed:
            owner.receipt.device_seconds += stats.run
            owner.receipt.host_seconds += time.perf_counter() - self._begun - stats.run
        self._billed.clear()
        self.metrics.step(stats)

    def finished(self, output: RequestOutput, owner: ActiveRequest) -> None:
        """A request is over."""
        times, receipt = output.metrics, owner.receipt
        generated = [len(sequence.output_token_ids) for sequence in owner.sequences]
        if owner.options.receipt:
            receipt.swaps = sum(sequence.num_swaps for sequence in owner.sequences)
            receipt.preemptions, receipt.cached_tokens, receipt.output_tokens = times.preemptions, output.num_cached_tokens, sum(generated)
            receipt.queue_seconds = (times.scheduled or times.finished or times.arrival) - times.arrival
            if receipt.device_seconds:
                receipt.roof = receipt.bytes_moved / receipt.device_seconds / self.costs.bandwidth()
        self.metrics.request_finished(
            FinishedRequest(
                times.arrival,
                times.finished or time.monotonic(),
                times.scheduled,
                times.first_token,
                len(output.prompt_token_ids),
                output.num_cached_tokens,
                generated,
                [part.finish_reason or "abort" for part in output.outputs],
                len(output.outputs),
                owner.max_tokens,
                times.preemptions,
            )  # fmt: skip
        )
