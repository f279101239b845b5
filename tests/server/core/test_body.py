"""Bodies with fifty thousand mistakes: the first ones are named, and no list of all is built."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tinyvllm.server.api.anthropic_body import MessagesRequest
from tinyvllm.server.api.responses_body import ResponsesRequest
from tinyvllm.server.core import body_errors
from tinyvllm.server.core.body import Body, parse
from tinyvllm.server.core.failures import Failure
from tinyvllm.server.core.schema import ChatRequest, CompletionRequest

MANY = 50_000
ASK = {"role": "user", "content": "a"}
BODIES: dict[str, tuple[type[Body], dict[str, Any], str, str]] = {  # model, body, the field named, further text of the message
    "unknown in entries": (
        ChatRequest, {"messages": [ASK] + [{**ASK, "x": 1}] * MANY}, "messages[1].x", f"{MANY - 1} further entries of messages",
    ),
    "unknown in one": (
        ChatRequest, {"messages": [{**ASK, **{f"x{i}": 1 for i in range(MANY)}}]}, "messages[0].x0", "also invalid: messages[0].x1, ",
    ),
    "wrong types": (ChatRequest, {"messages": [{"role": 1, "content": 5}] * MANY}, "messages[0].content", "also invalid: messages[0].role"),
    "deep": (
        ChatRequest, {"messages": [{**ASK, "tool_calls": [{"function": {"name": 1}}] * MANY}]}, "messages[0].tool_calls[0].function.name",
        f"{MANY - 1} further entries of messages[0].tool_calls",
    ),
    "an object of numbers": (ChatRequest, {"messages": [ASK], "logit_bias": {"7": 1.0} | {f"a{i}": "a" for i in range(MANY)}},
                             "logit_bias.a0", ""),
    "token ids": (CompletionRequest, {"prompt": "a", "stop_token_ids": [1, 2] + [-1] * MANY}, "stop_token_ids[2]", "entries"),
    "a prompt": (CompletionRequest, {"prompt": ["a"] + [{}] * MANY}, "prompt", ""),
    "items": (ResponsesRequest, {"input": [{"type": "reasoning", "x": 1}] * MANY}, "input[0].x", f"{MANY - 1} further entries of input"),
    "blocks": (
        MessagesRequest, {"model": "a", "max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "no"}] * MANY}]},
        "messages[0].content[0]", "entries",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_only_the_first_mistakes_are_named(name: str, monkeypatch) -> None:
    model, body, field, more = BODIES[name]
    paths: list[Any] = []
    path = body_errors._path
    monkeypatch.setattr(body_errors, "_path", lambda *given, **named: paths.append(1) or path(*given, **named))
    with pytest.raises(Failure) as failed:
        parse(model, json.dumps(body).encode())
    assert failed.value.status == 400 and failed.value.param == field
    assert more in failed.value.message and len(failed.value.message) < 1000
    assert len(paths) < 1000


def test_messages_of_few_mistakes() -> None:
    def message(body: dict[str, Any]) -> str:
        with pytest.raises(Failure) as failed:
            parse(ChatRequest, json.dumps(body).encode())
        return failed.value.message

    assert message({"messages": [ASK, {"role": "user", "content": 5}]}).endswith("got 5")
    text = message({"messages": [ASK], "temperature": "hot", "n": 0, "seed": "x", "top_k": "y", "top_p": 7})
    assert text.startswith("n: ") and "; also invalid: " in text and "temperature" in text
    assert text.endswith(" and more") and "not checked" not in text


def test_lenient_drops_unknown_fields_at_every_depth() -> None:
    body = {"messages": [{**ASK, "x": 1}, *[{**ASK, "content": [{"type": "text", "text": "a", "y": 1}]}] * MANY], "z": 1}
    checked, data, ignored = parse(ChatRequest, json.dumps(body).encode(), lenient=True)
    assert len(checked.messages) == MANY + 1 and data["messages"][:2] == [ASK, {**ASK, "content": [{"type": "text", "text": "a"}]}]
    assert ignored[:3] == ["z", "messages[0].x", "messages[1].content[0].y"] and len(ignored) <= 1000
    with pytest.raises(Failure, match="content"):
        parse(ChatRequest, json.dumps({"messages": [{**ASK, "x": 1, "content": 5}]}).encode(), lenient=True)
