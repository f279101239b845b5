"""Requests at the limits of the server: refused by name, and never at the cost of others."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Running, running
from tinyvllm.server.core import conversation, limits
from tinyvllm.server.core.config import ServerConfig
from tinyvllm.server.http import accept, handler

ASK = {"prompt": "Once", "max_tokens": 1}


def test_long_bodies_are_parsed_in_a_thread(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[tuple[str, bool], str] = {}  # by the work, and whether the body is long
    parse, validate = handler.parse_object, handler.validate

    def watched_parse(raw: bytes) -> Any:
        threads["parse", len(raw) > limits.THREAD_BODY] = threading.current_thread().name
        return parse(raw)

    def watched_validate(model: Any, data: dict[str, Any], lenient: bool) -> Any:
        threads["validate", len(json.dumps(data)) > limits.THREAD_BODY] = threading.current_thread().name
        return validate(model, data, lenient)

    monkeypatch.setattr(handler, "parse_object", watched_parse)
    monkeypatch.setattr(handler, "validate", watched_validate)
    assert server.post("/v1/completions", ASK).status_code == 200
    assert server.post("/v1/completions", {**ASK, "stop": "a" * limits.THREAD_BODY}).status_code in (200, 400)
    assert all(threads[work, True] != threads[work, False] for work in ("parse", "validate"))


def test_default_limit_of_bodies(server: Running) -> None:
    raw = json.dumps({"prompt": ""}).encode()
    raw += b" " * (4 * 2**20 - len(raw))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    assert b" 200 OK" in server.raw(head % len(raw) + raw)
    assert b"4194304 bytes (--max-body)" in server.raw(head % (len(raw) + 1))


@pytest.mark.parametrize("width", [{"n": 2}, {"best_of": 2}])
def test_width_of_a_request(server: Running, width: dict[str, int]) -> None:
    answer = server.post("/v1/completions", {"prompt": ["a"] * 600, "max_tokens": 1, **width})
    name = next(iter(width))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name
    assert f"{name}: 2 answers to each of 600 prompts exceed the limit of 1024" in answer.json()["error"]["message"]


LONG = "a" * 3000
USER = {"role": "user", "content": "Hello"}
ASSISTANT = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "a", "arguments": {"b": LONG}}}]}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "content": {"messages": [{"role": "user", "content": LONG}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
    "many": {"messages": [USER, {"role": "assistant", "content": "a"}] * 200},
    "reasoning": {"messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": LONG}]},
    "arguments": {"messages": [USER, ASSISTANT]},
    "tools": {"messages": [USER], "tools": [{"type": "function", "function": {"name": "a", "description": LONG}}]},
    "schemas": {"messages": [USER], "tools": [{"type": "function", "function": {"name": "a", "parameters": {LONG: {}}}}]},
    "documents": {"messages": [USER], "documents": [{"text": LONG}]},
    "variables": {"messages": [USER], "chat_template_kwargs": {"a": LONG}},
}


@pytest.mark.parametrize("name", ["short", *CONVERSATIONS])
def test_all_of_a_conversation_counts_for_rendering_in_a_thread(server: Running, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def render(*given: Any, **named: Any) -> str:
        threads.append(threading.current_thread().name)
        return "Once"

    monkeypatch.setattr(conversation, "render_chat", render)
    body = CONVERSATIONS.get(name, {"messages": [USER]})
    assert server.post("/v1/chat/completions", {**body, "max_tokens": 1}).status_code == 200
    assert ("asyncio_" in threads[0] or "tinyvllm-text" in threads[0]) == (name != "short")


def test_texts_for_tokenize_have_a_limit(server: Running) -> None:
    answer = server.post("/tokenize", {"prompt": "a" * (limits.MAX_TEXT + 1)})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"prompt: must have at most {limits.MAX_TEXT} characters, got {limits.MAX_TEXT + 1}"
    long = server.post("/tokenize", {"prompt": "a " * 20_000}).json()
    assert long["count"] == len(long["tokens"]) >= 20_000


def connect(server: Running, request: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=120)
    connection.sendall(request)
    return connection


def until(connection: socket.socket, end: bytes) -> bytes:
    received = b""
    while not received.endswith(end) and (more := connection.recv(4096)):
        received += more
    return received


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
STREAM = json.dumps({"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}).encode()
STREAM = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(STREAM) + STREAM


def test_connections_have_a_limit() -> None:
    """A further one waits until one is closed; one that waits for its next request is closed for it."""
    with running(ServerConfig(port=0, max_connections=2, access_log=False)) as server:
        first = connect(server, HEALTH)
        assert until(first, b'"ok"}').startswith(b"HTTP/1.1 200")
        streams = [connect(server, STREAM) for _ in range(2)]
        assert first.recv(4096) == b""  # closed, since it was idle
        assert all(stream.recv(20).startswith(b"HTTP/1.1 200") for stream in streams)
        last = connect(server, HEALTH)
        last.settimeout(0.3)
        with pytest.raises(TimeoutError):
            last.recv(1)
        streams[0].close()
        last.settimeout(30)
        assert until(last, b'"ok"}').startswith(b"HTTP/1.1 200")
        for connection in (first, streams[1], last):
            connection.close()


class Exhausted(socket.socket):
    """A socket whose `accept` fails as in a process without descriptors."""

    failures = 5
    tries = 0

    def accept(self) -> Any:
        self.tries += 1
        if self.tries <= self.failures:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


class Greeting(accept.Connection):
    def connection_made(self, transport: Any) -> None:
        transport.write(b"hello")
        transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.on_closed()


def test_without_descriptors_each_try_is_one_line_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        later = loop.call_later

        def recorded(delay: float, callback: Callable[[], None]) -> Any:
            pauses.append(delay if not acceptor._reading else -2.0)  # a readable socket would wake the loop at once
            return later(0.0, callback)

        monkeypatch.setattr(loop, "call_later", recorded)
        loop.set_exception_handler(lambda _, context: pauses.append(-1.0))
        with Exhausted() as sock:
            sock.bind(("127.0.0.1", 0))
            acceptor = accept.Acceptor(sock, Greeting, None, 10)
            acceptor.start()
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            received = await reader.read()
            writer.close()
            acceptor.close()
            await acceptor.wait_closed()
        return received

    # not caplog: pytest's handlers are on the root logger, and, if a server has run in this process, on this one as well
    lines, log = list[str](), logging.getLogger("tinyvllm.server")
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    monkeypatch.setattr(log, "handlers", [handler])
    assert asyncio.run(run()) == b"hello"
    assert pauses == [1.0] * Exhausted.failures
    assert len(lines) == Exhausted.failures and all("Too many open files" in line and "--max-connections" in line for line in lines)


def test_small_writes_are_not_held_back() -> None:
    """A stream's events are small: without TCP_NODELAY each waits for the client's acknowledgement of the one before, for 40 ms."""
    found: list[int] = []

    class Noting(Greeting):
        def connection_made(self, transport: Any) -> None:
            found.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            super().connection_made(transport)

    async def run() -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            acceptor = accept.Acceptor(sock, Noting, None, 10)
            acceptor.start()
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            assert await reader.read() == b"hello"
            writer.close()
            acceptor.close()
            await acceptor.wait_closed()

    asyncio.run(run())
    assert found and all(found)


@pytest.mark.parametrize("more", [b"A:b\r\n" * 10_000, b"A:b\r\n" * 201, b"A: " + b"b" * 70_000 + b"\r\n"])
def test_heads_that_arrive_at_once_have_a_limit(server: Running, more: bytes) -> None:
    for head in (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + more + b"\r\n", b"GET /" + more.replace(b"\r\n", b"").replace(b" ", b"")):
        if len(head) > limits.MAX_HEAD or b"HTTP" in head:
            answer = server.raw(head if b"HTTP" in head else head + b" HTTP/1.1\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 431") and answer.count(b"HTTP/1.1") == 1 and b"65536 bytes or 200 headers" in answer


def test_headers_after_the_body_have_a_limit(server: Running) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = server.raw(head + b"f\r\n" + b'{"prompt": "a"}' + b"\r\n0\r\n" + b"A:b\r\n" * 300 + b"\r\n")
    assert b"count" not in answer
    assert server.post("/tokenize", {"prompt": "a"}).status_code == 200


def test_bodies_of_running_requests_have_a_limit_together() -> None:
    with running(ServerConfig(port=0, max_body=1000, access_log=False)) as server:
        server.service.body_bytes = 1000 * limits.MAX_BODIES - 100
        assert server.post("/tokenize", {"prompt": "a"}).status_code == 200
        refused = server.post("/tokenize", {"prompt": "a" * 200})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "server_busy"
        assert server.service.body_bytes == 1000 * limits.MAX_BODIES - 100


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_arguments_of_tool_calls_that_are_nested_too_deeply(server: Running, opening: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": opening * 100_000}}
    answer = server.post("/v1/chat/completions", {"messages": [USER, {"role": "assistant", "tool_calls": [call]}], "max_tokens": 1})
    assert answer.status_code == 400 and "arguments are nested too deeply" in answer.json()["error"]["message"]
