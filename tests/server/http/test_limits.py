"""Requests at the limits of the server: refused by name, and never at the cost of others."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.server.conftest import Running
from tinyvllm.server.core import conversation, limits
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
