"""What becomes of preempted sequences: blocks swapped to the host, and beams that wait for others."""

from __future__ import annotations

from collections.abc import Iterator

from tinyvllm.cache.blocks import BlockPool
from tinyvllm.request import Sequence
from tinyvllm.scheduler.forks import BlockCopies
from tinyvllm.scheduler.rates import Rates
from tinyvllm.scheduler.schedule import Schedule, SchedulerLimits


class HostSwap:
    """Keeps the blocks of a preempted sequence in host memory if two copies cost less than computing its tokens again.

    `host` counts the host's blocks; None never swaps.
    """

    def __init__(self, pool: BlockPool, host: BlockPool | None) -> None:
        self._pool, self._host = pool, host

    def pays_off(self, sequence: Sequence, limits: SchedulerLimits, rates: Rates) -> bool:
        """Whether a swap fits and is cheaper than recomputation, or is forced."""
        blocks = self._pool.blocks_for(sequence.num_computed)
        if self._host is None or not blocks or blocks > self._host.num_free or limits.preemption == "recompute":
            return False
        if limits.preemption == "swap":
            return True
        recompute = sequence.num_computed * (rates.prefill_token or 0.0)
        return 2 * blocks * limits.block_bytes / rates.copy_bandwidth < recompute

    def swap_out(self, sequence: Sequence, plan: Schedule, copies: BlockCopies) -> None:
        """Have the blocks with the sequence's computed tokens copied to the host."""
        assert self._host is not None
        known = min(sequence.num_computed, len(sequence) - 1)
        blocks = self._pool.blocks_for(known)
        sequence.host_table, sequence.num_swapped = self._host.allocate(blocks), known
        filled = [copies.source_of(block) for block in sequence.block_table[:blocks]]  # a fork's last block may still have to be copied
        plan.swap_out += zip(filled, sequence.host_table, strict=True)
        sequence.num_swaps += 1

    def swap_in(self, sequence: Sequence, plan: Schedule) -> None:
        """An admitted sequence continues after what was swapped out, if that is more than its cached prefix."""
        if sequence.num_swapped > sequence.num_computed:
            found = len(sequence.block_table)
            hosted = sequence.host_table[found:]
            sequence.block_table = sequence.block_table + self._pool.allocate(len(hosted))
            plan.swap_in += zip(hosted, sequence.block_table[found:], strict=True)
            sequence.num_computed = sequence.num_swapped
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Free the sequence's host blocks."""
        if sequence.host_table and self._host is not None:
            self._host.release(sequence.host_table)
            sequence.host_table, sequence.num_swapped = [], 0


class PausedSequences:
    """Sequences that were preempted with nothing to compute: beams that wait for others.

    In the queue such a sequence would be admitted again before the one that it waits for.
    """

    def __init__(self) -> None:
        self._lengths: dict[Sequence, int] = {}  # and how long each was then

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._lengths)

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, sequence: Sequence) -> None:
        self._lengths[sequence] = len(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Drop one; False if it is not paused."""
        return self._lengths.pop(sequence, None) is not None

    def take_ready(self) -> list[Sequence]:
        """Those that have a token to compute now; they are no longer paused."""
        ready = [sequence for sequence, length in self._lengths.items() if len(sequence) > length]
        for sequence in ready:
            del self._lengths[sequence]
        return ready
