"""vLLM's fields of log-probabilities: named tokens, the whole vocabulary, tokens as ids; and fields that are always sent."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Running, events
from tinyvllm.request import MAX_LOGPROB_ENTRIES

ASK = [{"role": "user", "content": "Tell me a story about a dragon."}]
VOCABULARY = 3072
ONE = {"max_tokens": 1, "temperature": 0, "allowed_token_ids": [42], "return_tokens_as_token_ids": True}
PATHS = {
    "/v1/completions": {"prompt": "Once", "logprobs": 2},
    "/v1/chat/completions": {"messages": ASK, "logprobs": True, "top_logprobs": 2},
}


def token_logprobs(path: str, choice: dict[str, Any]) -> tuple[str, dict[str, float]]:
    """(the first token, its alternatives)"""
    if path == "/v1/completions":
        return choice["logprobs"]["tokens"][0], choice["logprobs"]["top_logprobs"][0]
    entry = choice["logprobs"]["content"][0]
    return entry["token"], {other["token"]: other["logprob"] for other in entry["top_logprobs"]}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_named_tokens(server: Running, path: str, stream: bool) -> None:
    body = {**PATHS[path], **ONE, "logprob_token_ids": [300, 7], "stream": stream}
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    choices = [c["choices"][0] for c in events(answer)[:-1]] if stream else answer.json()["choices"]
    (choice,) = [c for c in choices if c["logprobs"] is not None]
    token, listed = token_logprobs(path, choice)
    assert token == "token_id:42" and set(listed) == {"token_id:42", "token_id:300", "token_id:7"}


@pytest.mark.parametrize("path", PATHS)
def test_the_whole_vocabulary(server: Running, path: str) -> None:
    body = {**PATHS[path], **ONE, "top_logprobs" if "chat" in path else "logprobs": -1}
    _, listed = token_logprobs(path, server.post(path, body).json()["choices"][0])
    assert len(listed) == VOCABULARY
    _, few = token_logprobs(path, server.post(path, {**PATHS[path], **ONE}).json()["choices"][0])
    assert few.items() <= listed.items() and len(few) == (2 if "chat" in path else 3)


def test_the_whole_vocabulary_is_bounded(server: Running) -> None:
    limit = MAX_LOGPROB_ENTRIES // VOCABULARY
    for more in ({"logprobs": -1, "max_tokens": limit + 1}, {"logprobs": -1, "max_tokens": limit // 2 + 1, "n": 2}):
        error = server.post("/v1/completions", {"prompt": "a", **more}).json()["error"]
        assert error["param"] == "logprobs" and str(MAX_LOGPROB_ENTRIES) in error["message"]
    prompt = {"prompt": [5] * (limit + 1), "prompt_logprobs": -1, "max_tokens": 1}
    assert server.post("/v1/completions", prompt).json()["error"]["param"] == "prompt_logprobs"
    chat = {"messages": ASK, "logprobs": True, "top_logprobs": -1}  # as many tokens as the context has
    assert server.post("/v1/chat/completions", chat).status_code == 400


def test_the_whole_vocabulary_of_a_prompt(server: Running) -> None:
    body = {"messages": ASK, "max_tokens": 1, "prompt_logprobs": -1}
    first, *others = server.post("/v1/chat/completions", body).json()["prompt_logprobs"]
    assert first is None and others and all(len(one) == VOCABULARY for one in others)
    echo = {"prompt": "Once upon", "echo": True, "logprobs": -1, "max_tokens": 0, "return_tokens_as_token_ids": True}
    lists = server.post("/v1/completions", echo).json()["choices"][0]["logprobs"]
    assert lists["top_logprobs"][0] is None and len(lists["top_logprobs"][1]) == VOCABULARY and lists["tokens"][1].startswith("token_id:")


def test_named_tokens_need_logprobs_and_a_vocabulary(server: Running) -> None:
    cases: list[dict[str, Any]] = [
        {"logprob_token_ids": [5]}, {"logprob_token_ids": [VOCABULARY], "logprobs": 1}, {"logprob_token_ids": [5] * 1025, "logprobs": 1},
        {"logprob_token_ids": [5], "logprobs": 1, "use_beam_search": True},
    ]  # fmt: skip
    for case in cases:
        error = server.post("/v1/completions", {"prompt": "a", **case}).json()["error"]
        assert "logprob" in error["param"], error


def test_offsets_count_text_and_not_ids(server: Running) -> None:
    body = {"prompt": "Once", "max_tokens": 4, "temperature": 0, "logprobs": 0}
    plain = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    as_ids = server.post("/v1/completions", {**body, "return_tokens_as_token_ids": True}).json()["choices"][0]["logprobs"]
    assert as_ids["text_offset"] == plain["text_offset"] and as_ids["token_logprobs"] == plain["token_logprobs"]
    streamed = events(server.post("/v1/completions", {**body, "return_tokens_as_token_ids": True, "stream": True}))[:-1]
    lists = [c["choices"][0]["logprobs"] for c in streamed if c["choices"][0]["logprobs"]]
    assert [offset for one in lists for offset in one["text_offset"]] == plain["text_offset"]


def test_fields_that_are_always_sent(server: Running) -> None:
    """Clients of vLLM read these without looking whether they are there."""
    text = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).json()
    chat = server.post("/v1/chat/completions", {"messages": ASK, "max_tokens": 1}).json()
    nulls = {"prompt_logprobs": None, "prompt_token_ids": None, "token_ids": None}
    assert {name: text["choices"][0][name] for name in nulls} == nulls
    assert {name: {**chat["choices"][0], **chat}[name] for name in nulls} == nulls and chat["choices"][0]["message"]["reasoning"] is None
    assert text["system_fingerprint"] == chat["system_fingerprint"] and text["system_fingerprint"].startswith("tinyvllm-")
    stream = events(server.post("/v1/chat/completions", {"messages": ASK, "max_tokens": 1, "stream": True}))[:-1]
    assert {event["system_fingerprint"] for event in stream} == {text["system_fingerprint"]}


@pytest.mark.parametrize("path", PATHS)
def test_usage_in_streams_only_when_asked_for(server: Running, path: str) -> None:
    body = {**PATHS[path], "max_tokens": 3, "stream": True}
    for more in ({}, {"stream_options": {"include_usage": False, "continuous_usage_stats": True}}, {"receipt": True}):
        assert not any(event.get("usage") for event in events(server.post(path, {**body, **more}))[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = events(server.post(path, {**body, "stream_options": options}))[:-1]
    counts = [event["usage"]["completion_tokens"] for event in streamed]
    assert counts == sorted(counts) and counts[-1] == 3 and (counts[0] == 0 if "chat" in path else counts[0] > 0)


def test_the_roles_of_all_answers_count_no_tokens(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": ASK, "max_tokens": 3, "stream": True, "n": 3, "seed": 1, "stream_options": options}
    first = events(server.post("/v1/chat/completions", body))[:3]
    assert [e["choices"][0]["index"] for e in first] == [0, 1, 2] and all(e["choices"][0]["delta"]["role"] == "assistant" for e in first)
    assert [e["usage"]["completion_tokens"] for e in first] == [0, 0, 0] and first[0]["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize("parts", [False, True])
def test_echo_of_the_last_message(server: Running, parts: bool) -> None:
    start = "Once upon a"
    last = {"role": "assistant", "content": [{"type": "text", "text": start}] if parts else start}
    body = {"messages": [*ASK, last], "max_tokens": 4, "temperature": 0, "continue_final_message": True, "add_generation_prompt": False}
    alone = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    echoed = server.post("/v1/chat/completions", {**body, "echo": True}).json()["choices"][0]["message"]["content"]
    assert echoed == start + alone
    streamed = events(server.post("/v1/chat/completions", {**body, "echo": True, "stream": True}))[:-1]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in streamed) == echoed
    other_role = {"messages": ASK, "max_tokens": 4, "temperature": 0}
    plain = server.post("/v1/chat/completions", other_role).json()["choices"][0]["message"]["content"]
    assert server.post("/v1/chat/completions", {**other_role, "echo": True}).json()["choices"][0]["message"]["content"] == plain


def test_invalid_keys_of_logit_bias_are_named(server: Running) -> None:
    def message(bias: dict[str, float]) -> str:
        error = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "logit_bias": bias}).json()["error"]
        assert error["param"] == "logit_bias"
        return str(error["message"])

    assert message({"bad1": 1.0, "5": 1.0, "bad2": 1.0}).endswith("got 'bad1', 'bad2'")
    assert message({f"bad{i}": 1.0 for i in range(9)}).endswith("'bad2' and 6 others")
    assert f"token id {VOCABULARY}, the vocabulary has {VOCABULARY} tokens" in message({str(VOCABULARY): 1.0})


@pytest.mark.parametrize("special", [True, False])
def test_the_first_token_of_an_echo(server: Running, special: bool) -> None:
    """It has no probability, but its text or id, and the offsets of the others count it if the echoed text has it."""
    body = {"prompt": "Once upon a time", "add_special_tokens": special, "max_tokens": 0, "echo": True, "logprobs": 1}
    ids = server.post("/tokenize", {"prompt": body["prompt"], "add_special_tokens": special}).json()["tokens"]
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    lists = choice["logprobs"]
    assert lists["tokens"][0] == server.post("/detokenize", {"tokens": ids[:1]}).json()["prompt"] != ""
    for token, offset in list(zip(lists["tokens"], lists["text_offset"], strict=True))[1:]:
        assert choice["text"][offset:].startswith(token)
    as_ids = server.post("/v1/completions", {**body, "return_tokens_as_token_ids": True}).json()["choices"][0]["logprobs"]
    assert as_ids["tokens"] == [f"token_id:{i}" for i in ids] and as_ids["token_logprobs"][0] is None


def test_the_token_itself_comes_first(server: Running) -> None:
    """In the alternatives of completions, also where others are more probable."""
    body = {"prompt": "Once upon a purple tree", "max_tokens": 0, "echo": True, "logprobs": 2, "return_tokens_as_token_ids": True}
    lists = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    pairs = list(zip(lists["tokens"], lists["top_logprobs"], strict=True))[1:]
    assert [next(iter(listed)) for _, listed in pairs] == [token for token, _ in pairs]
    assert any(max(listed.values()) > listed[token] for token, listed in pairs)
