"""/v1/capabilities against the behaviour of the server: every field is tried, and no field of the official clients is missing."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest

from tests.server.conftest import Running, running
from tinyvllm.config.engine import resolve
from tinyvllm.quant.formats import Layout, packed_in
from tinyvllm.server.api.capabilities import speculation_of
from tinyvllm.server.api.routes import ENDPOINTS
from tinyvllm.server.core.body import Body
from tinyvllm.server.core.config import ServerConfig

NEEDED = {  # other fields that a field requires
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True, "include": ["message.output_text.logprobs"]},
    "tool_choice": {"tools": None},
    "length_penalty": {"use_beam_search": True},
    "best_of": {"n": 2},
    "logprob_token_ids": {"logprobs": None, "n_probs": None, "include": ["message.output_text.logprobs"]},
    "add_special": {"content": None},
    "with_pieces": {"content": None},
    "truncation_side": {"truncate_prompt_tokens": 8},
}
REPLACED = {"queries": "text_1", "data_1": "text_1", "documents": "text_2", "items": "text_2", "data_2": "text_2"}  # fields of /score
OF_MESSAGES = ("messages", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")
ENDPOINT_OF = {e.path: e for e in ENDPOINTS}
OF_ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # they need a folder and a server that allows them: test_adapters.py


def minimal(body: type[Body]) -> dict:
    """A body with only the required fields, and a short answer."""
    given = {"model": "demo"} if "model" in body.model_fields else {}
    for name, field in body.model_fields.items():
        if field.is_required() and name != "model":
            given[name] = field.json_schema_extra["x-example"]
    if "max_output_tokens" in body.model_fields:
        given["max_output_tokens"] = 2
    elif "max_tokens" in body.model_fields:
        given["max_tokens"] = 3
    if body.__name__ in ("GenerateRequest", "TokenizeRequest"):
        given["prompt"] = "Once"
    if body.__name__ == "SegmentRequest":
        given["text"] = "Once"
    if body.__name__ == "EmbeddingRequest":
        given["input"] = "a text"
    if body.__name__ == "ScoreRequest":
        given |= {"text_1": "a query", "text_2": "a text"}
    return given


def with_field(body: type[Body], name: str, value: object) -> dict:
    given = minimal(body)
    is_refused = body.model_fields[name].json_schema_extra["x-support"] == "refused"  # then it needs no others
    for other, needed in ({} if is_refused else NEEDED.get(name, {})).items():
        if other in body.model_fields:
            given[other] = body.model_fields[other].json_schema_extra["x-example"] if needed is None else needed  # None: the example
    if name in ("prompt_token_ids", "messages", "content", "add_special", "with_pieces"):
        given.pop("prompt", None)
    if body.__name__ == "EmbeddingRequest" and name in OF_MESSAGES:
        del given["input"]
        given["messages"] = body.model_fields["messages"].json_schema_extra["x-example"]
    if body.__name__ == "ScoreRequest":
        given.pop(REPLACED.get(name, ""), None)
    if body.__name__ == "SegmentRequest" and name in ("token_ids", "messages"):
        del given["text"]
    if name in ("max_completion_tokens", "n_predict"):
        given.pop("max_tokens", None)
    if name == "logprobs" and body.__name__ == "CompletionRequest":
        given["echo"] = True
    return {**given, name: value}


def fields(support: str) -> list[tuple[str, str]]:
    """(path, field) of all fields with this support."""
    return [
        (e.path, name) for e in ENDPOINTS for name, field in e.body.model_fields.items() if field.json_schema_extra["x-support"] == support
    ]


def test_the_openapi_document_is_complete(server: Running) -> None:
    """It contains every path, and every schema that it refers to."""
    document = httpx.get(f"{server.url}/openapi.json", timeout=60, trust_env=False)
    paths, schemas = document.json()["paths"], document.json()["components"]["schemas"]
    assert {e.path for e in ENDPOINTS} < set(paths)
    assert set(re.findall(r'"#/components/schemas/(\w+)"', document.text)) <= set(schemas)
    assert paths["/v1/models/{name}"]["get"]["parameters"][0]["name"] == "name"


def ask_all(server: Running, asked: list[tuple[str, dict]]) -> list[httpx.Response]:
    """The responses to many bodies, eight concurrently: the engine batches them."""

    async def run() -> list[httpx.Response]:
        some = asyncio.Semaphore(8)
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as client:
            file = {"file": ("in.jsonl", b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}')}
            uploaded = (await client.post("/v1/files", files=file, data={"purpose": "batch"})).json()["id"]

            async def ask(path: str, body: dict) -> httpx.Response:
                if path == "/v1/batches":
                    body = {**body, "input_file_id": uploaded}
                async with some:
                    return await client.post(path, json=body)

            return await asyncio.gather(*(ask(path, body) for path, body in asked))

    return asyncio.run(run())


def test_the_list_matches_the_schemas(server: Running) -> None:
    said = httpx.get(f"{server.url}/v1/capabilities", timeout=60, trust_env=False).json()["endpoints"]
    for endpoint in ENDPOINTS:
        assert set(said[endpoint.path]) == set(endpoint.body.model_fields)
        assert {about["support"] for about in said[endpoint.path].values()} <= {"honoured", "limited", "refused"}


def test_what_the_device_computes_with_as_packed(server: Running) -> None:
    """From the table of formats, for the layout of the device; the bundled model has its weights in one of them, or in floats."""
    (model,) = httpx.get(f"{server.url}/v1/capabilities", timeout=60, trust_env=False).json()["models"].values()
    assert model["device"] == "CPU" and "speculation" in model and model["kv_cache_dtype"] == "auto" and model["weights"]
    assert model["packed"] == {"weights": [*packed_in(Layout.PANELS)], "kv_cache": ["fp8_e4m3", "int8", "int4"]}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("off", None),
        ("auto", {"method": "suffix", "num_speculative_tokens": None, "controller": "adaptive", "exact": True}),
        (
            {"method": "eagle3", "model": "/a/path", "num_speculative_tokens": 5, "policy": "typical"},
            {"method": "eagle3", "num_speculative_tokens": 5, "controller": "fixed", "exact": False},
        ),
    ],
)
def test_how_a_model_speculates(config: Any, expected: Any) -> None:
    assert speculation_of(resolve(None, speculative_config=config)) == expected


def test_supported_values_are_accepted(server: Running) -> None:
    """The example value of every field, one request each."""
    tried, asked = [], []
    for path, name in [*fields("honoured"), *fields("limited")]:
        body = ENDPOINT_OF[path].body
        value = body.model_fields[name].json_schema_extra["x-example"]
        if value is not None and path not in OF_ADAPTERS:
            tried.append((path, name))
            asked.append((path, with_field(body, name, value)))
    answers = ask_all(server, asked)
    wrong = [(*t, a.text[:300]) for t, a in zip(tried, answers, strict=True) if a.status_code != 200 or "x-ignored-fields" in a.headers]
    assert not wrong, "\n".join(map(str, wrong))


def test_unsupported_values_are_refused_by_name(server: Running) -> None:
    tried, asked = [], []
    for path, name in [*fields("refused"), *fields("limited")]:
        body = ENDPOINT_OF[path].body
        marks = body.model_fields[name].json_schema_extra
        value = marks["x-example"] if marks["x-support"] == "refused" else marks.get("x-beyond")
        if value is not None:
            tried.append((path, name))
            asked.append((path, with_field(body, name, value)))
    wrong = []
    for (path, name), answer in zip(tried, ask_all(server, asked), strict=True):
        said = answer.json().get("error", {})
        if answer.status_code != 400 or name not in (said.get("param") or said.get("message", "")):
            wrong.append((path, name, answer.status_code, answer.text[:300]))
    assert not wrong, "\n".join(map(str, wrong))


def test_values_without_effect_are_accepted_and_named(server: Running) -> None:
    """Fields that other servers use: the answer is as if they were absent, and the header says so."""
    tried, asked = [], []
    for path, name in fields("limited"):
        marks = ENDPOINT_OF[path].body.model_fields[name].json_schema_extra
        if "x-ignored" in marks:
            tried.append((path, name))
            asked.append((path, with_field(ENDPOINT_OF[path].body, name, marks["x-ignored"])))
    assert ("/v1/chat/completions", "prediction") in tried and ("/v1/messages", "service_tier") in tried
    wrong = [
        (*t, a.status_code, a.headers.get("x-ignored-fields"), a.text[:300])
        for t, a in zip(tried, ask_all(server, asked), strict=True)
        if a.status_code != 200 or a.headers.get("x-ignored-fields") != t[1]
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_null_means_unset(server: Running) -> None:
    """Some clients send all of their fields: one request for each endpoint with all of them null."""
    asked = []
    for endpoint in [e for e in ENDPOINTS if e.path not in OF_ADAPTERS]:
        nulls = {name: None for name, field in endpoint.body.model_fields.items() if not field.is_required()}
        asked.append((endpoint.path, {**nulls, **minimal(endpoint.body)}))
    assert [a.status_code for a in ask_all(server, asked)] == [200] * len(asked)


def test_no_field_of_the_official_clients_is_missing() -> None:
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")
    from anthropic.types import message_count_tokens_params, message_create_params
    from openai.types import batch_create_params, completion_create_params, embedding_create_params
    from openai.types.chat import completion_create_params as chat_create_params
    from openai.types.responses import response_create_params

    official = {
        "/v1/chat/completions": chat_create_params.CompletionCreateParamsBase,
        "/v1/completions": completion_create_params.CompletionCreateParamsBase,
        "/v1/responses": response_create_params.ResponseCreateParamsBase,
        "/v1/batches": batch_create_params.BatchCreateParams,
        "/v1/embeddings": embedding_create_params.EmbeddingCreateParams,
        "/v1/messages": message_create_params.MessageCreateParamsBase,
        "/v1/messages/count_tokens": message_count_tokens_params.MessageCountTokensParams,
    }
    for path, params in official.items():
        assert set(params.__annotations__) <= set(ENDPOINT_OF[path].body.model_fields), path
        assert "stream" in ENDPOINT_OF[path].body.model_fields or path in ("/v1/batches", "/v1/embeddings", "/v1/messages/count_tokens")


def test_lenient_names_ignored_fields() -> None:
    with running(ServerConfig(port=0, lenient=True, access_log=False)) as server:
        messages = [{"role": "user", "content": "a", "mood\r\nX-Evil: 1": 1}]
        body = {"messages": messages, "max_tokens": 1, "wish": 1, "web_search_options": {}}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ignored-fields"] == "web_search_options, wish, messages[0].mood%0D%0AX-Evil%3A%201"
        assert "x-evil" not in answer.headers
        assert server.post("/v1/chat/completions", {**body, "temperature": "hot"}).status_code == 400
