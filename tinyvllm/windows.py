"""Which blocks of a KV cache sliding windows still need, and how a table holds the blocks of several groups of layers. Integers only."""

from __future__ import annotations

import functools

from tinyvllm.integers import ceil_div
from tinyvllm.lazy_dataclass import dataclass


@dataclass(frozen=True)
class Window:
    """A query sees the last `tokens` tokens, its own included; with 0 it sees all. A block holds `block_size` tokens."""

    tokens: int
    block_size: int

    def first_block(self, position: int) -> int:
        """The first block that a query at `position` sees; no later query sees one before it."""
        return max(0, position - self.tokens + 1) // self.block_size if self.tokens else 0

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at most at a time, if up to `chunk` of them are computed in a step.

        Two more than window and chunk fill: neither begins with a block, and blocks are freed when another one is full.
        """
        whole = ceil_div(num_tokens, self.block_size)
        return min(whole, ceil_div(self.tokens + chunk, self.block_size) + 2) if self.tokens else whole


@dataclass(frozen=True)
class BlockGroups:
    """Groups of layers, each with blocks of its own: `full` ones whose queries see all tokens, then `windowed` ones with a `window`.

    A table is a list of rows, one for each `block_size` tokens: a block of each group, in this order. Of a table whose first `num_freed`
    rows have left the window, the windowed groups' blocks in these rows are not held. A model of one group has rows of one block.
    """

    window: Window
    full: int = 0
    windowed: int = 1

    @functools.cached_property  # read for each sequence of a step
    def count(self) -> int:
        """Blocks of a row."""
        return self.full + self.windowed

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of a table of `num_tokens` tokens."""
        return ceil_div(num_tokens, self.window.block_size) * self.count

    def num_rows(self, table: list[int]) -> int:
        """Rows of a table."""
        return len(table) // self.count

    def num_tokens(self, num_blocks: int) -> int:
        """Tokens whose rows `num_blocks` blocks make."""
        return num_blocks // self.count * self.window.block_size

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """As `Window.most_blocks`, in all groups."""
        whole = ceil_div(num_tokens, self.window.block_size)
        return self.full * whole + self.windowed * self.window.most_blocks(num_tokens, chunk)

    def num_seen(self, stop: int, start: int = 0) -> int:
        """Blocks in rows start to stop - 1 that the query after them sees."""
        first = self.window.first_block(stop * self.window.block_size)
        return self.full * (stop - start) + self.windowed * (stop - max(start, first))

    def longest(self, num_blocks: int, num_tokens: int, chunk: int) -> int:
        """The tokens of the longest sequence, up to `num_tokens`, that holds at most `num_blocks` blocks at a time."""
        if self.most_blocks(num_tokens, chunk) <= num_blocks:
            return num_tokens
        most = self.window.most_blocks(num_tokens, chunk)  # rows of a longer sequence are in the full groups alone
        rows = num_blocks // self.count
        if self.full and rows >= most:
            rows = (num_blocks - self.windowed * most) // self.full
        return min(num_tokens, rows * self.window.block_size)

    def held(self, table: list[int], num_freed: int) -> list[int]:
        """The blocks of a table that it holds."""
        if not num_freed:
            return table
        start = num_freed * self.count
        return [block for i, block in enumerate(table[:start]) if i % self.count < self.full] + table[start:]

    def windowed_blocks(self, table: list[int], start: int, stop: int) -> list[int]:
        """The windowed groups' blocks in rows start to stop - 1."""
        return [block for i, block in enumerate(table[start * self.count : stop * self.count]) if i % self.count >= self.full]
