"""The lab against OpenAI servers: retries, time-outs, streams that end early, and vLLM's metrics of drafts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.replies import Reply, ReplyServer
from tinyvllm import cli
from tinyvllm.errors import ArgumentError, RequestError, TinyvllmError
from tinyvllm.lab import http_target
from tinyvllm.lab.http_target import HttpTarget, Server, _growth, counts_of
from tinyvllm.lab.prompts import LabPrompt
from tinyvllm.lab.report import rows_of
from tinyvllm.lab.run import SweepRun
from tinyvllm.lab.sweep import parse_sweep

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {n}.0
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {n2}.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {n}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {n}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} 0.0
vllm:spec_decode_num_drafts_created{{engine="0"}} 1.7e+09
"""


def events(*pieces: str, end: bool = True, kind: str = "text") -> bytes:
    """A stream of pieces, with usage."""
    choices: list[dict[str, Any]] = [{kind: piece} if kind == "text" else {"delta": {"content": piece}} for piece in pieces]
    lines = [{"choices": [choice]} for choice in [*choices, {"finish_reason": "length"}]] + [
        {"choices": [], "usage": {"completion_tokens": 9}}
    ]
    return b"".join(f"data: {json.dumps(line)}\n\n".encode() for line in lines) + (b"data: [DONE]\n\n" if end else b"")


class Fake(ReplyServer):
    """A server; `metrics` says whether it has some."""

    metrics = True

    def page(self, path: str) -> Reply:
        n = len(self.bodies)
        return (200 if self.metrics else 404, {}, METRICS.format(n=n, n2=2 * n).encode()) if path == "/metrics" else super().page(path)


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake((200, {}, events("one two", " three"))).serving() as fake:
        yield fake


def sweep_of(**servers: str) -> Any:
    few = {"batch_sizes": [2], "prompts": ["story"], "repeats": 1, "warmup": 0, "max_tokens": 9, "costs": {"1": 10, "8": 12}}
    return parse_sweep(few | {"servers": servers})


def run_of(target: HttpTarget, sweep: Any) -> tuple[SweepRun, list[str]]:
    prompts = {"story": [LabPrompt(text="a"), LabPrompt(messages=(("user", "b"),)), LabPrompt(token_ids=(1, 2))]}
    work, failures = SweepRun(sweep, target, prompts), list[str]()
    work.run(lambda record: None, lambda cell, error: failures.append(str(error)))
    return work, failures


def test_two_servers_are_compared(fake: Fake) -> None:
    sweep = sweep_of(none=fake.url, fast=f"{fake.url}/v1/")
    work, failures = run_of(HttpTarget(sweep, "secret", None), sweep)
    plain, fast = work.records
    assert not failures and (plain["drafter"], fast["drafter"], fast["k"]) == ("none", "fast", "auto")
    assert fast["exact"] and fast["divergence"]["difference"] == 0 and fast["divergence"]["kl"] is None
    assert fast["output_tokens_per_repeat"]["median"] == 4 * 9  # the usage says so; three prompts fill two batches of two
    # a draft of two tokens a request, of which the first is accepted
    assert fast["positions"] == [{"drafted": 4, "accepted": 4}, {"drafted": 4, "accepted": 0}]
    assert fast["tokens_per_step"] == 2 and fast["drafts_per_step"] == 2 and fast["acceptance"] == 0.5
    (row,) = rows_of([plain, fast], sweep.costs)[1:]
    assert row.speedup is not None and row.predicted == pytest.approx(2 * (10 + 2 / 7) / (10 + 10 / 7))
    bodies = {json.dumps(body.get("messages") or body.get("prompt")): body for body in fake.bodies}
    assert set(bodies) == {'"a"', '[{"role": "user", "content": "b"}]', "[1, 2]"}
    assert set(fake.paths) == {"/v1/completions", "/v1/chat/completions"} and fake.bodies[0]["model"] == "first"
    assert all(headers["Authorization"] == "Bearer secret" for headers in fake.headers)


def test_one_server_without_metrics_or_baseline(fake: Fake) -> None:
    fake.metrics = False
    sweep = sweep_of(mine=fake.url)
    work, failures = run_of(HttpTarget(sweep, None, "m"), sweep)
    (record,) = work.records
    assert not failures and record["tokens_per_step"] is None and record["exact"] is None and record["paired_speedup"] is None
    assert rows_of([record], None)[0].speedup is None and record["tok_s"]["median"] > 0


def test_what_may_pass_is_tried_again(fake: Fake) -> None:
    good = (200, {}, events("x"))
    cut = (200, {}, b": nothing yet\n\n")
    fake.replies = [(503, {"Retry-After": "7"}, b"loading"), (429, {}, b"slow"), cut, good]
    pauses: list[float] = []
    server = Server(fake.url, None, pauses.append)
    answer = server.stream("/v1/completions", {"prompt": "x"})
    assert answer.num_tokens == 9 and answer.tokens == ("x",) and len(fake.bodies) == 4
    assert pauses[0] == 7 and 0.5 <= pauses[1] <= 1 and 1 <= pauses[2] <= 2


@pytest.mark.parametrize(
    ("reply", "attempts", "message"),
    [
        ((400, {}, b'{"error": {"message": "too long"}}'), 1, "too long"),
        ((503, {}, b"loading"), http_target.ATTEMPTS, "tried 6 times"),
        ((503, {"Retry-After": "4000"}, b"loading"), 1, "tried 1 times"),
        ((200, {}, events("x", end=False)), 1, "the connection broke (the stream ended without [DONE])"),
        ((200, {}, b"data: [DONE]\n\n"), 1, "an answer without text"),
        ((200, {}, b"data: {\n\n"), 1, "not JSON"),
        ((200, {}, b"data: [1]\n\n"), 1, "not an object"),
        ((200, {}, b'data: {"error": {"message": "lost"}}\n\n'), 1, "lost"),
        ((200, {}, b"data: " + b"x" * 4000), 1, "a line of more than"),
        ((200, {}, b": still there\n\n" * 5000), 1, "an answer of more than"),
        ((200, {}, b'data: {"choices": [{"delta": ["x"]}]}\n\ndata: [DONE]\n\n'), 1, "an answer without text"),
        ((200, {}, events(*["x" * 500] * 5)), 1, "an answer of more than"),
    ],
)
def test_what_fails(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, reply: tuple[int, dict[str, str], bytes], attempts: int, message: str
) -> None:
    monkeypatch.setattr("tinyvllm.http_client.MAX_EVENT", 2000)
    monkeypatch.setattr("tinyvllm.http_client.MAX_STREAM", 20_000)
    monkeypatch.setattr(http_target, "MAX_TEXT", 2000)
    fake.replies = [reply]
    server = Server(fake.url, None, lambda seconds: None)
    with pytest.raises(TinyvllmError) as failure:
        server.stream("/v1/completions", {})
    assert message in str(failure.value) and len(fake.bodies) == attempts


def test_comments_are_no_sign_of_life_for_ever(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyvllm.http_client.MAX_SILENCE", -1.0)
    fake.replies = [(200, {}, b": still there\n\n" + events("x"))]
    with pytest.raises(TinyvllmError, match="no event within"):
        Server(fake.url, None, lambda seconds: None).stream("/v1/completions", {})


def test_a_server_that_is_not_there_or_no_openai_server(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    gone = Server("http://127.0.0.1:1", None, pauses.append)
    with pytest.raises(TinyvllmError, match="no answer.*tried 6 times"):
        gone.model()
    assert len(pauses) == http_target.ATTEMPTS - 1
    monkeypatch.setattr(Server, "_get", lambda self, path: b"<html>")
    with pytest.raises(TinyvllmError, match="is this an OpenAI server"):
        Server(fake.url, None).model()


def test_a_server_that_is_silent_is_a_time_out(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_target, "READ_SECONDS", 0.05)
    release = threading.Event()
    monkeypatch.setattr(fake.http.RequestHandlerClass, "do_POST", lambda self: release.wait(10))
    with pytest.raises(TinyvllmError, match="timed out; tried 6 times|timed out\\); tried 6 times"):
        Server(fake.url, None, lambda seconds: None).stream("/v1/completions", {})
    release.set()


def test_metrics_of_others_are_not_believed() -> None:
    name = "vllm:spec_decode_num_drafts_total"
    text = f'{name}{{a="1"}} x\n{name}{{b="2"}} 3\n{name} 4\nother 5'
    assert counts_of(text) == {("drafts", -1): 7.0} and counts_of(None) == {}


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x?y=1", "http://x:99999"])
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(ArgumentError):
        HttpTarget(sweep_of(mine=url), None)


def test_the_command(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--url", f"none={fake.url}", "--url", f"ours={fake.url}", "--prompts", "story", "--num-prompts", "2", "--repeats", "1"]
    assert cli.main(["lab", *words, "--batch-sizes", "1,2", "--quiet"]) == 0
    assert "| ours" in capsys.readouterr().out
    assert cli.main(["lab", "--url", fake.url, "--drafters", "eagle3:heads", "--quiet"]) == 2
    assert "servers and drafters contradict each other" in capsys.readouterr().err
    with pytest.raises(RequestError):
        fake.replies = [(401, {}, b"no key")]
        Server(fake.url, None).stream("/v1/completions", {})


def test_counts_that_are_no_numbers_or_go_back() -> None:
    name = 'vllm:spec_decode_num_drafts_total{engine="0"}'
    assert counts_of(f"{name} NaN\n{name} 1e999\n{name} 3\n") == {("drafts", -1): 3.0}
    with pytest.raises(TinyvllmError, match="went back while a batch ran"):
        _growth(counts_of(f"{name} 7\n"), counts_of(f"{name} 3\n"))
