"""Block tables of sequences: how they grow, and which of their blocks are freed because they have left the window.

A table keeps the numbers of freed blocks, and names the scratch block for blocks that were never held, so that block i has the tokens from
i * block_size on. No query sees them: see docs/decisions/0050-blocks-are-freed-after-the-window.md.
"""

from __future__ import annotations

from tinyvllm.cache.blocks import BlockPool
from tinyvllm.request import Sequence
from tinyvllm.windows import Window


class BlockTables:
    """Tables over one pool. `max_chunk` is the most tokens of a sequence that a step computes."""

    def __init__(self, pool: BlockPool, window: Window, max_chunk: int) -> None:
        self.pool, self.window, self._max_chunk = pool, window, max_chunk

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at most at a time."""
        return self.window.most_blocks(num_tokens, self._max_chunk)

    def missing(self, sequence: Sequence, found: list[int]) -> int:
        """Blocks that a waiting sequence needs, at most at a time, in addition to the `found` ones, or to those that come from the host."""
        size = self.pool.block_size
        first = self.window.first_block(max(len(found) * size, sequence.num_swapped))
        needed = min(self.most_blocks(len(sequence)), self.pool.blocks_for(len(sequence)) - first)
        return needed - max(0, len(found) - first)

    def free_passed(self, sequence: Sequence) -> None:
        """Free the published blocks that no query to come sees. The last computed token counts as one: a fork computes it again."""
        if not self.window.tokens:
            return
        first = min(self.window.first_block(sequence.num_computed - 1), sequence.num_published)
        if first > sequence.num_freed:
            self.pool.release(sequence.block_table[sequence.num_freed : first])
            sequence.num_freed = first

    def cycled(self, blocks: list[int], num_tokens: int) -> list[int]:
        """A table of `num_tokens` tokens for a computation outside the schedule, in the `most_blocks` blocks that it holds.

        Where that is fewer than the tokens fill, each block serves again once its tokens have left the window.
        """
        return [blocks[i % len(blocks)] for i in range(self.pool.blocks_for(num_tokens))]

    def release(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence back."""
        self.pool.release(sequence.held_blocks)
        sequence.block_table, sequence.num_freed = [], 0
