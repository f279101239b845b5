"""The events of a prefix cache, and their bytes on the wire.

A batch is MessagePack: [seconds since 1970, [event, ...], data-parallel rank]; an event is a map with its name under "type". Names and
fields are those of vLLM's kv_events since its pull request 42892; fields at their default are left out. A block hash is the last
8 bytes of ours, big-endian: subscribers keep 64 bits.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import numpy as np

from tinyvllm.lazy_dataclass import dataclass

MEDIUM = "GPU"  # vLLM's word for the pool that steps compute on, whatever the device


@dataclass(slots=True)
class BlockStored:
    """Blocks of one chain, each after its parent, that can be found from now on. See CacheListener.stored."""

    parent: bytes | None
    salt: bytes | None
    hashes: list[bytes] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    adapter: str | None = None
    group: int | None = None


@dataclass(slots=True)
class BlockRemoved:
    """Blocks of one group that can no longer be found."""

    hashes: list[bytes] = field(default_factory=list)
    group: int | None = None


@dataclass(slots=True)
class AllBlocksCleared:
    """No block can be found any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventCollector:
    """A CacheListener that collects changes, until `take` hands them over; neighbours of one kind become one event."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def stored(
        self, hash: bytes, parent: bytes | None, tokens: bytes, salt: bytes | None, adapter: str | None = None, group: int | None = None
    ) -> None:
        last = self._events[-1] if self._events else None
        if not (isinstance(last, BlockStored) and parent is not None and last.hashes[-1] == parent):
            last = BlockStored(parent, salt, adapter=adapter, group=group)
            self._events.append(last)
        last.hashes.append(hash)
        last.tokens.append(tokens)

    def removed(self, hash: bytes, group: int | None = None) -> None:
        last = self._events[-1] if self._events else None
        if not isinstance(last, BlockRemoved) or last.group != group:
            last = BlockRemoved(group=group)
            self._events.append(last)
        last.hashes.append(hash)

    def cleared(self) -> None:
        self._events = [AllBlocksCleared()]  # what came before it no longer matters

    def take(self) -> list[Event]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events


def public_hash(hash: bytes) -> int:
    """The hash of a block as subscribers get it: 64 bits."""
    return int.from_bytes(hash[-8:], "big")


def batch_of(events: list[Event], seconds: float, block_size: int, rank: int) -> list[Any]:
    """The batch of some events as lists, maps and numbers, ready for MessagePack."""
    return [seconds, [_event_map(event, block_size) for event in events], rank]


def _event_map(event: Event, block_size: int) -> dict[str, Any]:
    if isinstance(event, AllBlocksCleared):
        return {"type": "AllBlocksCleared"}
    hashes = [public_hash(hash) for hash in event.hashes]
    group = {} if event.group is None else {"group_idx": event.group}
    if isinstance(event, BlockRemoved):
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM, **group}
    result: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None if event.parent is None else public_hash(event.parent),
        "token_ids": np.frombuffer(b"".join(event.tokens), "<i4").tolist(),
        "block_size": block_size,
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": event.adapter,
        **group,
    }
    if event.salt is not None:  # a digest: a salt may be derived from an API key, which a subscriber could search for
        result["extra_keys"] = [[event.salt.hex()], *[None] * (len(hashes) - 1)]
    return result
