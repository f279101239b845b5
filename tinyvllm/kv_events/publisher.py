"""Batches of cache events on a ZeroMQ PUB socket. A thread of its own sends; the engine's thread only appends to a bounded queue.

A message has three frames, as vLLM's: topic, number of the batch (8 bytes, big-endian, from 0), batch (events.py). ZeroMQ drops what a
subscriber does not read in time, after `hwm` batches: a gap in its numbers, which replays.py fills.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from tinyvllm.errors import ArgumentError
from tinyvllm.kv_events.config import KVEventsConfig, parse_endpoint
from tinyvllm.kv_events.events import Event, batch_of
from tinyvllm.kv_events.replays import BatchBuffer, Replays

if TYPE_CHECKING:
    import zmq

LINGER_MS = 1000  # that the last batches may take to leave when the engine closes
_JOIN_SECONDS = 5.0
_TICK_MS = 10  # while a replay waits for its subscriber to read
_MAX_SUBSCRIPTION = 4096  # bytes of a message from a subscriber

log = logging.getLogger("tinyvllm")


class Publisher:
    """The sockets of one engine. `publish` and `close` belong to the engine's thread, and never wait for a subscriber."""

    def __init__(self, config: KVEventsConfig, block_size: int, rank: int = 0) -> None:
        """ArgumentError if the extra `events` is not installed, or an endpoint cannot be used."""
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise ArgumentError(
                f"kv_events_config needs the packages of the extra 'events': pip install 'tinyvllm[events]' ({error})"
            ) from error
        self._zmq, self._encode = zmq, msgspec.msgpack.Encoder().encode
        self._topic, self._block_size, self._max_queue = config.topic.encode(), block_size, config.max_queue_size
        self._rank = rank
        self.num_lost = 0  # batches that found the queue full
        self.wants_all = False  # a subscriber wants batches that are no longer kept; written by the thread
        self._next = 0
        self._queue: deque[tuple[int, float, list[Event]]] = deque()
        self._closing = False
        self._buffer = BatchBuffer(config.buffer_steps)
        self._replays: Replays | None = None
        self._context = zmq.Context()
        try:
            self._socket = self._open_socket(zmq.PUB)
            self._socket.set(zmq.SNDHWM, config.hwm)
            self._socket.set(zmq.MAXMSGSIZE, _MAX_SUBSCRIPTION)
            self.endpoint = self._attach(self._socket, "endpoint", config.endpoint)
            self.replay_endpoint: str | None = None
            if config.replay_endpoint is not None:
                self._replays = Replays(self._open_socket(zmq.ROUTER), self._buffer)
                self.replay_endpoint = self._attach(self._replays.socket, "replay_endpoint", config.replay_endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        self._thread = threading.Thread(target=self._run, name="tinyvllm-kv-events", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether `publish` would take a batch."""
        return len(self._queue) < self._max_queue and self._thread.is_alive()

    def publish(self, events: list[Event]) -> bool:
        """Number a batch and queue it; False if the queue is full: the batch is lost, and its number missing on the wire."""
        number, self._next = self._next, self._next + 1
        if not self.has_room:
            self.num_lost += 1
            if self.num_lost & (self.num_lost - 1) == 0:  # 1, 2, 4, 8, ...
                log.warning("kv events: %d batches were lost, because %d others wait to be sent", self.num_lost, len(self._queue))
            return False
        self._queue.append((number, time.time(), events))
        self._wake()
        return True

    def close(self) -> None:
        """Send what is queued, and close the sockets. A second call does nothing."""
        if not self._closing:
            self._closing = True
            self._wake()
            self._thread.join(_JOIN_SECONDS)
            if not self._thread.is_alive():
                os.close(self._wake_write)
                os.close(self._wake_read)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full of earlier bytes: the thread wakes anyway
            os.write(self._wake_write, b"\0")

    def _open_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(self._zmq.LINGER, LINGER_MS)
        return socket

    def _attach(self, socket: zmq.Socket[bytes], name: str, text: str) -> str:
        """Bind or connect a socket; its address, with the port that was free where the text has *."""
        endpoint = parse_endpoint(name, text)
        socket.set(self._zmq.IPV6, "[" in endpoint.address)
        try:
            (socket.bind if endpoint.binds else socket.connect)(endpoint.address)
        except self._zmq.ZMQError as error:
            raise ArgumentError(
                f"kv_events_config: {name}={text!r} cannot be used ({error}): choose a free port of this machine"
            ) from error
        address = socket.get(self._zmq.LAST_ENDPOINT)
        return address.rstrip(b"\0").decode() if isinstance(address, bytes) else endpoint.address

    def _run(self) -> None:
        """The thread: sleeps until a batch is queued or a subscriber asks for a replay."""
        try:
            poller = self._zmq.Poller()
            poller.register(self._wake_read, self._zmq.POLLIN)
            while self._queue or not self._closing:
                self._wait(poller)
                self._send_batches()
                if self._replays is not None:
                    self._replays.advance()
        except Exception:
            log.exception("kv events: no more are published")
        finally:
            self._context.destroy(linger=LINGER_MS)

    def _wait(self, poller: zmq.Poller) -> None:
        replays = self._replays
        if replays is not None:
            poller.register(replays.socket, 0 if replays.is_full else self._zmq.POLLIN)
        ready = dict(poller.poll(_TICK_MS if replays is not None and replays.pending else None))
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        if replays is not None and replays.socket in ready and replays.accept():
            self.wants_all = True

    def _send_batches(self) -> None:
        while self._queue:
            number, seconds, events = self._queue[0]
            payload = self._encode(batch_of(events, seconds, self._block_size, self._rank))
            self._socket.send_multipart(
                (self._topic, number.to_bytes(8, "big"), payload)
            )  # PUB drops for a slow subscriber, and never waits
            self._buffer.add(number, payload)
            self._queue.popleft()
