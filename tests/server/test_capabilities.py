"""The list of capabilities against what the server does: every field is tried, and none of the official clients' fields is missing."""

from __future__ import annotations

import pytest

from tests.server.conftest import Running
from tinyvllm.server.app import ENDPOINTS
from tinyvllm.server.fields import Body

NEEDED = {  # what a field needs beside itself to mean anything
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True, "include": ["message.output_text.logprobs"]},
    "tool_choice": {"tools": None},
    "length_penalty": {"use_beam_search": True},
    "best_of": {"n": 2},
}
ENDPOINT_OF = {e.path: e for e in ENDPOINTS}


def least(body: type[Body]) -> dict:
    """A body with nothing but what must be there, asking for little."""
    given = {"model": "demo"}
    for name, field in body.model_fields.items():
        if field.is_required() and name != "model":
            given[name] = field.json_schema_extra["x-example"]
    if "max_output_tokens" in body.model_fields:
        given["max_output_tokens"] = 2
    elif "max_tokens" in body.model_fields:
        given["max_tokens"] = 3
    if body.__name__ in ("GenerateRequest", "TokenizeRequest"):
        given["prompt"] = "Once"
    return given


def with_field(body: type[Body], name: str, value: object) -> dict:
    given = least(body)
    for other, needed in NEEDED.get(name, {}).items():
        if other in body.model_fields:
            given[other] = body.model_fields[other].json_schema_extra["x-example"] if needed is None else needed
    if name in ("prompt_token_ids", "messages") and name != "prompt":
        given.pop("prompt", None)
    if name == "max_completion_tokens":
        given.pop("max_tokens")
    if name == "logprobs" and body.__name__ == "CompletionRequest":
        given["echo"] = True
    return {**given, name: value}


def cases(support: str) -> list:
    return [
        pytest.param(e.path, name, id=f"{e.path}:{name}")
        for e in ENDPOINTS
        for name, field in e.body.model_fields.items()
        if field.json_schema_extra["x-support"] == support
    ]


def test_the_list_is_the_schemas(server: Running) -> None:
    listed = server.post  # GET has no helper: the list is read below
    assert listed
    import httpx

    said = httpx.get(f"{server.url}/v1/capabilities", trust_env=False).json()["endpoints"]
    for endpoint in ENDPOINTS:
        assert set(said[endpoint.path]) == set(endpoint.body.model_fields)
        assert {about["support"] for about in said[endpoint.path].values()} <= {"honoured", "limited", "refused"}


@pytest.mark.parametrize("kind", ["honoured", "limited"])
def test_what_is_served_is_taken(server: Running, kind: str) -> None:
    """Every example value of every field, one request each."""
    wrong = []
    for case in cases(kind):
        path, name = case.values
        value = ENDPOINT_OF[path].body.model_fields[name].json_schema_extra["x-example"]
        if value is None:
            continue
        answer = server.post(path, with_field(ENDPOINT_OF[path].body, name, value))
        if answer.status_code != 200 or "x-ignored-fields" in answer.headers:
            wrong.append((path, name, answer.status_code, answer.text[:300]))
    assert not wrong, "\n".join(map(str, wrong))


def test_what_is_not_served_is_refused_by_name(server: Running) -> None:
    wrong = []
    for case in [*cases("refused"), *cases("limited")]:
        path, name = case.values
        marks = ENDPOINT_OF[path].body.model_fields[name].json_schema_extra
        value = marks["x-example"] if marks["x-support"] == "refused" else marks["x-beyond"]
        if value is None:
            continue
        answer = server.post(path, with_field(ENDPOINT_OF[path].body, name, value))
        said = answer.json().get("error", {})
        named = said.get("param") or said.get("message", "")
        if answer.status_code != 400 or name not in named:
            wrong.append((path, name, answer.status_code, answer.text[:300]))
        null = server.post(path, {**least(ENDPOINT_OF[path].body), name: None})
        if null.status_code != 200:
            wrong.append((path, name, "null", null.text[:300]))
    assert not wrong, "\n".join(map(str, wrong))


def test_no_field_of_the_official_clients_is_missing() -> None:
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")
    from anthropic.types import message_count_tokens_params, message_create_params
    from openai.types import completion_create_params, embedding_create_params
    from openai.types.chat import completion_create_params as chat_create_params
    from openai.types.responses import response_create_params

    official = {
        "/v1/chat/completions": chat_create_params.CompletionCreateParamsBase,
        "/v1/completions": completion_create_params.CompletionCreateParamsBase,
        "/v1/responses": response_create_params.ResponseCreateParamsBase,
        "/v1/embeddings": embedding_create_params.EmbeddingCreateParams,
        "/v1/messages": message_create_params.MessageCreateParamsBase,
        "/v1/messages/count_tokens": message_count_tokens_params.MessageCountTokensParams,
    }
    for path, params in official.items():
        assert set(params.__annotations__) <= set(ENDPOINT_OF[path].body.model_fields), path
        assert "stream" in ENDPOINT_OF[path].body.model_fields or path in ("/v1/embeddings", "/v1/messages/count_tokens")


def test_lenient_names_what_it_left_out() -> None:
    from tests.server.conftest import running
    from tinyvllm.server.calls import ServerConfig

    with running(ServerConfig(port=0, lenient=True, access_log=False)) as server:
        messages = [{"role": "user", "content": "a", "mood\r\nX-Evil: 1": 1}]
        body = {"messages": messages, "max_tokens": 1, "wish": 1, "web_search_options": {}}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ignored-fields"] == "web_search_options, messages[0].mood%0D%0AX-Evil%3A%201, wish"
        assert "x-evil" not in answer.headers
        assert server.post("/v1/chat/completions", {**body, "temperature": "hot"}).status_code == 400
