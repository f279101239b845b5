"""Bodies with fifty thousand mistakes: the first ones are named, and no list of all is built."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tinyvllm.server.api.anthropic_body import MessagesRequest
from tinyvllm.server.api.responses_body import ResponsesRequest
from tinyvllm.server.api.segments import SegmentRequest
from tinyvllm.server.core import body_errors
from tinyvllm.server.core.body import Body, parse
from tinyvllm.server.core.failures import Failure
from tinyvllm.server.core.params import structured_outputs
from tinyvllm.server.core.schema import ChatRequest, CompletionRequest

MANY = 50_000
ASK = {"role": "user", "content": "a"}
BODIES: dict[str, tuple[type[Body], dict[str, Any], str, str]] = {  # model, body, the field named, further text of the message
    "unknown in entries": (
        SegmentRequest, {"text": "a", **{f"x{i}": 1 for i in range(MANY)}}, "x0", "unknown field",
    ),
    "misspelt in entries": (
        ChatRequest, {"messages": [ASK] + [{**ASK, "contnet": 1}] * MANY}, "messages[1].contnet", "did you mean 'content'?",
    ),
    "unknown in one": (
        ChatRequest, {"messages": [{**ASK, **{f"x{i}": 1 for i in range(MANY)}}]}, "messages[0].x100", "after 100 other unknown names",
    ),
    "unknown in options": (
        ChatRequest, {"messages": [ASK], "stream": True, "stream_options": {f"x{i}": 1 for i in range(MANY)}}, "stream_options.x0",
        "also invalid: stream_options.x1, ",
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
    "items": (ResponsesRequest, {"input": [{"type": "reasoning", "id": 1}] * MANY}, "input[0].id", f"{MANY - 1} further entries of input"),
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


ECHOED: dict[str, tuple[type[Body], dict[str, Any], list[str]]] = {  # model, body, the fields named
    "chat": (
        ChatRequest,
        {"messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": "b", "reasoning_details": [{"text": "c"}], "parsed": None},
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}, "extra_content": {"g": 1}}]},
        ]},
        ["messages[0].content[0].cache_control", "messages[1].reasoning_details", "messages[2].tool_calls[0].extra_content"],
    ),
    "chat tools": (
        ChatRequest,
        {"messages": [ASK], "tools": [{"type": "function", "function": {"name": "f"}, "cache_control": {"type": "ephemeral"}}]},
        ["tools[0].cache_control"],
    ),
    "responses": (
        ResponsesRequest,
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, {"type": "reasoning", "encrypted_content": None}],
         "reasoning": {"summary": "detailed"}, "text": {"verbosity": "low"}},
        ["input[0].encrypted_content", "text.verbosity", "reasoning.summary"],
    ),
    "anthropic": (
        MessagesRequest,
        {"model": "a", "max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "part_id": 1}], "i": 1}]},
        ["messages[0].i", "messages[0].content[0].part_id"],
    ),
    "no effect": (
        ChatRequest,
        {"messages": [ASK], "store": True, "service_tier": "flex", "verbosity": "low", "prediction": {"type": "content", "content": "a"}},
        ["store", "service_tier", "prediction", "verbosity"],
    ),
    "effect": (ChatRequest, {"messages": [ASK], "store": False, "service_tier": "auto", "verbosity": "medium"}, []),
}  # fmt: skip


@pytest.mark.parametrize("name", ECHOED)
def test_what_other_servers_add_is_accepted_and_named(name: str) -> None:
    """Clients send back messages with the fields of the server that wrote them; neither the chat template nor the log sees those."""
    model, body, named = ECHOED[name]
    checked, data, ignored = parse(model, json.dumps(body).encode())
    assert ignored == named
    text = json.dumps([data.get("messages"), data.get("input"), data.get("tools")])
    assert not any(path.rpartition(".")[2] in text for path in named if "[" in path)


def test_a_schema_in_the_places_where_clients_put_it() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for form in (
        {"type": "json_schema", "json_schema": {"schema": schema}},
        {"type": "json_schema", "schema": schema},
        {"type": "json_object", "schema": schema},
    ):
        body, _, ignored = parse(ChatRequest, json.dumps({"messages": [ASK], "response_format": form}).encode())
        structure = structured_outputs(body)
        assert structure is not None and structure.json == schema and not ignored
    for form in ({"type": "text", "schema": schema}, {"type": "json_schema"}, {"type": "json_object", "json_schema": {"schema": schema}}):
        with pytest.raises(Failure, match="response_format"):
            parse(ChatRequest, json.dumps({"messages": [ASK], "response_format": form}).encode())
