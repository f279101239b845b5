"""Over HTTP, answers with drafts are those without: text, tokens, log-probabilities, usage, in streams and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import ENGINE, Running, events, running

UNCACHED = ENGINE | {"enable_prefix_caching": False}  # usage counts tokens of the prefix cache
MODELS = {
    "plain": UNCACHED | {"speculative_config": "off"},
    "ngram": UNCACHED | {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}},
    "auto": UNCACHED | {"speculative_config": "auto"},
}
DRAFTED = [name for name in MODELS if name != "plain"]
COPY = "the cat sat on the mat and the dog sat on the rug and " * 3
ASK = [{"role": "user", "content": COPY}]
COMMON: dict[str, Any] = {"max_tokens": 48, "seed": 5, "ignore_eos": True, "return_token_ids": True}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": COPY, "temperature": 0, "logprobs": 2}),
    "sampled": ("/v1/completions", {"prompt": [COPY, "Once upon a time"], "temperature": 0.8, "top_p": 0.9, "n": 2, "logprobs": 1}),
    "stop": ("/v1/completions", {"prompt": COPY, "temperature": 0, "stop": ["dog sat", "e"], "min_tokens": 12, "logprobs": 0}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": COPY}], "temperature": 0, "logprobs": True, "top_logprobs": 2},
    ),
    "penalties": (
        "/v1/chat/completions",
        {"messages": ASK, "temperature": 0.5, "frequency_penalty": 0.2, "logprobs": True},
    ),
}


@pytest.fixture(scope="module")
def models() -> Iterator[Running]:
    with running(specs=MODELS) as made:
        yield made


def accepted(server: Running, model: str) -> float:
    """Drafts that the model has accepted, by its metrics."""
    text = httpx.get(server.url + "/metrics", timeout=60, trust_env=False).text
    name = "vllm:spec_decode_num_accepted_tokens_total"
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + "{") and f'"{model}"' in line)


def whole(server: Running, model: str, body: str) -> dict[str, Any]:
    path, fields = BODIES[body]
    response = server.post(path, {"model": model, **COMMON, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def streamed(server: Running, model: str, body: str) -> list[dict[str, Any]]:
    path, fields = BODIES[body]
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    received = events(server.post(path, {"model": model, **COMMON, **fields, **options}))
    assert received[-1] == "[DONE]", received
    return received[:-1]


def joined(parts: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What the events of each choice add up to."""
    choices: dict[int, dict[str, Any]] = {}
    for choice in [choice for part in parts for choice in part["choices"]]:
        sums = choices.setdefault(choice["index"], {"text": "", "tokens": [], "logprobs": [], "end": None})
        sums["text"] += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        sums["tokens"] += choice.get("token_ids") or []
        sums["logprobs"] += entries(choice.get("logprobs"))
        sums["end"] = choice["finish_reason"] or sums["end"]
    return choices


def entries(logprobs: dict[str, Any] | None) -> list[str]:
    """Log-probabilities token by token, exactly."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [json.dumps(entry, sort_keys=True) for entry in logprobs["content"] or ()]
    names = sorted(name for name, values in logprobs.items() if values is not None)
    return [json.dumps(each, sort_keys=True) for each in zip(*(logprobs[name] for name in names), strict=True)]


@pytest.mark.parametrize("model", DRAFTED)
@pytest.mark.parametrize("body", BODIES)
def test_answers(models: Running, model: str, body: str) -> None:
    expected, got = whole(models, "plain", body), whole(models, model, body)
    assert got["usage"] == expected["usage"] and got["choices"] == expected["choices"]


@pytest.mark.parametrize("model", DRAFTED)
@pytest.mark.parametrize("body", BODIES)
def test_streams(models: Running, model: str, body: str) -> None:
    """The events of a step with drafts have several tokens; the usage of each event counts those so far."""
    expected, got = streamed(models, "plain", body), streamed(models, model, body)
    assert joined(got) == joined(expected) and got[-1]["usage"] == expected[-1]["usage"]
    last = whole(models, model, body)
    assert got[-1]["usage"]["completion_tokens"] == last["usage"]["completion_tokens"]
    counted = dict.fromkeys(joined(got), 0)
    for part in got[:-1]:
        for choice in part["choices"]:
            counted[choice["index"]] += len(choice.get("token_ids") or [])
        counts = part["usage"]["completion_tokens"]
        assert part["usage"]["total_tokens"] == counts + part["usage"]["prompt_tokens"]
        assert len(counted) > 1 or counts == counted[0]
    assert sum(counted.values()) == got[-1]["usage"]["completion_tokens"]


def test_drafts_were_accepted(models: Running) -> None:
    """Otherwise these tests would show nothing. Fewer events come, as a step gives several tokens."""
    before = accepted(models, "ngram")
    plain, drafted = streamed(models, "plain", "completion"), streamed(models, "ngram", "completion")
    assert accepted(models, "ngram") > before and accepted(models, "plain") == 0
    assert len(drafted) < len(plain)
