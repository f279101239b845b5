"""Block tables of sequences: how they grow, and which of their blocks are freed because they have left the window.

A table keeps the numbers of freed blocks, and names the scratch block for blocks that were never held, so that row i has the blocks of the
tokens from i * block_size on. No query sees them: see docs/decisions/0050-blocks-are-freed-after-the-window.md. Where layers form several
groups, a row has a block of each (docs/decisions/0056-groups-of-layers-have-tables-of-their-own.md).
"""

from __future__ import annotations

from tinyvllm.cache.blocks import BlockPool
from tinyvllm.request import Sequence
from tinyvllm.windows import BlockGroups


class BlockTables:
    """Tables over one pool. `max_chunk` is the most tokens of a sequence that a step computes."""

    def __init__(self, pool: BlockPool, groups: BlockGroups, max_chunk: int) -> None:
        self.pool, self.groups, self.window, self._max_chunk = pool, groups, groups.window, max_chunk

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at most at a time."""
        return self.groups.most_blocks(num_tokens, self._max_chunk)

    def missing(self, sequence: Sequence, found: list[int]) -> int:
        """Blocks that a waiting sequence needs, at most at a time, in addition to the `found` ones, or to those that come from the host."""
        groups, rows = self.groups, self.groups.num_rows(found)
        first = self.window.first_block(max(rows * self.pool.block_size, sequence.num_swapped))
        whole = self.pool.blocks_for(len(sequence))
        seen = min(self.window.most_blocks(len(sequence), self._max_chunk), whole - first)
        return groups.full * (whole - rows) + groups.windowed * (seen - max(0, rows - first))

    def lacking(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that a sequence's table lacks for `num_tokens` tokens."""
        return max(0, self.groups.blocks_for(num_tokens) - len(sequence.block_table))

    def room(self, sequence: Sequence) -> int:
        """Tokens that a sequence's table has blocks for."""
        return self.groups.num_tokens(len(sequence.block_table))

    def held(self, sequence: Sequence) -> list[int]:
        """The blocks that a sequence holds."""
        return self.groups.held(sequence.block_table, sequence.num_freed)

    def free_passed(self, sequence: Sequence) -> None:
        """Free the published blocks that no query to come sees. The last computed token counts as one: a fork computes it again."""
        if not self.window.tokens:
            return
        first = min(self.window.first_block(sequence.num_computed - 1), sequence.num_published)
        if first > sequence.num_freed:
            self.pool.release(self.groups.windowed_blocks(sequence.block_table, sequence.num_freed, first))
            sequence.num_freed = first

    def cycled(self, blocks: list[int], num_tokens: int) -> list[int]:
        """A table of `num_tokens` tokens for a computation outside the schedule, in the `most_blocks` blocks that it holds.

        Where that is fewer than the tokens fill, each windowed group's block serves again once its tokens have left the window.
        """
        groups, rows = self.groups, self.pool.blocks_for(num_tokens)
        own, again = blocks[: groups.full * rows], blocks[groups.full * rows :]
        table: list[int] = []
        for i in range(rows):
            start = i * groups.windowed % len(again)
            table += own[i * groups.full : (i + 1) * groups.full] + again[start : start + groups.windowed]
        return table

    def release(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence back."""
        self.pool.release(self.held(sequence))
        sequence.block_table, sequence.num_freed = [], 0
