"""GET /debug/trace: off unless it is allowed, bounded, and JSON for Perfetto."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.server.conftest import Running, running
from tinyvllm.server.api import debug
from tinyvllm.server.core.config import ServerConfig
from tinyvllm.server.core.limits import MAX_TRACE_STEPS


def get(server: Running, query: str) -> httpx.Response:
    return httpx.get(f"{server.url}/debug/trace{query}", timeout=60, trust_env=False)


@pytest.fixture(scope="module")
def allowed() -> Iterator[Running]:
    with running(ServerConfig(port=0, allow_trace=True, access_log=False)) as server:
        yield server


def test_it_is_off_unless_it_was_allowed(server: Running) -> None:
    answer = get(server, "?steps=1")
    assert answer.status_code == 403 and "--allow-trace" in answer.json()["error"]["message"]


@pytest.mark.parametrize("steps", ["0", "-1", str(MAX_TRACE_STEPS + 1), "9" * 5000, "1e3", "", "٣", "1&steps=x"])
def test_hostile_numbers_of_steps(allowed: Running, steps: str) -> None:
    answer = get(allowed, f"?steps={steps}")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "steps"
    assert f"from 1 to {MAX_TRACE_STEPS}" in answer.json()["error"]["message"] and len(answer.text) < 500


def test_the_next_steps_of_running_requests(allowed: Running) -> None:
    body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True}
    stop = threading.Event()

    def talk() -> None:
        while not stop.is_set():
            allowed.post("/v1/completions", body)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        answer = get(allowed, "?steps=5")
    finally:
        stop.set()
        thread.join(60)
    events = answer.json()
    assert answer.headers["content-type"] == "application/json" and "trace.json" in answer.headers["content-disposition"]
    steps = [event for event in events if event["ph"] == "X" and event["name"] == "step"]
    assert 5 <= len(steps) < 200


def test_an_idle_server_answers_after_its_time(allowed: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "MAX_TRACE_SECONDS", 0.01)
    assert [event for event in get(allowed, "").json() if event["name"] == "step"] == []


def test_two_at_a_time_are_refused(allowed: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for steps of an idle server; so one is refused at once, and a request ends the other."""
    answers: list[httpx.Response] = []
    refused = threading.Event()

    def ask() -> None:
        answers.append(get(allowed, "?steps=1"))
        refused.set()

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert refused.wait(60)
    allowed.post("/v1/completions", {"prompt": "Once", "max_tokens": 2})
    for thread in threads:
        thread.join(60)
    assert [answer.status_code for answer in answers] == [429, 200]
    assert "another trace" in answers[0].json()["error"]["message"]
