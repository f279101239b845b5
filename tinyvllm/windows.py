"""Which blocks of a KV cache a sliding window still needs. Integers only."""

from __future__ import annotations

from dataclasses import dataclass

from tinyvllm.integers import ceil_div


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
