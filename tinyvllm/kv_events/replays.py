"""Answers to subscribers that missed batches: a ROUTER socket, the batches that are kept for it, and several answers in turn.

A request is 8 bytes, the number of the first batch wanted, big-endian, from a REQ or DEALER socket (an empty frame before it). The answer
is a message [empty, number, payload] for each batch that is still kept, and [empty, -1, empty] at the end, as vLLM's.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zmq

END = (-1).to_bytes(8, "big", signed=True)
MAX_BUFFER_BYTES = 64 << 20  # of kept batches, also where more of them are asked for
MAX_ANSWERS = 4  # at a time; each may hold a buffer's worth of batches that are no longer kept. Further requests wait in the socket
STALLED_SECONDS = 10.0  # after which an answer that its subscriber does not read is given up
_MAX_PENDING = 256  # messages in the socket for one subscriber


class BatchBuffer:
    """The newest batches: at most `max_batches`, of MAX_BUFFER_BYTES."""

    def __init__(self, max_batches: int) -> None:
        self._max_batches = max_batches
        self._batches: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def add(self, number: int, payload: bytes) -> None:
        self._batches.append((number, payload))
        self._bytes += len(payload)
        while len(self._batches) > self._max_batches or self._bytes > MAX_BUFFER_BYTES:
            self._bytes -= len(self._batches.popleft()[1])

    def since(self, number: int) -> deque[tuple[int, bytes]]:
        """The kept batches from `number` on."""
        return deque(batch for batch in self._batches if batch[0] >= number)

    def has(self, number: int) -> bool:
        """Whether no batch from `number` on was dropped from the buffer."""
        return not self._batches or number >= self._batches[0][0]


class Replays:
    """The ROUTER socket and its unfinished answers. No subscriber can hold up another, or the publisher's thread."""

    def __init__(self, socket: zmq.Socket[bytes], buffer: BatchBuffer) -> None:
        import zmq

        self._zmq = zmq
        self.socket = socket
        socket.set(zmq.ROUTER_MANDATORY, 1)  # a subscriber that reads too slowly is an error here, instead of a lost message
        socket.set(zmq.SNDHWM, _MAX_PENDING)
        socket.set(zmq.RCVHWM, 16)
        socket.set(zmq.MAXMSGSIZE, 64)
        self._buffer = buffer
        self._answers: dict[bytes, _Answer] = {}

    @property
    def pending(self) -> bool:
        """Whether an answer waits for its subscriber to read."""
        return bool(self._answers)

    @property
    def is_full(self) -> bool:
        """Whether further requests must wait."""
        return len(self._answers) >= MAX_ANSWERS

    def accept(self) -> bool:
        """Take one request from the socket; whether it wants batches that are no longer kept. Malformed ones are dropped."""
        try:
            frames = self.socket.recv_multipart(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return False
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            return False
        start = int.from_bytes(frames[2], "big")
        self._answers[frames[0]] = _Answer(self._buffer.since(start))
        return not self._buffer.has(start)

    def advance(self) -> None:
        """Send each answer as far as its subscriber reads."""
        for identity, answer in list(self._answers.items()):
            try:
                while answer.batches:
                    number, payload = answer.batches[0]
                    self._send(identity, number.to_bytes(8, "big"), payload)
                    answer.batches.popleft()
                    answer.progress = time.monotonic()
                self._send(identity, END, b"")
            except self._zmq.Again:
                if time.monotonic() - answer.progress < STALLED_SECONDS:
                    continue
            except self._zmq.ZMQError:  # the subscriber is gone
                pass
            del self._answers[identity]

    def _send(self, identity: bytes, number: bytes, payload: bytes) -> None:
        self.socket.send_multipart((identity, b"", number, payload), self._zmq.NOBLOCK)


class _Answer:
    def __init__(self, batches: deque[tuple[int, bytes]]) -> None:
        self.batches = batches
        self.progress = time.monotonic()
