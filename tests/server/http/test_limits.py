"""Requests at the limits of the server: refused by name, and never at the cost of others."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.server.conftest import Running
from tinyvllm.server.core import limits
from tinyvllm.server.http import handler

ASK = {"prompt": "Once", "max_tokens": 1}


def test_long_bodies_are_parsed_in_a_thread(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    parse = handler.parse

    def watched(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return parse(*arguments)

    monkeypatch.setattr(handler, "parse", watched)
    assert server.post("/v1/completions", ASK).status_code == 200
    loop = threads.pop()
    assert server.post("/v1/completions", {**ASK, "stop": "a" * limits.THREAD_BODY}).status_code in (200, 400)
    assert len(threads) == 1 and threads[0] != loop


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
