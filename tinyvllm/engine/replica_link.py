"""The messages between the process of a replica and the one that starts it: pickles of tuples, of which the first item says what it is.

To a replica:   its EngineConfig; then ("add", key, text, token ids, cache_salt, params, options), ("abort", key),
                ("call", number, method, arguments), ("close",)
From a replica: ("ready",) or ("refused", error); then ("outputs", [(key, output or error), ...]), ("answer", number, value, error),
                ("status", numbers) every BEAT_SECONDS
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from multiprocessing.connection import Connection
from typing import Any

from tinyvllm.errors import InternalError, TinyvllmError

BEAT_SECONDS = 0.5


class Link:
    """One end. Any thread may send; one receives."""

    def __init__(self, fd: int):
        self._connection = Connection(fd)
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """OSError if the other end is closed; pickle's errors for what it does not take."""
        data = pickle.dumps(message)
        with self._sending:
            self._connection.send_bytes(data)

    def arrives(self, seconds: float) -> bool:
        """Whether there is a message, or the end, within this time."""
        return self._connection.poll(seconds)

    def receive(self) -> Any:
        """The next message. EOFError or OSError if the other end is closed."""
        return pickle.loads(self._connection.recv_bytes())

    def close(self) -> None:
        self._connection.close()


def portable(error: BaseException) -> TinyvllmError:
    """An error that can be sent: itself without its causes, or its text."""
    with contextlib.suppress(Exception):
        again = pickle.loads(pickle.dumps(error))
        if isinstance(again, TinyvllmError):
            return again
    return InternalError(f"replica: {type(error).__name__}: {error}")
