"""Hostile bodies: of twenty thousand mistakes the first ones are named, and every list has a limit that its error names."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tinyvllm.server.api.anthropic_body import MessagesRequest
from tinyvllm.server.api.responses_body import ResponsesRequest
from tinyvllm.server.api.segments import SegmentRequest
from tinyvllm.server.core import body_errors, limits
from tinyvllm.server.core.body import Body, parse_object, validate
from tinyvllm.server.core.failures import Failure
from tinyvllm.server.core.params import structured_outputs
from tinyvllm.server.core.schema import ChatRequest, CompletionRequest, DetokenizeRequest, EmbeddingRequest, TokenizeRequest

MANY = 20_000


def parse(model: type[Body], raw: bytes, lenient: bool = False) -> tuple[Any, dict[str, Any], list[str]]:
    data = parse_object(raw)
    body, ignored = validate(model, data, lenient)
    return body, data, ignored


ASK = {"role": "user", "content": "a"}
BODIES: dict[str, tuple[type[Body], dict[str, Any], str, str]] = {  # model, body, the field named, further text of the message
    "unknown in entries": (
        SegmentRequest, {"text": "a", **{f"x{i}": 1 for i in range(MANY)}}, "x0", "unknown field",
    ),
    "misspelt in entries": (
        ChatRequest, {"messages": [ASK] + [{**ASK, "contnet": 1}] * 9_000}, "messages[1].contnet", "did you mean 'content'?",
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
    assert text.startswith("seed: ") and "; also invalid: " in text and "temperature" in text
    assert text.endswith(" and more") and "not checked" not in text


def test_lenient_drops_unknown_fields_at_every_depth() -> None:
    body = {"messages": [{**ASK, "x": 1}, *[{**ASK, "content": [{"type": "text", "text": "a", "y": 1}]}] * 9_000], "z": 1}
    checked, data, ignored = parse(ChatRequest, json.dumps(body).encode(), lenient=True)
    assert len(checked.messages) == 9_001 and data["messages"][:2] == [ASK, {**ASK, "content": [{"type": "text", "text": "a"}]}]
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


PART = {"type": "text", "text": "a"}
TOOL = {"type": "function", "function": {"name": "a"}}
CALL = {"function": {"name": "a"}}
ANTHROPIC = {"model": "a", "max_tokens": 1}
TOO_LONG: dict[str, tuple[type[Body], dict[str, Any], str, int]] = {  # model, body with the valid entry of a list, the list, its limit
    "messages": (ChatRequest, {"messages": [ASK]}, "messages", limits.MAX_MESSAGES),
    "messages to tokenize": (TokenizeRequest, {"messages": [ASK]}, "messages", limits.MAX_MESSAGES),
    "parts": (ChatRequest, {"messages": [{"role": "user", "content": [PART]}]}, "messages[0].content", limits.MAX_PARTS),
    "calls": (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages[0].tool_calls", limits.MAX_PARTS),
    "tools": (ChatRequest, {"messages": [ASK], "tools": [TOOL]}, "tools", limits.MAX_TOOLS),
    "documents": (ChatRequest, {"messages": [ASK], "documents": [{}]}, "documents", limits.MAX_DOCUMENTS),
    "stop": (ChatRequest, {"messages": [ASK], "stop": ["a"]}, "stop", limits.MAX_WORDS),
    "bad words": (ChatRequest, {"messages": [ASK], "bad_words": ["a"]}, "bad_words", limits.MAX_WORDS),
    "token ids": (ChatRequest, {"messages": [ASK], "allowed_token_ids": [1]}, "allowed_token_ids", limits.MAX_TOKEN_IDS),
    "prompts": (CompletionRequest, {"prompt": ["a"]}, "prompt", limits.MAX_PROMPTS),
    "prompts of ids": (CompletionRequest, {"prompt": [[1]]}, "prompt", limits.MAX_PROMPTS),
    "a prompt of ids": (CompletionRequest, {"prompt": [1]}, "prompt", limits.MAX_TOKEN_IDS),
    "a prompt of many": (CompletionRequest, {"prompt": [[1], [1]]}, "prompt[1]", limits.MAX_TOKEN_IDS),
    "inputs": (EmbeddingRequest, {"input": ["a"]}, "input", limits.MAX_PROMPTS),
    "ids": (DetokenizeRequest, {"tokens": [1]}, "tokens", limits.MAX_TEXT),
    "items": (ResponsesRequest, {"input": [ASK]}, "input", limits.MAX_MESSAGES),
    "parts of items": (ResponsesRequest, {"input": [{"role": "user", "content": [PART]}]}, "input[0].content", limits.MAX_PARTS),
    "flat tools": (ResponsesRequest, {"input": "a", "tools": [{"type": "function", "name": "a"}]}, "tools", limits.MAX_TOOLS),
    "blocks": (MessagesRequest, {**ANTHROPIC, "messages": [{**ASK, "content": [PART]}]}, "messages[0].content", limits.MAX_PARTS),
    "Anthropic's messages": (MessagesRequest, {**ANTHROPIC, "messages": [ASK]}, "messages", limits.MAX_MESSAGES),
    "Anthropic's tools": (MessagesRequest, {**ANTHROPIC, "messages": [ASK], "tools": [{"name": "a", "input_schema": {}}]}, "tools",
                          limits.MAX_TOOLS),
}  # fmt: skip


def value_at(path: str, body: dict[str, Any]) -> list[Any]:
    value: Any = body
    for step in path.replace("]", "").replace("[", ".").split("."):
        value = value[int(step) if step.isdigit() else step]
    return value


@pytest.mark.parametrize("name", TOO_LONG)
def test_every_list_has_a_limit(name: str) -> None:
    model, body, path, limit = TOO_LONG[name]
    body = json.loads(json.dumps(body))
    values = value_at(path, body)
    values *= limit // len(values) + 1
    with pytest.raises(Failure, match=rf"^{re.escape(path.partition('[')[0] if 'prompt' in path else path)}: .*at most {limit} ") as failed:
        parse(model, json.dumps(body).encode())
    assert failed.value.status == 400 and str(len(values)) in failed.value.message
    del values[1:]
    parse(model, json.dumps(body).encode())


def test_objects_with_free_names_have_limits() -> None:
    for field, limit in ("logit_bias", limits.MAX_LOGIT_BIAS), ("metadata", limits.MAX_NAMES):
        value = {str(i): 1.0 if field == "logit_bias" else "a" for i in range(limit + 1)}
        with pytest.raises(Failure, match=f"^{field}: .*at most {limit} entries, got {limit + 1}"):
            parse(ChatRequest, json.dumps({"messages": [ASK], field: value}).encode())
    with pytest.raises(Failure, match=f"user: must have at most {limits.MAX_NAME} characters"):
        parse(ChatRequest, json.dumps({"messages": [ASK], "user": "a" * (limits.MAX_NAME + 1)}).encode())


@pytest.mark.parametrize("field", ["max_tokens", "min_tokens", "top_k", "truncate_prompt_tokens", "thinking_token_budget"])
def test_integers_have_limits(field: str) -> None:
    with pytest.raises(Failure, match=f"^{field}: "):
        parse(ChatRequest, json.dumps({"messages": [ASK], field: 10**400}).encode())


def test_arrays_and_objects_are_counted_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = limits.MAX_CONTAINERS
    accepted = {"prompt": ["a"], "user": r'"[{\"' * 50, "model": "[" * 500}
    parse(CompletionRequest, json.dumps(accepted).encode())
    brackets = {"prompt": r'a"[' * limit + "\\"}
    assert parse(CompletionRequest, json.dumps(brackets).encode())[0].prompt == brackets["prompt"]
    monkeypatch.setattr("tinyvllm.server.core.body.from_json", None)
    for raw in (b'{"prompt": [' + b"[1]," * limit + b"[1]]}", b'{"prompt": [' + b'{"a[": 1},' * limit + b'{}], "b": "never closed "'):
        with pytest.raises(Failure, match=f"the body has {limit + 3} arrays and objects, the limit is {limit}") as failed:
            parse(CompletionRequest, raw)
        assert failed.value.status == 400 and failed.value.code == "too_many_values"


def test_names_are_counted_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser holds the interpreter lock: 400,000 names stopped the event loop for 0.4 s."""
    limit = limits.MAX_MEMBERS
    assert parse(CompletionRequest, json.dumps({"prompt": ":" * 2 * limit}).encode())[0].prompt
    monkeypatch.setattr("tinyvllm.server.core.body.from_json", None)
    raw = b'{"logit_bias": {' + b",".join(b'"%d:": 1' % i for i in range(limit)) + b"}}"
    with pytest.raises(Failure, match=f"the body has {limit + 1} names in its objects, the limit is {limit}") as failed:
        parse(CompletionRequest, raw)
    assert failed.value.status == 400 and failed.value.code == "too_many_values"


def test_values_are_counted_in_short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads run between two matches only: a million short strings in one match stopped the event loop for 0.3 s."""
    matched: list[int] = []

    class Watched:
        def __init__(self, pattern: Any):
            self.pattern = pattern

        def match(self, raw: bytes, at: int) -> Any:
            found = self.pattern.match(raw, at)
            matched.append(0 if found is None else found.end() - at)
            return found

        def sub(self, new: bytes, raw: bytes) -> bytes:
            matched.append(len(raw))
            return self.pattern.sub(new, raw)

    for name in ("_STRING", "_STRINGS"):
        monkeypatch.setattr(limits, name, Watched(getattr(limits, name)))
    limits.check_values(b'["[",' + b'"[",' * 10**6 + b'""]')
    assert sum(matched) > 2 * 10**6 and max(matched) <= 10**5


@pytest.mark.parametrize("seed", range(20))
def test_values_in_strings_do_not_count(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    monkeypatch.setattr(limits, "MAX_CONTAINERS", 0)
    raw = b"".join(random.choice([b'"', b"\\", b"[", b":", b"a", b" "]) for _ in range(40))
    outside, in_string, escaped = b"", False, False
    for byte in raw:
        if not in_string and byte != ord('"'):
            outside += bytes([byte])
        if not escaped and byte == ord('"'):
            in_string = not in_string
        escaped = in_string and not escaped and byte == ord("\\")
    count = outside.count(b"[")
    if count:
        with pytest.raises(Failure, match=f"the body has {count} arrays"):
            limits.check_values(raw)
    else:
        limits.check_values(raw)
