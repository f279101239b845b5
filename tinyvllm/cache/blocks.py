"""Which blocks of the KV cache are taken, and how often. Integers only: knows no tensors, no sequences and no tokens' contents.

The device's pool holds one block more than this one counts, the scratch block that padded rows write to; it is never given away.
The paging is that of PagedAttention (Kwon et al., 2023): a sequence owns a table of blocks and asks for the next when the last is full.
"""

from __future__ import annotations

from collections.abc import Iterable

from tinyvllm.errors import ArgumentError, OutOfMemoryError


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, numbered from 0, each free or held by one or more references."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ArgumentError(f"BlockPool: {name} must be 1 or more, got {value}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: what was used last is used next

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks with one reference each, or none at all and OutOfMemoryError."""
        assert count >= 0, f"BlockPool: asked for {count} blocks"
        left = len(self._free) - count
        if left < 0:
            raise OutOfMemoryError(
                f"BlockPool: {count} blocks wanted, {len(self._free)} of {self.num_blocks} free; finish or preempt a sequence first"
            )
        blocks = self._free[left:]
        del self._free[left:]
        blocks.reverse()
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each; every one of them must be held already."""
        references = self._references
        for block in blocks:
            assert block >= 0 and references[block] > 0, f"BlockPool: block {block} shared while it is free"
            references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each; a block without any goes back to the free ones."""
        references, free = self._references, self._free
        for block in blocks:
            assert block >= 0 and references[block] > 0, f"BlockPool: block {block} released while it is free"
            references[block] -= 1
            if not references[block]:
                free.append(block)

    def reference_count(self, block: int) -> int:
        assert block >= 0, f"BlockPool: there is no block {block}"
        return self._references[block]

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
