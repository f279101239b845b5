"""Accepts connections: at most `max_connections` at a time; when the process has no descriptor left, one try and log line a second.

asyncio's own loop tries again 2048 times, with a traceback for each, before it pauses: 31,357 lines in two seconds.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from tinyvllm.server.core.limits import SPARE_DESCRIPTORS

log = logging.getLogger("tinyvllm.server")

_BACKLOG = 2048
_BURST = 64  # connections accepted before the event loop turns to others
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_RETRY_SECONDS = 1.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connection(asyncio.Protocol):
    """A protocol that calls `on_closed` when its connection is lost."""

    on_closed: Callable[[], None] = staticmethod(lambda: None)

    def close_if_idle(self) -> bool:
        """Close the connection if it waits for its next request."""
        raise NotImplementedError


class Acceptor:
    """Accepts on one socket. Has the methods of an asyncio.Server that uvicorn uses."""

    def __init__(self, sock: socket.socket, make: Callable[[], Connection], tls: ssl.SSLContext | None, max_connections: int):
        self._socket = sock
        self._make = make
        self._tls = tls
        self._max_connections = max_connections
        self._open: dict[Connection, None] = {}  # in the order in which they were accepted
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._reading = self._closed = False

    def start(self) -> None:
        self._socket.setblocking(False)
        self._socket.listen(_BACKLOG)
        self._resume()

    def close(self) -> None:
        """Accept no more connections."""
        self._pause()
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._tasks)

    def _resume(self) -> None:
        if not self._reading and not self._closed:
            self._retry = None
            self._reading = True
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._socket.fileno())

    def _accept(self) -> None:
        for _ in range(_BURST):
            if len(self._open) >= self._max_connections and not self._close_idle():
                self._pause()  # until a connection is closed
                return
            try:
                client, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._wait(error)
                return
            self._begin(client)

    def _wait(self, error: OSError) -> None:
        """Try again in a second, with one line in the log."""
        text = "cannot accept connections: %s; %d are open; raise the limit (ulimit -n) or lower --max-connections"
        log.error(text, error.strerror, len(self._open))
        self._pause()
        self._retry = self._loop.call_later(_RETRY_SECONDS, self._resume)

    def _close_idle(self) -> bool:
        """Close the oldest connection that waits for its next request, if there is one."""
        return any(connection.close_if_idle() for connection in list(self._open))

    def _begin(self, client: socket.socket) -> None:
        connection = self._make()
        connection.on_closed = lambda: self._end(connection)
        self._open[connection] = None
        task = self._loop.create_task(self._connect(client, connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, client: socket.socket, connection: Connection) -> None:
        client.setblocking(False)
        try:
            if client.family in _INTERNET:  # asyncio does it only where the listening socket was opened with the protocol's number
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(lambda: connection, client, ssl=self._tls)
        except (OSError, TimeoutError):  # the client has left, or its TLS handshake has failed
            client.close()
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        self._open.pop(connection, None)
        if self._retry is None:
            self._resume()


def raise_descriptor_limit(max_connections: int) -> None:
    """Raise the soft limit of open files for this number of connections. If the system does not allow it, the log says so."""
    try:
        import resource
    except ImportError:  # Windows
        return
    needed = max_connections + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):
        allowed = soft
    if allowed < needed:
        text = "--max-connections %d needs %d open files, but the limit (ulimit -n) is %d: further connections wait"
        log.warning(text, max_connections, needed, allowed)
