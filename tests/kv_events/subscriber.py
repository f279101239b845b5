"""A subscriber of cache events as routers write them: typed decoding, gaps filled by replay, an index of the blocks that are stored."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import pytest

zmq = pytest.importorskip("zmq", reason="the extra `events` is not installed")
msgspec = pytest.importorskip("msgspec", reason="the extra `events` is not installed")

TIMEOUT_MS = 30_000
END = (-1).to_bytes(8, "big", signed=True)


class Event(msgspec.Struct, tag=True, tag_field="type", forbid_unknown_fields=True):
    pass


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """`blocks` has of each stored block the hash before it, its tokens and its salt; `gaps` how often a number was missing."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: str = "", rcvhwm: int = 0, buffer: int = 0):
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.set(zmq.RCVHWM, rcvhwm)
        if buffer:
            self._live.set(zmq.RCVBUF, buffer)
        self._live.connect(endpoint)
        self._live.subscribe(topic)
        self._replay_endpoint = replay_endpoint
        self._decode = msgspec.msgpack.Decoder(Batch).decode
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], str | None]] = {}
        self.next, self.gaps, self.replayed = 0, 0, 0
        self.topics: set[bytes] = set()
        self.batches: list[Batch] = []

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._context.destroy(linger=0)

    def has_message(self, timeout_ms: int = TIMEOUT_MS) -> bool:
        return bool(self._live.poll(timeout_ms))

    def read_to(self, last: int) -> None:
        """Read until the batch of number `last` is in the index; replays what is missing before it."""
        while self.next <= last:
            assert self.has_message(), f"no batch {self.next} in {TIMEOUT_MS} ms"
            topic, number, payload = self._live.recv_multipart()
            self.topics.add(topic)
            self._take(int.from_bytes(number, "big"), payload)

    def receive(self) -> tuple[bytes, int, Batch]:
        """The next message, outside the index."""
        assert self.has_message()
        topic, number, payload = self._live.recv_multipart()
        return topic, int.from_bytes(number, "big"), self._decode(payload)

    def _take(self, number: int, payload: bytes) -> None:
        if number > self.next:
            self.gaps += 1
            for missed, old in self.replay(self.next):
                if self.next <= missed < number:
                    self.replayed += 1
                    self._apply(missed, old)
        if number >= self.next:
            self._apply(number, payload)

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """What the ROUTER socket sends from batch `start` on."""
        with self._context.socket(zmq.DEALER) as socket:
            socket.set(zmq.RCVHWM, 0)
            socket.connect(self._replay_endpoint)
            socket.send_multipart((b"", start.to_bytes(8, "big")))
            messages: list[tuple[int, bytes]] = []
            while True:
                assert socket.poll(TIMEOUT_MS)
                empty, number, payload = socket.recv_multipart()
                assert empty == b""
                if number == END:
                    assert payload == b""
                    return messages
                messages.append((int.from_bytes(number, "big"), payload))

    def _apply(self, number: int, payload: bytes) -> None:
        batch = self._decode(payload)
        self.batches.append(batch)
        self.next = number + 1
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockRemoved):
                for hash in event.block_hashes:
                    del self.blocks[hash]  # every removed block was stored
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        salts: list[Any] = event.extra_keys or [None] * len(event.block_hashes)
        for i, hash in enumerate(event.block_hashes):
            assert hash not in self.blocks
            self.blocks[hash] = (parent, tuple(event.token_ids[i * size : (i + 1) * size]), salts[i] and salts[i][0])
            parent = hash
