"""Clients that close their sending side after a whole request: one that waits gets its response, one that left is detected."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from tests.server.conftest import Running
from tests.server.http.test_faults import idle, request, wait_for

ASKED = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
PATH = "/v1/completions"


def final(raw: bytes) -> tuple[bytes, bytes]:
    """(head, body) of the final response; if `raw` is not a stream, at least one interim response must precede it."""
    while raw.startswith(b"HTTP/1.1 100 Continue\r\n\r\n"):
        raw = raw.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    head, _, body = raw.partition(b"\r\n\r\n")
    return head, body


def test_a_waiting_client_gets_its_response(server: Running) -> None:
    whole = server.post(PATH, ASKED).json()["choices"][0]["text"]
    head, body = final(server.raw(request(json.dumps(ASKED).encode(), PATH), half_close=True))
    assert head.startswith(b"HTTP/1.1 200 ") and b"connection: close" in head and json.loads(body)["choices"][0]["text"] == whole
    head, body = final(server.raw(request(json.dumps({**ASKED, "stream": True}).encode(), PATH), half_close=True))
    assert head.startswith(b"HTTP/1.1 200 ") and body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    head, body = final(server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", half_close=True))
    assert head.startswith(b"HTTP/1.1 200 ") and b"ok" in body


def test_a_half_closed_client_that_leaves_ends_its_request(server: Running) -> None:
    def status() -> dict[str, Any]:
        return server.service.models.loaded()["demo"].status()

    for stream in (True, False):
        before = status()["tokens"]
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            body = {**ASKED, "max_tokens": 900, "n": 4, "temperature": 1, "stream": stream}
            connection.sendall(request(json.dumps(body).encode(), PATH))
            connection.shutdown(socket.SHUT_WR)
            wait_for(lambda: status()["running"] == 4)
        wait_for(lambda: idle(server))
        assert 0 < status()["tokens"] - before < 3600, "its four sequences end before their 900 tokens"


def test_unanswerable_connections_are_closed(server: Running) -> None:
    """A partial request, an HTTP version without interim responses, and a reset."""
    raw = request(json.dumps({**ASKED, "max_tokens": 900}).encode(), PATH)
    assert server.raw(raw[:-5], half_close=True) == b""
    assert server.raw(raw.replace(b"HTTP/1.1", b"HTTP/1.0"), half_close=True) == b""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(raw)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_for(lambda: idle(server))
