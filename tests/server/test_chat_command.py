"""`chat --url` with a real server: the same text as for a client without streaming."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from tinyvllm import cli


def test_a_conversation(server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tell me a story\nAnd then?\n/stats\n"))
    assert cli.main(["chat", "--url", server.url + "/v1/", "--temperature", "0", "--max-tokens", "24"]) == 0
    out, err = capsys.readouterr()
    messages: list[dict[str, str]] = []
    for question in ("Tell me a story", "And then?"):
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "temperature": 0, "max_tokens": 24}
        answer = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        messages.append({"role": "assistant", "content": answer["content"]})
    assert out == messages[1]["content"] + "\n" + messages[3]["content"] + "\n"
    assert "24 generated tokens, first token after" in err


def test_an_error_of_the_server(server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert cli.main(["chat", "--url", server.url, "--model", "other"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "404" in err and "'other'" in err and err.count("\n") == 1
