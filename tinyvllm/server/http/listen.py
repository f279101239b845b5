"""Sockets, signals and slow clients: uvicorn, with what a server needs that nobody watches.

uvicorn wakes ten times a second to look at the clock; this one sleeps until there is something to do. Its HTTP parser waits for ever for
the head of a request; this one does not. On SIGTERM it drains before it closes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from email.utils import formatdate
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinyvllm.errors import ArgumentError
from tinyvllm.server.core.context import ServerConfig, Service
from tinyvllm.server.core.failures import Failure, encode
from tinyvllm.server.http.log_writer import log_to

_LONGEST_HEAD = 64 * 1024
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0  # seconds between two questions to a client that has closed its sending side


def bind(config: ServerConfig) -> socket.socket:
    """The socket to listen on, before anything is loaded: a port that is taken shall cost nobody a minute."""
    try:
        info = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(info[0], socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(info[4])
    except OSError as error:
        raise ArgumentError(f"--host {config.host} --port {config.port}: {error.strerror or error}") from error
    return sock


def url_of(config: ServerConfig, sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"{'https' if config.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


class Server(uvicorn.Server):
    """One application on one socket until SIGTERM or SIGINT, or `stop`. A second signal does not wait for requests any more."""

    def __init__(self, app: ASGIApp, service: Service, sock: socket.socket, ready: Callable[[], None] = lambda: None):
        self._service = service
        self._socket = sock
        self._ready = ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        super().__init__(_uvicorn_config(app, service.config))

    async def run_until_stopped(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.serve(sockets=[self._socket])

    def stop(self) -> None:
        """As SIGTERM; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_to_drain)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal. uvicorn would raise it again at the end; whoever asked politely gets exit code 0."""
        self.force_exit = self.force_exit or self._draining is not None
        self.stop()

    async def main_loop(self) -> None:
        self.server_state.default_headers = _Dated()
        self._ready()
        await self._stopping.wait()

    def _begin_to_drain(self) -> None:
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self._stop_now()

    async def _drain(self) -> None:
        await self._service.drain()
        self._stop_now()

    def _stop_now(self) -> None:
        self.should_exit = True
        self._stopping.set()


class _Dated(list[tuple[bytes, bytes]]):
    """uvicorn's default headers: the date, made when an answer is sent and at most once a second."""

    def __init__(self) -> None:
        super().__init__()
        self._second = 0

    def _now(self) -> list[tuple[bytes, bytes]]:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self[:] = [(b"date", formatdate(second, usegmt=True).encode())]
        return self

    def __add__(self, other: Any) -> Any:  # what uvicorn does with them at every answer
        return [*self._now(), *other]


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's parser, with an end to heads that never come or never end, errors in the API's shape, and answers to the half-closed."""

    head_seconds = 10.0  # a subclass of each server says its own

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_over()
        if self._asking is not None:
            self._asking.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends no more. It may have left, or wait for the answer to what it has sent (`nc -N`): TCP says the same of both.

        uvicorn takes every such client for gone. Here it is asked, by interim answers, which HTTP/1.1 allows at any time: the system of who
        has left refuses them, and the next write fails. asyncio's TLS knows no half of a connection.
        """
        cycle = self.cycle
        waits = cycle is not None and not (cycle.more_body or cycle.response_complete or self.pipeline)
        if not waits or self.scheme == "https" or self.scope["http_version"] != "1.1":
            return None
        cycle.keep_alive = False
        self._ask(_FIRST_PAUSE)
        return True

    def _ask(self, pause: float) -> None:
        """Once more, and ever less often; what a stream writes asks as well."""
        if not self.transport.is_closing() and not self.cycle.response_complete:
            if not self.cycle.response_started:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._asking = self.loop.call_later(pause, self._ask, min(2 * pause, _LONGEST_PAUSE))

    def data_received(self, data: bytes) -> None:
        if self._head_timer is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > _LONGEST_HEAD:
            self._refuse(Failure(431, f"the head of the request is longer than {_LONGEST_HEAD} bytes", code="head_too_large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_over()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(Failure(400, msg, code="invalid_http"))

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self.head_seconds, self._too_slow)

    def _head_over(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # an answer is under way: the next head has time until it is out
            self._expect_head()
            return
        self._refuse(Failure(408, f"no whole request after {self.head_seconds:g} s", code="timeout"))

    def _refuse(self, failure: Failure) -> None:
        """An answer of our own, unless it would get into another one, and the end of the connection."""
        self._head_over()
        if not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                body = encode(failure.body())
                head = f"HTTP/1.1 {failure.status} {_PHRASES[failure.status]}\r\ncontent-type: application/json\r\n"
                self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
            self.transport.close()


_PHRASES = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


def _uvicorn_config(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    protocol = type("Protocol", (GuardedProtocol,), {"head_seconds": config.head_seconds})
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    try:
        made = uvicorn.Config(
            app, http=protocol, ws="none", log_config=None, access_log=False, server_header=False, proxy_headers=False, lifespan="on",
            timeout_keep_alive=75, timeout_graceful_shutdown=5, ssl_certfile=config.ssl_certfile, ssl_keyfile=config.ssl_keyfile,
        )  # fmt: skip
        made.load()
    except (OSError, ssl.SSLError) as error:
        raise ArgumentError(f"--ssl-certfile {config.ssl_certfile}: {error}") from error
    return made


def serve(make: Callable[[], tuple[ASGIApp, Service]], sock: socket.socket, ready: Callable[[], None]) -> None:
    """Run the application that `make` makes inside the event loop, until a signal. Raises what its start raised."""

    async def run() -> None:
        app, service = make()
        await service.models.start()  # here, since uvicorn would turn what it raises into a log line
        await Server(app, service, sock, ready).run_until_stopped()

    lines = log_to()
    try:
        asyncio.run(run())
    finally:
        lines.close()
