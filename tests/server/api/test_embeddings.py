"""Embeddings: lists that mix texts and token ids, fewer dimensions, and inputs as long as the context."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.server.conftest import Running

HIDDEN = 256  # of the bundled model


def embed(server: Running, **body: Any) -> np.ndarray:
    answer = server.post("/v1/embeddings", body)
    assert answer.status_code == 200, answer.text
    return np.array([one["embedding"] for one in answer.json()["data"]])


def test_texts_and_token_ids_in_one_list(server: Running) -> None:
    ids = server.post("/tokenize", {"prompt": "the sea"}).json()["tokens"]
    mixed = embed(server, input=["a dragon", ids, "the sea"])
    assert mixed.shape == (3, HIDDEN)
    assert mixed[0] == pytest.approx(embed(server, input="a dragon")[0]) and mixed[1] == pytest.approx(mixed[2])


def test_dimensions(server: Running) -> None:
    whole, few = embed(server, input="a dragon", normalize=False), embed(server, input="a dragon", dimensions=16)
    assert few.shape == (1, 16) and np.linalg.norm(few) == pytest.approx(1.0, abs=1e-5)
    assert few == pytest.approx(whole[:, :16] / np.linalg.norm(whole[:, :16]), abs=1e-5)
    assert embed(server, input="a dragon", dimensions=16, normalize=False) == pytest.approx(whole[:, :16])
    assert embed(server, input="a dragon", dimensions=HIDDEN).shape == (1, HIDDEN)
    for wrong in (HIDDEN + 1, 0):
        error = server.post("/v1/embeddings", {"input": "a", "dimensions": wrong}).json()["error"]
        assert error["param"] == "dimensions"


def test_an_input_may_fill_the_context(server: Running) -> None:
    """No output token needs room."""
    assert embed(server, input=[5] * 1024).shape == (1, HIDDEN)
    assert server.post("/v1/embeddings", {"input": [5] * 1025}).json()["error"]["code"] == "context_length_exceeded"
    kept = server.post("/v1/embeddings", {"input": [5] * 3000, "truncate_prompt_tokens": -1}).json()
    assert kept["usage"]["prompt_tokens"] == 1024


def test_a_conversation(server: Running) -> None:
    """Its vector is that of the text that the chat template renders, by default without the start of an answer."""
    messages = [{"role": "user", "content": "a dragon"}]
    for more in ({}, {"add_generation_prompt": True}):
        ids = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False, **more}).json()["tokens"]
        assert embed(server, messages=messages, **more) == pytest.approx(embed(server, input=ids), abs=1e-5)
    for body, param in [({}, "input"), ({"input": "a", "messages": messages}, "input"), ({"messages": []}, "messages")]:
        assert server.post("/v1/embeddings", body).json()["error"]["param"] == param
    long = [{"role": "user", "content": "word " * 3000}]
    assert server.post("/v1/embeddings", {"messages": long}).json()["error"]["code"] == "context_length_exceeded"


def test_use_activation_is_normalize(server: Running) -> None:
    assert embed(server, input="a", use_activation=False) == pytest.approx(embed(server, input="a", normalize=False))
    both = server.post("/v1/embeddings", {"input": "a", "normalize": True, "use_activation": False})
    assert both.json()["error"]["param"] == "use_activation"


def test_truncation_beyond_the_context_is_refused(server: Running) -> None:
    for path, field in (("/v1/embeddings", "input"), ("/v1/completions", "prompt")):
        for prompt in ("a dragon", [5] * 20):
            error = server.post(path, {field: prompt, "truncate_prompt_tokens": 1025}).json()["error"]
            assert error["param"] == "truncate_prompt_tokens" and "smaller truncation size" in error["message"]
