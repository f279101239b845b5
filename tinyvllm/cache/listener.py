"""What a prefix cache reports while its contents change: a protocol, so that the cache needs none of its listeners."""

from __future__ import annotations

from typing import Protocol


class CacheListener(Protocol):
    """Gets each change of a PrefixCache at once and in order, in the engine's thread. It must be quick, must not raise, and must not
    change the cache."""

    def stored(
        self, hash: bytes, parent: bytes | None, tokens: bytes, salt: bytes | None, adapter: str | None = None, group: int | None = None
    ) -> None:
        """A block can be found from now on.

        parent  hash of the block before it; None for the first block of a chain
        tokens  its `block_size` token ids, int32 little-endian
        salt    of the first block of a chain with a salt, a digest of the salt under the cache's key; else None
        adapter  the name of the adapter that computed it, as far as it is known; else None
        group   of its layers, where they form several; else None
        """
        ...

    def removed(self, hash: bytes, group: int | None = None) -> None:
        """A block can no longer be found; `group` is that of `stored`."""
        ...

    def cleared(self) -> None:
        """No block can be found any more."""
        ...
