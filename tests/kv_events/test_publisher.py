"""The publisher with real sockets: frames, gaps, replays, and that no subscriber holds up the engine's thread."""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.kv_events.subscriber import AllBlocksCleared, BlockRemoved, BlockStored, Subscriber, zmq
from tinyvllm.errors import ArgumentError
from tinyvllm.kv_events.config import KVEventsConfig
from tinyvllm.kv_events.events import Event, EventCollector, public_hash
from tinyvllm.kv_events.publisher import Publisher
from tinyvllm.kv_events.replays import MAX_ANSWERS, Replays

FREE = "tcp://127.0.0.1:*"
SIZE = 4  # tokens of a block


@contextmanager
def opened(size: int = SIZE, **options: Any) -> Iterator[Publisher]:
    publisher = Publisher(KVEventsConfig(**{"endpoint": FREE, "replay_endpoint": FREE} | options), size)
    try:
        yield publisher
    finally:
        publisher.close()
        assert not publisher._thread.is_alive()


def hash_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def stored(number: int, tokens: bytes = struct.pack("<4i", 1, 2, 3, 200_000)) -> list[Event]:
    collector = EventCollector()
    collector.stored(hash_of(number), None, tokens, None)
    return collector.take()


def subscribed(publisher: Publisher, size: int = SIZE, **options: Any) -> Subscriber:
    """A subscriber whose subscription has arrived: it got a message."""
    subscriber = Subscriber(publisher.endpoint, publisher.replay_endpoint, **options)
    while not subscriber.has_message(10):
        publisher.publish(stored(publisher._next, bytes(4 * size)))
    return subscriber


def test_the_three_frames_and_the_fields_of_events() -> None:
    collector = EventCollector()
    tokens = [struct.pack("<4i", *range(n, n + 4)) for n in (0, 4, 8, 12)]
    collector.stored(hash_of(1), None, tokens[0], b"\xab" * 16)
    collector.stored(hash_of(2), hash_of(1), tokens[1], None)
    collector.stored(hash_of(4), hash_of(3), tokens[2], None)
    collector.removed(hash_of(2))
    collector.removed(hash_of(1))
    collector.stored(hash_of(5), hash_of(4), tokens[3], None, "sql")
    collector.removed(hash_of(5), 0)
    collector.removed(hash_of(6), 1)
    collector.stored(hash_of(7), None, tokens[0], None, None, 1)
    with opened(topic="kv@pod") as publisher, subscribed(publisher, topic="kv@") as subscriber:
        publisher.publish(collector.take())
        while (received := subscriber.receive())[1] < publisher._next - 1:
            pass
        topic, _, batch = received
    assert topic == b"kv@pod" and batch.data_parallel_rank == 0 and batch.ts > 1.7e9
    first, second, removed, third, *grouped = batch.events
    assert first == BlockStored([1, 2], None, list(range(8)), SIZE, None, "GPU", None, [["ab" * 16], None])
    assert second == BlockStored([4], 3, list(range(8, 12)), SIZE, None, "GPU", None)
    assert removed == BlockRemoved([2, 1], "GPU") and third == BlockStored([5], 4, list(range(12, 16)), SIZE, None, "GPU", "sql")
    of_group = BlockStored([7], None, list(range(4)), SIZE, None, "GPU", None, group_idx=1)
    assert grouped == [BlockRemoved([5], "GPU", 0), BlockRemoved([6], "GPU", 1), of_group]


def test_a_clear_forgets_what_the_step_reported_before() -> None:
    collector = EventCollector()
    collector.stored(hash_of(1), None, bytes(16), None)
    collector.cleared()
    collector.removed(hash_of(9))
    first, second = collector.take()
    assert type(first).__name__ == AllBlocksCleared.__name__ and type(second).__name__ == BlockRemoved.__name__ and not collector.take()


def test_a_hash_on_the_wire_is_the_last_64_bits() -> None:
    assert public_hash(bytes(range(16))) == int.from_bytes(bytes(range(8, 16)), "big")


def test_a_subscriber_that_does_not_read_loses_batches_and_replays_them() -> None:
    """20 MB wait, more than the sockets hold: ZeroMQ drops what is more than `hwm`, and the publisher's thread never waits."""
    size, tokens, count = 4096, struct.pack("<i", 200_000) * 4096, 1000
    with opened(size, hwm=5) as publisher, subscribed(publisher, size, rcvhwm=1, buffer=8192) as subscriber:
        for _ in range(count):
            assert publisher.publish(stored(publisher._next, tokens))
        last = publisher._next - 1
        while not subscriber.replay(last):  # until the thread has sent it
            pass
        while subscriber.next <= last:  # now it reads, and a new batch shows the gap
            publisher.publish(stored(publisher._next, tokens))
            subscriber.read_to(subscriber.next)
        assert subscriber.gaps and subscriber.replayed > count // 2
        assert set(subscriber.blocks) == set(range(subscriber.next))


def test_a_full_queue_loses_the_batch_and_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    running = threading.Event()
    send = Publisher._send_batches
    monkeypatch.setattr(Publisher, "_send_batches", lambda self: running.wait() and send(self))
    with opened(max_queue_size=2) as publisher:
        assert [publisher.publish(stored(n)) for n in range(4)] == [True, True, False, False] and not publisher.has_room
        running.set()
        with Subscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
            while [number for number, _ in subscriber.replay(0)] != [0, 1]:
                pass
            assert publisher.publish(stored(4)) and publisher.num_lost == 2
            while [number for number, _ in subscriber.replay(0)] != [0, 1, 4]:
                pass


def test_replays_keep_a_number_of_batches_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(buffer_steps=3) as publisher, Subscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
        for number in range(6):
            publisher.publish(stored(number))
        while not subscriber.replay(5):
            pass
        assert [number for number, _ in subscriber.replay(4)] == [4, 5] and not publisher.wants_all
        assert [number for number, _ in subscriber.replay(0)] == [3, 4, 5] and publisher.wants_all
        assert subscriber.replay(7) == []
        one = len(subscriber.replay(5)[0][1])
        monkeypatch.setattr("tinyvllm.kv_events.replays.MAX_BUFFER_BYTES", 2 * one + 1)
        publisher.publish(stored(6))
        while not subscriber.replay(6):
            pass
        assert [number for number, _ in subscriber.replay(0)] == [5, 6]


def test_replays_without_a_reader_hold_up_neither_others_nor_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their messages stay few, malformed requests get no answer, and a place is free again after a while."""
    monkeypatch.setattr("tinyvllm.kv_events.replays.STALLED_SECONDS", 1e9)
    size, tokens = 4096, struct.pack("<i", 200_000) * 4096
    with opened(size) as publisher, subscribed(publisher, size) as subscriber:
        for _ in range(1200):  # 24 MB
            publisher.publish(stored(publisher._next, tokens))
        while not subscriber.replay(publisher._next - 1):
            pass
        with zmq.Context() as context:
            for frames in ([b""], [b"", b"x"], [b"y", bytes(8)], [b"", bytes(8), b""], [b"", bytes(65)]):
                with context.socket(zmq.DEALER) as malformed:
                    malformed.connect(publisher.replay_endpoint)
                    malformed.send_multipart(frames)
            silent = [context.socket(zmq.DEALER) for _ in range(MAX_ANSWERS)]
            for socket in silent:
                socket.set(zmq.LINGER, 0)
                socket.set(zmq.RCVHWM, 1)
                socket.set(zmq.RCVBUF, 8192)
                socket.connect(publisher.replay_endpoint)
                socket.send_multipart((b"", bytes(8)))
            while not (isinstance(publisher._replays, Replays) and publisher._replays.is_full):
                pass
            publisher.publish(stored(publisher._next, tokens))
            subscriber.read_to(publisher._next - 1)
            monkeypatch.setattr("tinyvllm.kv_events.replays.STALLED_SECONDS", 0.0)
            assert subscriber.replay(publisher._next - 1)
            for socket in silent:
                socket.close()


def test_an_endpoint_in_use_is_an_error_and_leaves_no_thread() -> None:
    with opened() as publisher:
        threads = threading.active_count()
        for options in ({"endpoint": publisher.endpoint}, {"endpoint": FREE, "replay_endpoint": publisher.endpoint}):
            with pytest.raises(ArgumentError, match=r"endpoint='tcp.*cannot be used \(Address already in use"):
                Publisher(KVEventsConfig(**options), SIZE)
        assert threading.active_count() == threads


@pytest.mark.parametrize("package", ["zmq", "msgspec"])
def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ArgumentError, match=r"pip install 'tinyvllm\[events\]'"):
        Publisher(KVEventsConfig(), SIZE)
