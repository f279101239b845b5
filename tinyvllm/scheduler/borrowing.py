"""Blocks for computations outside the schedule, such as the log-probabilities of a prompt."""

from __future__ import annotations

from tinyvllm.cache.blocks import BlockPool


class BorrowedBlocks:
    """Blocks that a borrower outside the schedule holds for a few steps. One borrower at a time; no request is ended for want of them.

    `num_held` blocks are borrowed now; `num_wanted` free blocks are withheld from admission until they can be borrowed.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.num_held = self.num_wanted = 0

    def take(self, count: int) -> list[int] | None:
        """`count` free blocks, or None if there are fewer; then nothing is admitted into them before they have been taken."""
        assert not self.num_held, "BorrowedBlocks: blocks are borrowed already"
        if count > self._pool.num_free:
            self.num_wanted = count
            return None
        self.num_wanted, self.num_held = 0, count
        return self._pool.allocate(count)

    def give_back(self, blocks: list[int]) -> None:
        """Free what was borrowed; an empty list withdraws the wish for blocks that were not free."""
        self._pool.release(blocks)
        self.num_wanted = self.num_held = 0
