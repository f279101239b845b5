"""/score, /rerank, /apply-template and /props: the figures against the engine's own, and the forms of vLLM, Jina and llama.cpp."""

from __future__ import annotations

import math

import httpx
import numpy as np
import pytest

from tests.server.conftest import ENGINE, Running, events, running
from tinyvllm.cli.arguments import parse
from tinyvllm.cli.options import engine_options
from tinyvllm.server.core.config import ServerConfig

TEXTS = ["The dog ran to the river.", "A cat sat on the mat.", "One two three."]
QUERY = "the dog"


def likelihood(server: Running, document: str) -> float:
    """By the log-probabilities of /v1/completions: the query's tokens after the document in its frame."""
    start = server.post("/tokenize", {"prompt": f"Document: {document}\nQuery:"}).json()["tokens"]
    body = {"prompt": f"Document: {document}\nQuery: {QUERY}", "max_tokens": 0, "echo": True, "logprobs": 0}
    values = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]["token_logprobs"][len(start) :]
    return math.exp(sum(values) / len(values))


def test_scores_are_the_likelihood_of_the_query(server: Running) -> None:
    expected = [likelihood(server, text) for text in TEXTS]
    answer = server.post("/score", {"text_1": QUERY, "text_2": TEXTS}).json()
    assert [one["index"] for one in answer["data"]] == [0, 1, 2] and answer["object"] == "list" and answer["model"] == "demo"
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected, rel=0.03)
    assert answer["usage"]["prompt_tokens"] > 0
    pairs = server.post("/v1/score", {"text_1": [QUERY, QUERY], "text_2": TEXTS[:2]}).json()
    assert [one["score"] for one in pairs["data"]] == pytest.approx(expected[:2], rel=0.03)


def test_scores_by_embedding_are_cosines(server: Running) -> None:
    vectors = [one["embedding"] for one in server.post("/v1/embeddings", {"input": [QUERY, *TEXTS]}).json()["data"]]
    expected = np.array(vectors[1:]) @ np.array(vectors[0])
    answer = server.post("/score", {"text_1": QUERY, "text_2": TEXTS, "method": "embedding"}).json()
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_rerank_orders_documents(server: Running, path: str) -> None:
    scores = [one["score"] for one in server.post("/score", {"text_1": QUERY, "text_2": TEXTS}).json()["data"]]
    order = sorted(range(3), key=lambda i: -scores[i])
    body = {"model": "demo", "query": QUERY, "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
    answer = server.post(path, body).json()
    assert [one["index"] for one in answer["results"]] == order
    assert [one["document"]["text"] for one in answer["results"]] == [TEXTS[i] for i in order]
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx([scores[i] for i in order], rel=0.03)
    short = server.post(path, {**body, "top_n": 1, "return_documents": False}).json()
    assert [set(one) for one in short["results"]] == [{"index", "relevance_score"}] and short["results"][0]["index"] == order[0]


def test_what_cannot_be_scored(server: Running) -> None:
    for path, body, param in [
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["a", ""]}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["b", "x " * 5000]}, "documents[1]"),
        ("/rerank", {"query": "a", "documents": ["a"] * 1001}, "documents"),
        ("/rerank", {"query": "a", "documents": [{"image": "x"}]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
    ]:
        response = server.post(path, body)
        error = response.json()["error"]
        assert response.status_code == 400 and (error["param"] or "").startswith(param), error
    assert server.post("/score", {"text_1": "a", "text_2": "x " * 5000}).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("first", "second"), [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
def test_scores_under_other_names(server: Running, first: str, second: str) -> None:
    """vLLM's names of the two sides of /score; two names of one side are refused."""
    expected = server.post("/score", {"text_1": QUERY, "text_2": TEXTS}).json()["data"]
    assert server.post("/score", {first: QUERY, second: TEXTS}).json()["data"] == expected
    for body, param in [({first: QUERY}, "text_2"), ({first: QUERY, "text_1": QUERY, second: TEXTS}, "text_1")]:
        error = server.post("/score", body).json()["error"]
        assert error["param"] == param and "send one of" in error["message"]


INVOCATIONS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0}, "choices"),
    ("/v1/completions", {"prompt": "Once upon", "max_tokens": 3, "temperature": 0}, "choices"),
    ("/v1/embeddings", {"input": "a dragon"}, "data"),
    ("/score", {"queries": QUERY, "documents": TEXTS}, "data"),
    ("/rerank", {"query": QUERY, "documents": TEXTS}, "results"),
]


@pytest.mark.parametrize(("path", "body", "part"), INVOCATIONS)
def test_one_path_for_all_apis(server: Running, path: str, body: dict, part: str) -> None:
    """/invocations answers as the API that the fields of the body mean, and refuses as it does."""
    answer, expected = server.post("/invocations", body).json(), server.post(path, body).json()
    assert answer.keys() == expected.keys() and answer[part] == expected[part]
    refused = server.post("/invocations", {**body, "wish": 1})
    assert refused.status_code == 400 and refused.json()["error"] == server.post(path, {**body, "wish": 1}).json()["error"]


def test_a_body_of_no_api(server: Running) -> None:
    answer = server.post("/invocations", {"model": "demo"})
    assert answer.status_code == 400 and "messages" in answer.json()["error"]["message"]


def test_the_number_of_running_requests(server: Running) -> None:
    """A stream counts while it is open; reading the number does not."""

    def load() -> dict[str, int]:
        return httpx.get(f"{server.url}/load", timeout=60, trust_env=False).json()

    assert load() == {"server_load": 0}
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert load() == {"server_load": 1}
        list(lines)
    while load()["server_load"]:  # the last bytes arrive before the request is over
        pass


def test_the_text_of_a_template(server: Running) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    prompt = server.post("/apply-template", {"messages": messages}).json()["prompt"]
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert server.post("/tokenize", {"prompt": prompt, "add_special_tokens": False}).json()["tokens"] == tokens and "Hello" in prompt
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert server.post("/apply-template", {"messages": messages, "chat_template": template}).json() == {"prompt": "[Hello]"}
    assert server.post("/apply-template", {"messages": []}).status_code == 400
    long = server.post("/apply-template", {"messages": [{"role": "user", "content": "a " * 20_000}]})  # nothing is generated
    assert long.status_code == 200 and len(long.json()["prompt"]) > 40_000


def test_the_properties_of_the_model(server: Running) -> None:
    props = httpx.get(f"{server.url}/props", timeout=60, trust_env=False).json()
    model = httpx.get(f"{server.url}/v1/models", timeout=60, trust_env=False).json()["data"][0]
    assert props["default_generation_settings"]["n_ctx"] == model["max_model_len"] and props["total_slots"] == 8
    assert props["model_alias"] == "demo" and "/" not in props["model_path"] and props["chat_template"]
    assert httpx.get(f"{server.url}/props?model=other", timeout=60, trust_env=False).status_code == 404


def test_a_server_without_a_tokenizer_takes_and_gives_token_ids() -> None:
    """vLLM's --skip-tokenizer-init."""
    parsed = parse(["serve", "--skip-tokenizer-init"])[1]
    assert engine_options(parsed) == {"skip_tokenizer_init": True, "warm_up": True}
    ids = {"prompt": [7, 8, 9], "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with running(ServerConfig(port=0, access_log=False), {"ids": {**ENGINE, **engine_options(parsed)}}) as server:
        (choice,) = server.post("/v1/completions", {**ids, "logprobs": 2}).json()["choices"]
        assert len(choice["token_ids"]) == 4 and choice["text"] == "" and choice["finish_reason"] == "length"
        streamed = events(server.post("/v1/completions", {**ids, "stream": True}))
        assert [i for event in streamed[:-1] for part in event["choices"] for i in part["token_ids"] or ()] == choice["token_ids"]
        asked = {
            "/v1/completions": {**ids, "prompt": "Once"},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
            "/v1/messages": {"model": "ids", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
            "/v1/responses": {"input": "Hi"},
            "/tokenize": {"prompt": "Once"},
            "/detokenize": {"tokens": [7]},
            "/v1/embeddings": {"input": "Once"},
        }
        for path, body in asked.items():
            answer = server.post(path, body)
            assert answer.status_code == 400 and "without a tokenizer" in answer.text, (path, answer.text)
        for refused in ({"stop": ["x"]}, {"bad_words": ["x"]}, {"structured_outputs": {"choice": ["x"]}}):
            answer = server.post("/v1/completions", {**ids, **refused})
            assert answer.status_code == 400 and "tokenizer" in answer.text, (refused, answer.text)
