"""Sockets, signals and slow clients: uvicorn, hardened for unattended operation.

uvicorn wakes ten times a second to update its clock; this server sleeps until there is work. uvicorn's HTTP parser waits for the head of a
request without a time limit; this one has a limit. On SIGTERM the server drains before it closes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinyvllm.errors import ArgumentError, TinyvllmError
from tinyvllm.server.core.config import ServerConfig
from tinyvllm.server.core.context import Service
from tinyvllm.server.core.failures import Failure, encode
from tinyvllm.server.core.limits import MAX_HEAD, MAX_HEADERS
from tinyvllm.server.http.accept import Acceptor, Connection, raise_descriptor_limit
from tinyvllm.server.http.log_writer import redirect_logs

_MIN_PAUSE, _MAX_PAUSE = 0.01, 1.0  # seconds between two probes of a client that has closed its sending side
_MAX_THREADS = 16
_PHRASES = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


def bind(config: ServerConfig) -> socket.socket:
    """The socket to listen on. Call it before models are loaded, so that a port in use is reported at once."""
    try:
        info = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(info[0], socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(info[4])
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise ArgumentError(f"--host {config.host} --port {config.port}: {error.strerror or error}") from error
    return sock


def url_of(config: ServerConfig, sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"{'https' if config.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


class Server(uvicorn.Server):
    """Serves one application on one socket until SIGTERM, SIGINT or `stop`.

    A second signal ends running requests with an error, a third one ends the server without waiting for anything.
    """

    def __init__(self, app: ASGIApp, service: Service, sock: socket.socket, ready: Callable[[], None] = lambda: None):
        self._service = service
        self._socket = sock
        self._ready = ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._drain_task: asyncio.Task[None] | None = None
        self._failure: TinyvllmError | None = None
        service.models.on_failure = self._on_engine_failure
        super().__init__(_uvicorn_config(app, service.config))

    async def run_until_stopped(self) -> None:
        """Serve until the server is stopped. TinyvllmError if it was an engine's end that stopped it."""
        self._loop = asyncio.get_running_loop()
        await self.serve(sockets=[self._socket])
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """The same as SIGTERM; callable from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._start_drain)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. uvicorn would raise it again at the end; a server that was stopped this way exits with code 0."""
        self.stop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:  # its error is in the log
            raise SystemExit(1)
        config, maximum = self.config, self._service.config.max_connections
        raise_descriptor_limit(maximum)

        def make() -> GuardedProtocol:
            protocol = GuardedProtocol(config=config, server_state=self.server_state, app_state=self.lifespan.state)
            protocol.head_seconds = self._service.config.head_seconds
            return protocol

        acceptor = Acceptor(self._socket, make, config.ssl, maximum)
        acceptor.start()
        self.servers = [acceptor]  # type: ignore[list-item]
        self.started = True

    async def main_loop(self) -> None:
        self.server_state.default_headers = _DateHeader()
        self._ready()
        await self._stopping.wait()

    def _on_engine_failure(self, model: str, error: BaseException) -> None:
        """An engine has ended, and its requests get their errors. Without it the server is of no use: what is in flight may end."""
        if self._failure is None:
            self._service.engine_failure = f"the engine of model {model} has ended ({type(error).__name__})"
            text = " ".join(f"{error}".split())
            self._failure = TinyvllmError(f"serve: the engine of model {model} has ended: {type(error).__name__}: {text:.300}")
            if self._drain_task is None:
                self._start_drain()

    def _start_drain(self) -> None:
        if self._drain_task is None:
            self._drain_task = asyncio.ensure_future(self._drain())
        elif not self._service.hurry():
            self.force_exit = True
            self._stop_now()

    async def _drain(self) -> None:
        await self._service.drain()
        for connection in list(self.server_state.connections):
            if isinstance(connection, GuardedProtocol):
                connection.abort_response()
        self._stop_now()

    def _stop_now(self) -> None:
        self.should_exit = True
        self._stopping.set()


class _DateHeader(list[tuple[bytes, bytes]]):
    """uvicorn's default headers: the date, formatted when a response is sent and at most once a second."""

    def __init__(self) -> None:
        super().__init__()
        self._second = 0

    def _current(self) -> list[tuple[bytes, bytes]]:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self[:] = [(b"date", formatdate(second, usegmt=True).encode())]
        return self

    def __add__(self, other: Any) -> Any:  # uvicorn concatenates them for every response
        return [*self._current(), *other]


class GuardedProtocol(HttpToolsProtocol, Connection):
    """uvicorn's parser with limits for slow and endless heads, errors in the API's shape, and responses to half-closed clients."""

    head_seconds = 10.0  # Server.startup sets the server's own value

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._head_bytes = self._num_headers = 0
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        super().connection_lost(exc)
        self.on_closed()

    def abort_response(self) -> None:
        """Close the connection if its client has not read the end of its response."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()

    def close_if_idle(self) -> bool:
        """Close the connection if it waits for its next request."""
        idle = self.cycle is not None and self.cycle.response_complete and self._head_timer is None
        if idle and not self.transport.is_closing():
            self.transport.close()
            return True
        return False

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client has closed its sending side. It may have left, or wait for its response (`nc -N`): TCP does not tell the difference.

        uvicorn treats every such client as gone. This server probes it with interim responses, which HTTP/1.1 allows at any time: if the
        client has left, its system rejects them and the next write fails. asyncio's TLS does not support half-closed connections.
        """
        cycle = self.cycle
        may_wait = cycle is not None and not (cycle.more_body or cycle.response_complete or self.pipeline)
        if not may_wait or self.scheme == "https" or self.scope["http_version"] != "1.1":
            return None
        cycle.keep_alive = False
        self._probe(_MIN_PAUSE)
        return True

    def _probe(self, pause: float) -> None:
        """Probe the client, at increasing intervals; the events of a stream are probes themselves."""
        if not self.transport.is_closing() and not self.cycle.response_complete:
            if not self.cycle.response_started:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._probe_timer = self.loop.call_later(pause, self._probe, min(2 * pause, _MAX_PAUSE))

    def data_received(self, data: bytes) -> None:
        if self._head_timer is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > MAX_HEAD:
            self._reject(_head_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_headers = self._header_bytes = 0
        if self._head_timer is None:
            self._start_head_timer()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Also those after the body. The head may arrive at once, so its bytes are counted here as well."""
        self._num_headers += 1
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEAD or self._num_headers > MAX_HEADERS:
            failure = _head_too_large()
            self._reject(failure)
            raise failure  # ends the parser; uvicorn then calls send_400_response, which finds the connection closed

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._reject(Failure(400, msg, code="invalid_http"))

    def _start_head_timer(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self.head_seconds, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        if (
            self.cycle is not None and not self.cycle.response_complete
        ):  # a response is in progress: the time for the next head has not started
            self._start_head_timer()
            return
        self._reject(Failure(408, f"no complete request head after {self.head_seconds:g} s", code="timeout"))

    def _reject(self, failure: Failure) -> None:
        """Send an error, unless a response is in progress, and close the connection."""
        self._stop_head_timer()
        if not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                body = encode(failure.body())
                head = f"HTTP/1.1 {failure.status} {_PHRASES[failure.status]}\r\ncontent-type: application/json\r\n"
                self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
            self.transport.close()


def _head_too_large() -> Failure:
    text = f"the request head is longer than the limit of {MAX_HEAD} bytes or {MAX_HEADERS} headers"
    return Failure(431, text, code="head_too_large")


def _uvicorn_config(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    try:
        uvicorn_config = uvicorn.Config(
            app, http=GuardedProtocol, ws="none", log_config=None, access_log=False, server_header=False, proxy_headers=False,
            lifespan="on", timeout_keep_alive=75, timeout_graceful_shutdown=5,
            ssl_certfile=config.ssl_certfile, ssl_keyfile=config.ssl_keyfile,
        )  # fmt: skip
        uvicorn_config.load()
    except (OSError, ssl.SSLError) as error:
        raise ArgumentError(f"--ssl-certfile {config.ssl_certfile}: {error}") from error
    return uvicorn_config


def _started_threads() -> ThreadPoolExecutor:
    """Threads for texts and bodies, all of them running: one that starts later may find no memory for its stack, or take that which a
    native library is about to use.
    """
    number = min(_MAX_THREADS, (os.cpu_count() or 1) + 4)
    executor, started = ThreadPoolExecutor(number, "tinyvllm-server"), threading.Barrier(number + 1)
    for _ in range(number):
        executor.submit(started.wait)
    started.wait()
    return executor


def serve(make: Callable[[], tuple[ASGIApp, Service]], sock: socket.socket, ready: Callable[[], None]) -> None:
    """Run the application that `make` returns, called inside the event loop, until a signal. Raises the errors of its start."""

    async def run() -> None:
        app, service = make()
        await service.models.start()  # here: uvicorn would turn its errors into log lines
        asyncio.get_running_loop().set_default_executor(_started_threads())  # loading has checked that there is room for their stacks
        await Server(app, service, sock, ready).run_until_stopped()

    logs = redirect_logs()
    try:
        asyncio.run(run())
    finally:
        logs.close()
