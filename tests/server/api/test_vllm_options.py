"""Options of the server under vLLM's names: token ids in log-probabilities, usage in every event, times of each request, the load."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import Running, events, running
from tinyvllm.cli.arguments import parse
from tinyvllm.cli.options import server_options
from tinyvllm.server.core.config import ServerConfig

FLAGS = ("return_tokens_as_token_ids", "enable_force_include_usage", "enable_per_request_metrics")
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "min_tokens": 4, "temperature": 0}
TEXT = {"prompt": "Once upon", "max_tokens": 4, "min_tokens": 4, "temperature": 0}
REQUESTS = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
TIMES = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}


@pytest.fixture(scope="module")
def with_options() -> Iterator[Running]:
    with running(ServerConfig(port=0, access_log=False, **dict.fromkeys(FLAGS, True))) as server:
        yield server


def test_the_command_line_has_them() -> None:
    _, options = parse(["serve", *(f"--{name.replace('_', '-')}" for name in FLAGS)])
    assert {name: server_options(options)[name] for name in FLAGS} == dict.fromkeys(FLAGS, True)


def test_tokens_as_token_ids(with_options: Running) -> None:
    chosen = with_options.post("/v1/chat/completions", {**CHAT, "logprobs": True}).json()["choices"][0]["logprobs"]["content"]
    assert all(one["token"].startswith("token_id:") for one in chosen)
    tokens = with_options.post("/v1/completions", {**TEXT, "logprobs": 0}).json()["choices"][0]["logprobs"]["tokens"]
    assert all(one.startswith("token_id:") for one in tokens)
    own = with_options.post("/v1/completions", {**TEXT, "logprobs": 0, "return_tokens_as_token_ids": False}).json()
    assert not any(one.startswith("token_id:") for one in own["choices"][0]["logprobs"]["tokens"])


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_usage_in_every_event(with_options: Running, path: str, body: dict) -> None:
    stream = events(with_options.post(path, {**body, "stream": True}))[:-1]
    counts = [event["usage"]["completion_tokens"] for event in stream]
    assert counts == sorted(counts) and counts[-1] == 4 and not stream[-1]["choices"]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_times_of_a_request(with_options: Running, server: Running, path: str, body: dict) -> None:
    whole = with_options.post(path, body).json()["metrics"]
    assert set(whole) == TIMES and all(value >= 0 for value in whole.values())
    *first, last = events(with_options.post(path, {**body, "stream": True}))[:-1]
    assert set(last["metrics"]) == TIMES and not any("metrics" in event for event in first)
    assert "mean_itl_ms" not in with_options.post(path, {**body, "max_tokens": 1, "min_tokens": 1}).json()["metrics"]
    assert "metrics" not in with_options.post(path, {**body, "n": 2}).json()  # several answers have no common time
    assert "metrics" not in server.post(path, body).json()


def test_the_size_of_the_cache(server: Running) -> None:
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=60, trust_env=False).text)
    (labels,) = (sample.labels for family in families if family.name == "vllm:cache_config_info" for sample in family.samples)
    assert int(labels["kv_cache_size_tokens"]) == int(labels["block_size"]) * int(labels["num_gpu_blocks"])
    assert float(labels["kv_cache_max_concurrency"]) > 0


@pytest.mark.parametrize(("path", "body"), [*REQUESTS, ("/v1/chat/completions/batch", {**CHAT, "messages": [CHAT["messages"]]})])
def test_the_load_in_a_header(server: Running, path: str, body: dict) -> None:
    asked = {"endpoint-load-metrics-format": "JSON"}
    answer = server.post(path, body, **asked)
    kind, _, text = answer.headers["endpoint-load-metrics"].partition(" ")
    figures = json.loads(text)["named_metrics"]
    assert kind == "JSON" and 0 <= figures["kv_cache_usage_perc"] <= 1 and figures["num_requests_waiting"] >= 0
    words = server.post(path, body, **{"endpoint-load-metrics-format": "TEXT"}).headers["endpoint-load-metrics"]
    assert re.fullmatch(r"TEXT named_metrics\.kv_cache_usage_perc=[\d.e-]+, named_metrics\.num_requests_waiting=[\d.]+", words)
    assert "endpoint-load-metrics" not in server.post(path, body).headers
    wrong = server.post(path, body, **{"endpoint-load-metrics-format": "BIN"})
    assert wrong.status_code == 400 and "must be TEXT or JSON" in wrong.json()["error"]["message"]
