"""Which blocks of the KV cache are referenced, how often, and which are cached. Integers only: no tensors, no sequences, no tokens.

The device's pool holds one block more than this one counts, the scratch block that padded rows write to; it is never allocated.
The paging is that of PagedAttention (Kwon et al., 2023): a sequence owns a table of blocks and asks for the next when the last is full.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from tinyvllm.errors import ArgumentError, OutOfMemoryError


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, numbered from 0, each held by one or more references or free.

    A *cached* block is one whose contents can be found again (PrefixCache), held or not. Without references it counts as free, but
    allocation takes the other free blocks first, and then evicts the cached block whose last reference was released longest ago:
    `on_evict(block)` is called before the block is allocated. Every operation is O(1) a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ArgumentError(f"BlockPool: {name} must be 1 or more, got {value}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_cached = 0  # held or not
        self.on_evict: Callable[[int], None] | None = None
        self._references = [0] * num_blocks
        self._cached = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, -1, -1))  # not cached; a stack: what was used last is used next
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached without references, the next to evict first

    @property
    def num_free(self) -> int:
        """How many blocks `allocate` can return, including cached ones without references."""
        return len(self._free) + len(self._evictable)

    @property
    def scratch_block(self) -> int:
        """The block of the device's pool that is never allocated: a place in a table whose contents no query sees."""
        return self.num_blocks

    @property
    def num_evictable(self) -> int:
        """Cached blocks without a reference."""
        return len(self._evictable)

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks with one reference each, or none at all and OutOfMemoryError."""
        assert count >= 0, f"BlockPool: count must be 0 or more, got {count}"
        left = len(self._free) - count
        if left < 0:
            self._evict(count)
            left = 0
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

    def pin(self, blocks: Iterable[int]) -> None:
        """One more reference to each; every one of them must be held already or be cached."""
        references = self._references
        for block in blocks:
            assert block >= 0 and (references[block] or self._cached[block]), f"BlockPool: block {block} pinned while it is free"
            if not references[block]:
                del self._evictable[block]
            references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each. A block without any is free; of a table's cached blocks the last is evicted first."""
        references, cached, free = self._references, self._cached, self._free
        for block in reversed(blocks):
            assert block >= 0 and references[block] > 0, f"BlockPool: block {block} released while it is free"
            references[block] -= 1
            if not references[block]:
                if cached[block]:
                    self._evictable[block] = None
                else:
                    free.append(block)

    def reference_count(self, block: int) -> int:
        assert block >= 0, f"BlockPool: there is no block {block}"
        return self._references[block]

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def keep(self, block: int) -> None:
        """A held block is cached from now on: its contents are complete and no longer change."""
        assert block >= 0 and self._references[block] > 0, f"BlockPool: block {block} kept while it is free"
        assert not self._cached[block], f"BlockPool: block {block} was kept before"
        self._cached[block] = True
        self.num_cached += 1

    def forget(self, block: int) -> None:
        """A cached block is no longer cached, held or not; `on_evict` is not called."""
        assert block >= 0 and self._cached[block], f"BlockPool: block {block} forgotten while it is not cached"
        self._cached[block] = False
        self.num_cached -= 1
        if not self._references[block]:
            del self._evictable[block]
            self._free.append(block)

    def adopt(self) -> int | None:
        """A free block becomes cached without a reference, the next to be evicted; None if every block is held or cached."""
        if not self._free:
            return None
        block = self._free.pop()
        self._cached[block] = True
        self.num_cached += 1
        self._evictable[block] = None
        self._evictable.move_to_end(block, last=False)
        return block

    def cached_blocks(self) -> Iterator[int]:
        """Every cached block: the held ones by number, then the others, the last to be evicted first."""
        yield from [block for block in range(self.num_blocks) if self._cached[block] and self._references[block]]
        yield from list(reversed(self._evictable))

    def _evict(self, count: int) -> None:
        """Make `count` free blocks that are not cached, or change nothing and raise."""
        if count > self.num_free:
            raise OutOfMemoryError(
                f"BlockPool: {count} blocks wanted, {self.num_free} of {self.num_blocks} free; finish or preempt a sequence first"
            )
        while len(self._free) < count:
            block, _ = self._evictable.popitem(last=False)
            self._cached[block] = False
            self.num_cached -= 1
            if self.on_evict is not None:
                self.on_evict(block)
            self._free.append(block)
