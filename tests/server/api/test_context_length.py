"""Prompts and outputs beyond the context, in the words by which agents of each API recognize the error; truncation of prompts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.server.conftest import Running
from tinyvllm.server.api.routes import ENDPOINTS

CONTEXT = 1024  # of the bundled model
LONG = "word " * 3000
USER = [{"role": "user", "content": LONG}]
SHORT = [{"role": "user", "content": "Hello"}]
MAXIMUM = f"This model's maximum context length is {CONTEXT} tokens, however you requested "
IDS = [5] * 3000
TOO_LONG: dict[str, tuple[str, dict[str, Any], str]] = {  # path, body, the field
    "completions": ("/v1/completions", {"prompt": LONG}, "prompt"),
    "one of several": ("/v1/completions", {"prompt": ["a", [5] * 1025]}, "prompt[1]"),
    "chat": ("/v1/chat/completions", {"messages": USER}, "messages"),
    "responses": ("/v1/responses", {"input": LONG}, "messages"),
    "embeddings": ("/v1/embeddings", {"input": LONG}, "input"),
    "generate": ("/generate", {"prompt": LONG}, "prompt"),
    "ids": ("/v1/completions", {"prompt": IDS}, "prompt"),
    "stream": ("/v1/completions", {"prompt": IDS, "stream": True}, "prompt"),
    "echo": ("/v1/completions", {"prompt": IDS, "echo": True, "max_tokens": 0, "logprobs": 1}, "prompt"),
    "beams": ("/v1/completions", {"prompt": IDS, "use_beam_search": True}, "prompt"),
    "chat stream": ("/v1/chat/completions", {"messages": USER, "stream": True}, "messages"),
    "chat batch": ("/v1/chat/completions/batch", {"messages": [SHORT, USER]}, "messages"),
    "chat tokens": ("/v1/chat/completions/input_tokens", {"messages": USER}, "messages"),
    "responses tokens": ("/v1/responses/input_tokens", {"input": LONG}, "messages"),
    "embeddings of ids": ("/v1/embeddings", {"input": [[5], [5] * 1025]}, "input[1]"),
    "embeddings of a chat": ("/v1/embeddings", {"messages": USER}, "messages"),
    "llama.cpp": ("/completion", {"prompt": IDS}, "prompt"),
    "score": ("/score", {"text_1": "a", "text_2": LONG}, "documents"),
    "score, query": ("/v1/score", {"text_1": LONG, "text_2": ["a", "b"]}, "documents[0]"),
    "score, cosine": ("/score", {"text_1": "a", "text_2": LONG, "method": "embedding"}, "documents[1]"),
    "rerank": ("/rerank", {"query": "a", "documents": ["b", LONG]}, "documents[1]"),
    "rerank, other path": ("/v1/rerank", {"query": "a", "documents": [{"text": LONG}]}, "documents"),
}
OTHER_ERRORS = {
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/segments",
    "/v1/batches",
}  # in tests of their own, here and in test_batches
ANY_LENGTH = {"/tokenize", "/detokenize", "/apply-template", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}  # nothing is computed
NO_ROOM: dict[str, tuple[str, dict[str, Any], str]] = {
    "completions": ("/v1/completions", {"prompt": [5] * 20, "max_tokens": 1005}, "max_tokens"),
    "completions stream": ("/v1/completions", {"prompt": [5] * 20, "max_tokens": 10**9, "stream": True}, "max_tokens"),
    "completions beams": ("/v1/completions", {"prompt": [5] * 20, "max_tokens": 1005, "use_beam_search": True}, "max_tokens"),
    "chat": ("/v1/chat/completions", {"messages": SHORT, "max_tokens": 1024}, "max_tokens"),
    "chat, new name": ("/v1/chat/completions", {"messages": SHORT, "max_completion_tokens": 1024}, "max_completion_tokens"),
    "responses": ("/v1/responses", {"input": "a", "max_output_tokens": 1024}, "max_output_tokens"),
    "generate": ("/generate", {"prompt": [5] * 20, "max_tokens": 1005}, "max_tokens"),
}


def test_every_path_that_computes_a_prompt_is_here() -> None:
    assert {path for path, _, _ in TOO_LONG.values()} | OTHER_ERRORS | ANY_LENGTH == {one.path for one in ENDPOINTS}


@pytest.mark.parametrize("name", TOO_LONG)
def test_prompts_beyond_the_context(server: Running, name: str) -> None:
    path, body, field = TOO_LONG[name]
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    assert error["message"].startswith(MAXIMUM) and f"in {field}" in error["message"]
    assert ("for the output" in error["message"]) == (not name.startswith("embeddings"))
    assert error["n_ctx"] == CONTEXT < error["n_prompt_tokens"] and f"{error['n_prompt_tokens']} in " in error["message"]


@pytest.mark.parametrize("name", NO_ROOM)
def test_outputs_beyond_the_context(server: Running, name: str) -> None:
    path, body, field = NO_ROOM[name]
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    assert error["message"].startswith(MAXIMUM) and error["message"].endswith(f"reduce {field}.")


def test_an_output_that_fills_the_context(server: Running) -> None:
    body = {"prompt": [5] * 1000, "ignore_eos": True, "max_tokens": 24}
    assert server.post("/v1/completions", body).json()["usage"]["total_tokens"] == CONTEXT
    assert server.post("/v1/completions", {**body, "max_tokens": 25}).status_code == 400


def test_without_a_length_the_rest_of_the_context_is_used(server: Running) -> None:
    """The API's default of 16 tokens is no wish of the client: a prompt that leaves less room is served."""
    for more in ({}, {"use_beam_search": True}):
        body = {"prompt": [5] * 1019, "ignore_eos": True, **more}
        assert server.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 5
    several = server.post("/v1/completions", {"prompt": [[5] * 1019, [5]], "ignore_eos": True}).json()
    assert several["usage"]["completion_tokens"] == 5 + 16
    generated = server.post("/generate", {"prompt": [5] * 1019, "ignore_eos": True}).json()
    assert generated["usage"]["completion_tokens"] == 5


def test_anthropics_clients_read_the_numbers(server: Running) -> None:
    body = {"model": "demo", "max_tokens": 5, "messages": USER}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = server.post(path, {name: body[name] for name in body if "count" not in path or name != "max_tokens"})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error"
        assert re.fullmatch(r"prompt is too long: \d+ tokens > 1023 maximum", error["message"])
    used = server.post("/v1/messages/count_tokens", {"model": "demo", "messages": SHORT}).json()["input_tokens"]
    error = server.post("/v1/messages", {"model": "demo", "max_tokens": 1024, "messages": SHORT}).json()["error"]
    assert error["message"].startswith(f"input length and `max_tokens` exceed context limit: {used} + 1024 > 1024, ")


def test_a_segment_says_both_counts(server: Running) -> None:
    answer = server.post("/v1/segments", {"token_ids": IDS})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and "3000" in message and "1024" in message


def test_paths_that_compute_nothing_take_the_whole_prompt(server: Running) -> None:
    ids = server.post("/tokenize", {"prompt": LONG}).json()
    assert ids["count"] > 2 * CONTEXT and ids["max_model_len"] == CONTEXT
    assert LONG.strip() in server.post("/detokenize", {"tokens": ids["tokens"]}).json()["prompt"]
    assert LONG.strip() in server.post("/apply-template", {"messages": USER}).json()["prompt"]


def test_the_side_of_a_truncation(server: Running) -> None:
    ids = list(range(300, 308))

    def kept(**more: Any) -> list[int]:
        body = {"prompt": ids, "max_tokens": 1, "return_token_ids": True, "truncate_prompt_tokens": 4, **more}
        result: list[int] = server.post("/v1/completions", body).json()["choices"][0]["prompt_token_ids"]
        return result

    assert kept() == kept(truncation_side="left") == ids[-4:] and kept(truncation_side="right") == ids[:4]
    alone = server.post("/v1/completions", {"prompt": ids, "truncation_side": "left"}).json()["error"]
    assert alone["param"] == "truncation_side"


def test_a_truncation_to_what_fits_leaves_room_for_the_output(server: Running) -> None:
    body = {"prompt": [5] * 3000, "max_tokens": 20, "truncate_prompt_tokens": -1, "ignore_eos": True}
    usage = server.post("/v1/completions", body).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (1004, 20)
    chat = {"messages": USER, "max_completion_tokens": 20, "truncate_prompt_tokens": -1, "ignore_eos": True}
    assert server.post("/v1/chat/completions", chat).json()["usage"]["total_tokens"] == CONTEXT
