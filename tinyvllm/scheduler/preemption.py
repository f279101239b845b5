"""What becomes of preempted sequences: blocks swapped to the host, and beams that wait for others."""

from __future__ import annotations

from collections.abc import Iterator

from tinyvllm.cache.blocks import BlockPool
from tinyvllm.request import Sequence
from tinyvllm.scheduler.forks import BlockCopies
from tinyvllm.scheduler.rates import Rates
from tinyvllm.scheduler.schedule import Schedule, SchedulerLimits
from tinyvllm.scheduler.tables import BlockTables


class HostSwap:
    """Keeps the blocks of a preempted sequence in host memory if two copies cost less than computing its tokens again.

    `host` counts the host's blocks; None never swaps. Blocks before the window are not kept.
    """

    def __init__(self, tables: BlockTables, host: BlockPool | None) -> None:
        self._pool, self._groups, self._host = tables.pool, tables.groups, host

    def pays_off(self, sequence: Sequence, limits: SchedulerLimits, rates: Rates) -> bool:
        """Whether a swap fits and is cheaper than recomputation, or is forced."""
        groups = self._groups
        blocks = groups.blocks_for(sequence.num_computed) - groups.windowed * sequence.num_freed
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
        groups = self._groups
        kept = groups.held(sequence.block_table[: groups.blocks_for(known)], groups.window.first_block(known))
        sequence.host_table, sequence.num_swapped = self._host.allocate(len(kept)), known
        filled = [copies.source_of(block) for block in kept]  # a fork's last block may still have to be copied
        plan.swap_out += zip(filled, sequence.host_table, strict=True)
        sequence.num_swaps += 1

    def swap_in(self, sequence: Sequence, plan: Schedule) -> None:
        """An admitted sequence continues after what was swapped out, if that is more than its cached prefix."""
        if sequence.num_swapped > sequence.num_computed:
            groups, found = self._groups, sequence.block_table
            first = groups.window.first_block(sequence.num_swapped)
            self._pool.release(groups.windowed_blocks(found, sequence.num_freed, first))  # found, and before the window by now
            size = groups.blocks_for(sequence.num_swapped)
            held = zip(groups.held([*range(size)], first), sequence.host_table, strict=True)  # as `swap_out` kept them
            hosted = [(place, block) for place, block in held if place >= len(found)]
            table = found + [self._pool.scratch_block] * (size - len(found))
            for (place, host), block in zip(hosted, self._pool.allocate(len(hosted)), strict=True):
                table[place] = block
                plan.swap_in.append((host, block))
            sequence.block_table, sequence.num_freed, sequence.num_computed = table, first, sequence.num_swapped
            if not groups.full:
                sequence.num_published = max(sequence.num_published, first)  # blocks before it are in no cache to be published
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
