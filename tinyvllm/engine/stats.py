"""Timings of steps and costs of requests: an observer that feeds the metrics, the receipts of requests and the scheduler's rates."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from functools import cache

from tinyvllm.engine.beam import BeamState
from tinyvllm.engine.energy import OFF, set_energy
from tinyvllm.engine.observer import EngineObserver
from tinyvllm.engine.output import ActiveRequest
from tinyvllm.errors import BusyError, KernelError, OutOfMemoryError, TinyvllmError, ToolchainError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.metrics import EngineMetrics, FinishedRequest, NoMetrics, StepStats, add_counts
from tinyvllm.request import Energy, RequestOutput
from tinyvllm.scheduler import Schedule, Scheduled, Scheduler

log = logging.getLogger("tinyvllm")


@dataclass(frozen=True)
class Costs:
    """Bytes: of the weights that a step streams, and of one token's keys and values in all layers. Bytes a second: of memory, 0 where
    several memories are read.
    """

    weights: int
    token: int
    bandwidth: Callable[[], float]


def multiply_rate(device: str, formats: Collection[str], measure: bool) -> float:
    """Operations a second of products of many rows in the fastest of `formats`: as `plan` and `bench` measured it, or now with `measure`,
    a second or less. 0 where it was not measured, or cannot be.
    """
    from tinyvllm.runner.roof import MIN_BYTES, kept_operations, measured_roof

    if measure and not kept_operations(device, formats):
        try:
            measured_roof(device, formats, MIN_BYTES)
        except (MemoryError, OutOfMemoryError, KernelError, ToolchainError) as error:
            log.warning("roof: the rate of products of %s is not measured: %s", device, error)
    return kept_operations(device, formats)


@cache
def memory_bandwidth(device: str) -> float:
    """Bytes a second that this machine reads from the memory of a device: the best that its first processes measured, 0.2 s each.

    The KV cache may have left too little memory for that: then a quarter is read, and without room for it the figure is 0.
    """
    from tinyvllm.runner.memory import READ_BYTES
    from tinyvllm.runner.roof import measured_bandwidth

    for nbytes in (READ_BYTES, READ_BYTES // 4):
        try:
            return measured_bandwidth(device, nbytes)
        except (MemoryError, OutOfMemoryError) as error:
            log.warning("roof: the bandwidth of %s is not measured with %d bytes: %s", device, nbytes, error)
    return 0.0


class EngineStats(EngineObserver):
    """The statistics of one engine. `step` has those of the current step, or of the last one between two steps."""

    def __init__(self, metrics: EngineMetrics | NoMetrics, costs: Costs, scheduler: Scheduler, num_captures: Callable[[], int] = lambda: 0,
                 architecture: str = ""):  # fmt: skip
        """`num_captures` counts what was captured so far: a step that captures or compiles says nothing about the next one's time.
        `architecture` is what computes the tokens, for receipts.
        """
        self.bill: Callable[[ActiveRequest], Energy] = lambda request: OFF  # the energy of a request that has finished
        self.architecture = architecture
        self.metrics, self.costs, self.scheduler, self._num_captures = metrics, costs, scheduler, num_captures
        self._captures_before = num_captures()  # at the start of the step
        self.speculation = ""  # the method that guesses drafts
        self.step = StepStats()
        self.num_steps = 0  # since the start; each has streamed the weights once
        self.num_tokens = 0  # generated since the start
        self._step_start = self._phase_start = 0.0
        self._prefix_counts = (0, 0, 0)  # queries, hits and evictions of the prefix cache at the end of the last step
        self._num_swaps = 0  # of sequences, at the last preemption
        self._steps_of_launch = 1  # how often the last schedule ran
        self._with_receipt: list[tuple[Scheduled, ActiveRequest]] = []  # entries of the last schedule whose requests want a receipt
        self.billed: dict[ActiveRequest, None] = {}  # requests whose receipts have this step, each once

    def engine_closed(self) -> None:
        self._num_captures = lambda: 0  # the function holds the runner, and with it the weights
        self.bill = lambda request: OFF

    def step_started(self) -> None:
        self.step = StepStats()
        self._captures_before = self._num_captures()
        self._steps_of_launch = 1
        self._phase_start = self._step_start = time.perf_counter()

    def phase_ended(self, phase: str) -> None:
        now = time.perf_counter()
        setattr(self.step, phase, getattr(self.step, phase) + now - self._phase_start)
        self._phase_start = now

    def step_scheduled(self, schedule: Schedule) -> None:
        if schedule.preempted:
            swapped = self.scheduler.num_swaps - self._num_swaps
            self._num_swaps = self.scheduler.num_swaps
            self.step.swapped += swapped
            self.step.recomputed += len(schedule.preempted) - swapped

    def blocks_moved(self, schedule: Schedule, seconds: float) -> None:
        if schedule.swap_out or schedule.swap_in:
            block_bytes = self.scheduler.limits.block_bytes
            out, back = len(schedule.swap_out) * block_bytes, len(schedule.swap_in) * block_bytes
            self.step.swapped_out += out
            self.step.swapped_in += back
            self.scheduler.rates.observe_copy(out + back, seconds)

    def step_launched(self, schedule: Schedule, owners: Mapping[int, ActiveRequest], num_steps: int) -> None:
        self.num_steps += num_steps
        self._steps_of_launch = num_steps
        if not schedule.reused:  # otherwise the batch is that of the last step
            self._count_batch(schedule, owners)
        B = len(schedule.entries)
        for entry, owner in self._with_receipt:
            receipt = owner.receipt
            if owner not in self.billed:
                receipt.steps += num_steps
                receipt.batch_sizes[B] = receipt.batch_sizes.get(B, 0) + num_steps
            receipt.bytes_moved += num_steps * (self.costs.weights / B + (entry.start + 2 * entry.num_tokens) * self.costs.token)
            self.billed[owner] = None

    def _count_batch(self, schedule: Schedule, owners: Mapping[int, ActiveRequest]) -> None:
        decodes = sum(entry.num_tokens for entry in schedule.entries if entry.is_decode or entry.drafts)
        self.step.prompt_tokens += schedule.num_tokens - decodes
        now, self._with_receipt = time.monotonic(), []
        for entry in schedule.entries:
            owner = owners[entry.sequence.sequence_id]
            if owner.metrics.scheduled is None:
                owner.metrics.scheduled = now
            if owner.options.receipt:
                self._with_receipt.append((entry, owner))

    def tokens_appended(self, request: ActiveRequest, count: int, forced: bool = False) -> None:
        self.num_tokens += count
        self.step.generated_tokens += count
        if forced:
            self.step.forced_tokens += count
        if isinstance(self.metrics, NoMetrics):
            return
        now, before = time.monotonic(), request.last_token_time
        request.last_token_time = now
        if before is None:
            self.step.waits_first.append(now - request.metrics.arrival)
        else:
            self.step.waits_next += [(now - before) / count] * count

    def drafts_checked(self, request: ActiveRequest, num_drafts: int, num_accepted: int) -> None:
        self.step.num_drafts += 1
        self.step.draft_tokens += num_drafts
        self.step.accepted_tokens += num_accepted
        add_counts(self.step.accepted_per_pos, [1] * num_accepted)
        request.metrics.draft_tokens += num_drafts
        request.metrics.accepted_tokens += num_accepted

    def step_finished(self) -> None:
        stats, scheduler = self.step, self.scheduler
        pool, prefix = scheduler.pool, scheduler.prefix
        stats.running, stats.waiting, stats.deferred = len(scheduler.running), len(scheduler.waiting), scheduler.waiting.num_deferred
        stats.blocks_used = pool.num_blocks - pool.num_free
        stats.blocks_cached = pool.num_evictable
        stats.blocks_free = pool.num_free - pool.num_evictable
        stats.tokens_held = min(sum(s.num_computed for s in scheduler.running), stats.blocks_used * pool.block_size)
        if prefix is not None:
            counts = prefix.queries, prefix.hits, prefix.evictions
            stats.queried_tokens, stats.cached_tokens, stats.evictions = (
                now - before for now, before in zip(counts, self._prefix_counts, strict=True)
            )
            self._prefix_counts = counts
        if stats.run and not stats.num_drafts and self._num_captures() == self._captures_before:
            scheduler.rates.observe_step(stats.prompt_tokens, (time.perf_counter() - self._step_start) / self._steps_of_launch)
        for owner in self.billed:
            owner.receipt.device_seconds += stats.run
            owner.receipt.host_seconds += time.perf_counter() - self._step_start - stats.run
        self.billed.clear()
        self.metrics.step(stats)

    def request_refused(self, request: ActiveRequest, error: TinyvllmError) -> None:
        if isinstance(error, BusyError):
            self.metrics.rejected(error.reason)

    def request_finished(self, request: ActiveRequest, output: RequestOutput) -> None:
        times, generated = output.metrics, [len(sequence.output_token_ids) for sequence in request.sequences]
        if request.options.wants_energy:
            set_energy(request, output, self.bill(request))
        if request.options.receipt:
            self._complete_receipt(request, output, sum(generated))
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
                request.max_tokens,
                times.preemptions,
            )
        )

    def _complete_receipt(self, request: ActiveRequest, output: RequestOutput, num_tokens: int) -> None:
        times, receipt = output.metrics, request.receipt
        receipt.architecture = self.architecture
        receipt.swaps = sum(sequence.num_swaps for sequence in request.sequences)
        receipt.preemptions, receipt.cached_tokens, receipt.output_tokens = times.preemptions, output.num_cached_tokens, num_tokens
        receipt.speculation = "off: beam search" if self.speculation and isinstance(request, BeamState) else self.speculation
        receipt.draft_tokens, receipt.accepted_tokens = times.draft_tokens, times.accepted_tokens
        receipt.queue_seconds = (times.scheduled or times.finished or times.arrival) - times.arrival
        if receipt.device_seconds and (bandwidth := self.costs.bandwidth()):
            receipt.roof = receipt.bytes_moved / receipt.device_seconds / bandwidth
