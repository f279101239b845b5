"""Load on a server: what is drawn, what a client sees of a stream however it is cut, and what becomes of the times."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import json
import math
import random
import xml.dom.minidom
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from tests.replies import Reply, ReplyServer
from tinyvllm.bench_serve import client as client_module
from tinyvllm.bench_serve.client import Client, Stream
from tinyvllm.bench_serve.figures import figures_of, outcome_of, parse_goodput, peak_concurrency
from tinyvllm.bench_serve.run import Done, Load, Timing, run_load, wait_until_ready
from tinyvllm.bench_serve.workload import CHAT, COMPLETIONS, Lengths, Prompt, RandomPrompts, Request, arrivals, requests
from tinyvllm.cli import main
from tinyvllm.cli.arguments import parse
from tinyvllm.cli.bench_serve import setup_of
from tinyvllm.errors import ArgumentError, FormatError, TinyvllmError


def event(text: str, reason: str | None = None, **more: Any) -> bytes:
    return f"data: {json.dumps({'choices': [{'index': 0, 'text': text, 'finish_reason': reason}], **more})}\n\n".encode()


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}\n\n'
BODY = [b": keep-alive\n\n", event(""), event("one"), event(" two"), event(" three"), event("", "length"), USAGE, b"data: [DONE]\n\n"]


def chunked(parts: Sequence[bytes]) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(f"{len(part):X}\r\n".encode() + part + b"\r\n" for part in parts) + b"0\r\n\r\n"


def ask(answers: Sequence[Sequence[bytes]], close: bool = False) -> list[Stream]:
    """What a client sees of answers that come in these pieces, one after the other on as few connections as may be."""

    async def talk() -> list[Stream]:
        waiting = list(answers)
        connections = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            with contextlib.closing(writer):
                while (await reader.read(65536)) and waiting:
                    for piece in waiting.pop(0):
                        writer.write(piece)
                        await writer.drain()
                        await asyncio.sleep(0)
                    if close:
                        break

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        streams = [await client.post("/v1/completions", b"{}") for _ in answers]
        assert connections == (len(answers) if close else 1)
        client.close()
        server.close()
        return streams

    return asyncio.run(talk())


def test_a_stream_is_read_the_same_however_it_is_cut() -> None:
    chance, whole = random.Random(1), chunked(BODY)
    cuts = [sorted(chance.sample(range(1, len(whole)), 5)) for _ in range(30)]
    pieces = [[whole[a:b] for a, b in zip([0, *cut], [*cut, None], strict=True)] for cut in cuts]
    body = b"".join(BODY)
    pieces += [[whole], [whole[i : i + 1] for i in range(len(whole))], [chunked([body])], [chunked([bytes([b]) for b in body])]]
    for stream in ask(pieces):
        assert stream.error is None and stream.status == 200 and stream.finish_reason == "length"
        assert stream.usage == {"prompt_tokens": 9, "completion_tokens": 3}
        assert sum(count for _, count in stream.times) == 3  # the events with text
        assert stream.times[-1][0] <= stream.ended and stream.first == stream.times[0][0]


def test_a_body_without_chunks() -> None:
    body = b"".join(BODY)
    [sized] = ask([[f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body]])
    [until] = ask([[b"HTTP/1.1 200 OK\r\n\r\n", body]], close=True)
    assert sized.error is until.error is None and sum(c for _, c in sized.times) == sum(c for _, c in until.times) == 3


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 429 Busy\r\nContent-Length: 40\r\n\r\n" + b'{"error": {"message": "too many wait"}}\n', "429: too many wait"),
        (chunked(BODY[:4]), "without a finish_reason"),
        (chunked(BODY)[:300], "the connection broke"),
        (chunked([event("a"), b'data: {"error": {"message": "out of memory"}}\n\n']), "out of memory"),
        (b"", "the connection broke"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "no HTTP: "),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * (client_module.MAX_HEAD + 1), "a head of more than 64 KiB"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\n", "a Content-Length of "),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nxx", "a chunk with the head "),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 2000, "a chunk with the head "),
        (chunked([b"data: {" + b"x" * 3000]), "an event of more than"),
        (chunked([b"data: [1, 2]\n\n"]), "an event that is not JSON"),
        (chunked([b"data: {broken}\n\n"]), "an event that is not JSON"),
        (chunked([b"data: <html>\n\n"]), "an event that is not JSON"),
        (chunked([b'data: {"choices": [], "usage": {"completion_tokens": 1e999}}\n\n']), "a usage of "),
        (chunked([b'data: {"choices": [], "usage": {"completion_tokens": -1}}\n\n']), "a usage of "),
        (chunked([b'data: {"choices": [7]}\n\n', b"data: [DONE]\n\n"]), "without a finish_reason"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n" + b'{"choices": 3}', "it is no stream"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 5\r\n\r\n[[[[[", "500: [[[[["),
    ],
)
def test_what_goes_wrong_is_said(answer: bytes, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_EVENT", 2000)
    [stream] = ask([[answer]], close=True)
    assert stream.error is not None and error in stream.error


def test_lines_may_end_in_carriage_returns_and_have_names() -> None:
    body = b"".join(BODY).replace(b"\n", b"\r\n").replace(b"data: {", b"event: x\r\ndata:{")
    for pieces in ([chunked([body])], [chunked([bytes([b]) for b in body])]):
        [stream] = ask([pieces])
        assert stream.error is None and sum(count for _, count in stream.times) == 3 and stream.finish_reason == "length"


@pytest.mark.parametrize("before", [0, 1, 2])
def test_an_answer_of_one_token(before: int) -> None:
    """The events before it have no text either: a role, an empty beginning."""
    [stream] = ask([[chunked([event("")] * before + [event("one"), event("", "length"), USAGE, b"data: [DONE]\n\n"])]])
    assert stream.error is None and [count for _, count in stream.times] == [1]


def test_an_endless_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its size, and, where a server is silent, by the clock."""
    monkeypatch.setattr(client_module, "MAX_STREAM", 10_000)
    [stream] = ask([[chunked([event("x" * 100)] * 200)]], close=True)
    assert stream.error is not None and "an answer of more than" in stream.error

    async def talk() -> Stream:
        async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer):
                await reader.read()  # until the client has gone

        server = await asyncio.start_server(stay_silent, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seconds=0.05)
        stream = await client.post("/v1/completions", b"{}")
        server.close()
        return stream

    assert asyncio.run(talk()).error == "no end of the answer within 0.05 s"


def test_a_connection_that_the_server_closed_meanwhile_is_replaced() -> None:
    async def talk() -> list[str | None]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError):
                await reader.readuntil(b"{}")
                writer.write(chunked(BODY))
                await reader.readuntil(b"{}")  # the second request of this connection gets no byte

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        errors = [(await client.post("/", b"{}")).error for _ in range(2)]
        client.close()
        server.close()
        return errors

    assert asyncio.run(talk()) == [None, None]


def test_lengths() -> None:
    chance = random.Random(0)
    assert {Lengths.parse("--x", "7").draw(chance) for _ in range(9)} == {7}
    assert {Lengths.parse("--x", "3-5").draw(chance) for _ in range(99)} == {3, 4, 5}
    drawn = sorted(Lengths.parse("--x", "lognormal:100,0.5,300").draw(chance) for _ in range(2001))
    assert 90 < drawn[1000] < 110 and drawn[-1] <= 300 and drawn[0] >= 1
    for wrong in ("0", "5-3", "x", "lognormal:1,2", "-3", "9999999", "lognormal:9,99,10"):
        with pytest.raises(ArgumentError, match="--x: expected N, LOW-HIGH"):
            Lengths.parse("--x", wrong)


def test_arrivals() -> None:
    assert arrivals(4, math.inf, 3, random.Random(0)) == [0, 0.25, 0.5] and arrivals(math.inf, 1, 2, random.Random(0)) == [0, 0]
    spreads = {}
    for burstiness in (0.25, 1.0, 4.0):
        drawn = arrivals(10, burstiness, 8001, random.Random(0))
        gaps = [b - a for a, b in zip(drawn, drawn[1:], strict=False)]
        assert fmean(gaps) == pytest.approx(0.1, rel=0.05)
        spreads[burstiness] = pstdev(gaps) / fmean(gaps)
        if burstiness == 1:
            assert 0.36 < sum(gap > 0.1 for gap in gaps) / 8000 < 0.38  # exp(-1): Poisson
    assert all(spread == pytest.approx(burstiness**-0.5, rel=0.05) for burstiness, spread in spreads.items())


def test_requests_are_the_same_for_the_same_seed_and_share_prefixes() -> None:
    prompts = RandomPrompts(Lengths.parse("", "5-9"), Lengths.parse("", "64"), 1000, False, 40, 2)
    common = {"model": "m", "max_tokens": 3, "ignore_eos": True}
    first, again, other = (requests(prompts.draw(20, 3, load), [0.0] * 20, COMPLETIONS, common, 3) for load in (0, 0, 1))
    assert first == again and first != other
    ids = [json.loads(request.body)["prompt"] for request in first + other]
    assert len({tuple(each[:40]) for each in ids}) == 2 and len({tuple(each) for each in ids}) == 40
    assert all(45 <= len(each) <= 49 and all(10 <= i < 1000 for i in each) for each in ids)
    assert first[0].output_tokens == json.loads(first[0].body)["max_tokens"] == 64 and first[0].input_tokens == len(ids[0])
    [chat] = requests([Prompt({"prompt": "hi"}, {})], [0.0], CHAT, {"model": "m", "max_tokens": 3}, 0)
    assert json.loads(chat.body)["messages"] == [{"role": "user", "content": "hi"}] and chat.output_tokens == 0
    for fields, endpoint in (({"prompt_token_ids": [1]}, CHAT), ({"messages": []}, COMPLETIONS)):
        with pytest.raises(ArgumentError, match="give --endpoint"):
            requests([Prompt(fields, {})], [0.0], endpoint, {"max_tokens": 1}, 0)


def done(began: float, times: list[tuple[float, int]], ended: float, error: str | None = None, wanted: int = 0) -> Done:
    usage = {"prompt_tokens": 10, "completion_tokens": sum(count for _, count in times)}
    return Done(Request(0.0, b"", 10, wanted), began, Stream(200, times, usage, "length", ended, error))


def test_figures() -> None:
    fast = done(1.0, [(1.1, 1), (1.2, 1), (1.3, 2)], 1.4, wanted=4)
    slow = done(2.0, [(4.0, 1), (4.1, 1)], 4.2)
    failed = done(0.0, [], 9.0, "429: busy")
    short = done(0.0, [(0.1, 1)], 0.2, wanted=5)
    empty = done(0.0, [], 0.2)
    all_of_them = (fast, slow, failed, short, empty)
    outcomes = [outcome_of(one) for one in all_of_them]
    found = figures_of(Load(2.0, all_of_them), outcomes, [50, 99.5], {"ttft": 500.0, "itl": 150.0})
    assert (found["completed"], found["failed"], sum(found["errors"].values())) == (2, 3, 3)
    assert found["errors"]["429: busy"] == 1 and found["errors"]["an answer without text"] == 1
    assert any(text.startswith("1 tokens instead of 5") for text in found["errors"])
    assert found["mean_ttft_ms"] == found["median_ttft_ms"] == pytest.approx(1050) and found["std_ttft_ms"] == pytest.approx(950)
    assert found["p99.5_ttft_ms"] == pytest.approx(100 + 0.995 * 1900)  # linear between 100 and 2000
    assert found["p50_e2el_ms"] == pytest.approx(1300)  # between 400 and 2200
    assert outcomes[0].itl == pytest.approx((0.1, 0.1, 0.0)) and outcomes[0].tpot == pytest.approx(0.2 / 3)
    assert (found["output_throughput"], found["request_throughput"], found["total_input_tokens"]) == (3, 1, 20)
    assert found["total_token_throughput"] == 13 and found["request_goodput"] == 0.5  # one of the two was late
    nothing = figures_of(Load(1.0, (failed,)), [outcome_of(failed)], [50], {})
    assert nothing["mean_ttft_ms"] is None and nothing["request_goodput"] is None
    assert peak_concurrency([fast, slow]) == 1 and peak_concurrency([fast, done(1.4, [], 2.0), done(1.1, [], 5.0)]) == 2


def test_goodput_is_read_strictly() -> None:
    assert parse_goodput(["ttft:200", "tpot:50.5"]) == {"ttft": 200.0, "tpot": 50.5}
    for wrong in (["ttft"], ["ttft:x"], ["ttft:-1"], ["speed:3"], ["ttft:nan"], ["ttft:1", "ttft:2"]):
        with pytest.raises(ArgumentError, match="--goodput"):
            parse_goodput(wrong)


class FakeTime:
    """A clock that sleeping moves."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        end = self.at + seconds
        await asyncio.sleep(0)  # others run meanwhile
        self.at = max(self.at, end)


def test_requests_are_sent_at_their_arrivals_and_count_from_there() -> None:
    clock, sent = FakeTime(), list[float]()

    class Slow:
        async def post(self, path: str, body: bytes) -> Stream:
            sent.append(clock.at)
            clock.at += 0.5  # delays all requests, as a busy client would
            return Stream(200, [(clock.at, 1)], {"completion_tokens": 1}, "stop", clock.at)

    timing = Timing(clock.now, clock.sleep)
    work = [Request(arrival, b"", 1, 0) for arrival in (0.0, 2.0, 2.1, 2.2)]
    load = asyncio.run(run_load(Slow(), "/", work, None, timing=timing))
    assert sent == pytest.approx([100.0, 102.0, 102.5, 103.0]) and load.seconds == pytest.approx(3.5)
    assert [outcome_of(one).ttft for one in load.done] == pytest.approx([0.5, 0.5, 0.9, 1.3])
    closed = asyncio.run(run_load(Slow(), "/", work, 1, timing=timing))
    assert [outcome_of(one).ttft for one in closed.done] == pytest.approx([0.5] * 4)  # a turn of its own each


def test_the_limit_of_concurrency_holds() -> None:
    running, peak = 0, 0

    class Counting:
        async def post(self, path: str, body: bytes) -> Stream:
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            for _ in range(3):
                await asyncio.sleep(0)
            running -= 1
            return Stream(200, [(1.0, 1)], None, "stop", 1.0)

    asyncio.run(run_load(Counting(), "/", [Request(0.0, b"", 1, 0)] * 9, 3))
    assert peak == 3


def test_a_server_is_waited_for() -> None:
    clock, told = FakeTime(), list[str]()

    class Starting:
        url = "http://x"

        def __init__(self, *answers: Stream):
            self.answers = [*answers]

        async def get(self, path: str) -> Stream:
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def wait(*answers: Stream) -> str | None:
        return asyncio.run(wait_until_ready(Starting(*answers), 30, Timing(clock.now, clock.sleep), told.append))

    loading, up = Stream(503, error="503: loading"), Stream(200, body=b'{"data": [{"id": "m"}]}')
    assert wait(Stream(error="no connection"), loading, up) == "m"
    assert told == ["waiting up to 30 s for http://x: no connection"]
    assert wait(Stream(404, error="404: no")) is None and wait(Stream(200, body=b"<html>")) is None
    with pytest.raises(TinyvllmError, match="not ready within 30 s, its last answer: 503: loading"):
        wait(loading)
    with pytest.raises(TinyvllmError, match="give --api-key"):
        wait(Stream(401, error="401: no key"))


# --- the command


@pytest.fixture
def fake() -> Iterator[ReplyServer]:
    with ReplyServer(good()).serving() as server:
        yield server


def good() -> Reply:
    body = b"".join(BODY)
    return 200, {"Content-Length": str(len(body))}, body


QUICK = ["--num-warmups", "0", "--random-input-len", "4-9", "--random-output-len", "3", "--quiet", "--ready-check-timeout-sec", "5"]


def test_the_command_reports_every_load(fake: ReplyServer, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    busy: Reply = (429, {}, b'{"error": {"message": "too many wait"}}')
    fake.replies = [busy, good()]
    arguments = ["bench", "serve", "--base-url", fake.url + "/v1", "--num-prompts", "6", "--request-rate", "1000,inf", "--ignore-eos"]
    arguments += ["--max-concurrency", "2", "--goodput", "ttft:60000", "e2el:60000", "--plot", str(tmp_path / "p.svg"), *QUICK]
    arguments += ["--extra-body", '{"top_p": 0.5}', "--api-key", "secret"]
    assert main([*arguments, "--output-format", "json", "--save-detailed", "--metric-percentiles", "50,99.9"]) == 0
    result = json.loads(capsys.readouterr().out)
    first, second = result["loads"]
    assert result["model"] == "first" and (first["request_rate"], second["request_rate"]) == (1000, "inf")
    assert (first["completed"], first["errors"], second["completed"]) == (5, {"429: too many wait": 1}, 6)
    assert first["total_output_tokens"] == 15 and first["total_input_tokens"] == 45 and len(first["requests"]) == 6
    assert second["request_goodput"] == second["request_throughput"] and 1 <= second["max_concurrent_requests"] <= 2
    assert first["p50_ttft_ms"] == first["median_ttft_ms"] <= first["p99.9_e2el_ms"]
    assert all(body["ignore_eos"] and body["top_p"] == 0.5 and body["model"] == "first" for body in fake.bodies) and len(fake.bodies) == 12
    assert all(headers["Authorization"] == "Bearer secret" for headers in fake.headers)
    picture = xml.dom.minidom.parse(str(tmp_path / "p.svg"))
    assert "requests a second that arrive" not in picture.toxml()  # inf has no place on that axis
    assert main([*arguments, "--output", str(tmp_path / "r.csv"), "--output-format", "csv", "--percentile-metrics", "ttft"]) == 0
    tables = capsys.readouterr().out
    assert "TTFT" in tables and "TPOT" not in tables and "1000/s, at most 2" in tables and "all at once" not in tables
    rows = [*csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text()))]
    assert [row["completed"] for row in rows] == ["6", "6"] and json.loads(rows[0]["errors"]) == {}


def test_datasets(fake: ReplyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"prompt": "one", "max_tokens": 7}\n{"messages": [{"role": "user", "content": "two"}]}\n')
    serve = ["bench", "serve", "--base-url", fake.url, "--endpoint", CHAT, "--dataset", str(file), "--output-len", "9", *QUICK]
    assert main([*serve, "--num-prompts", "3", "--max-concurrency", "1", "--model", "mine"]) == 0
    texts = [(body["messages"][0]["content"], body["max_tokens"], body["model"]) for body in fake.bodies]
    assert texts == [("one", 7, "mine"), ("two", 9, "mine"), ("one", 7, "mine")]
    assert "all at once" not in capsys.readouterr().out
    file.write_text('{"prompt": "one"}\n{"prompt": "x", "colour": 1}\n')
    assert main([*serve]) == 2 and f"{file}:2: unknown field 'colour'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request-rate", "0"], "--request-rate"),
        (["--request-rate", "1,x"], "--request-rate"),
        (["--max-concurrency", "0"], "--max-concurrency"),
        (["--burstiness", "0"], "--burstiness"),
        (["--burstiness", "nan"], "--burstiness"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--timeout", "inf"], "--timeout"),
        (["--endpoint", "/v1/embeddings"], "--endpoint"),
        (["--percentile-metrics", "ttft,speed"], "--percentile-metrics"),
        (["--metric-percentiles", "101"], "--metric-percentiles"),
        (["--goodput", "ttft"], "--goodput"),
        (["--extra-body", "[]"], "--extra-body"),
        (["--random-output-len", "0"], "--random-output-len"),
        (["--dataset", "nothing.jsonl"], "--dataset"),
        (["--request-rate", ",".join(["1"] * 9), "--max-concurrency", ",".join(["1"] * 9)], "at most 64 loads"),
    ],
)
def test_wrong_options(arguments: list[str], message: str) -> None:
    _, options = parse(["bench", "serve", *arguments])
    with pytest.raises((ArgumentError, FormatError), match=message):
        setup_of(options)


def test_options_of_vllms_benchmark_are_known() -> None:
    words = "bench serve --backend vllm --dataset-name custom --dataset-path d.jsonl --custom-output-len 9 --result-filename r.json"
    _, options = parse([*words.split(), "--request_rate", "inf", "--max-concurrency", "4", "--num-prompts", "2"])
    assert (options.dataset, options.output_len, options.output, options.max_concurrency) == ("d.jsonl", 9, "r.json", "4")
    for wrong, hint in (
        ("--save-result", "--output"),
        ("--random-range-ratio=0.5", "--random-input-len"),
        ("--dataset-name=sharegpt", "--dataset"),
    ):
        with pytest.raises(ArgumentError, match=hint):
            parse(["bench", "serve", wrong])


def test_a_wrong_format_or_url_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--output-format", "xml"]) == 2 and "xml" in capsys.readouterr().err
    assert main(["bench", "serve", "--base-url", "localhost:8000"]) == 2 and "--base-url: expected a URL" in capsys.readouterr().err


def test_no_answer_at_all_is_a_failure(fake: ReplyServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake.replies = [(500, {}, b"no")]
    serve = ["bench", "serve", "--base-url", fake.url, "--num-prompts", "2", *QUICK]
    assert main(serve) == 1 and "2 failed: 500: no" in capsys.readouterr().out
    assert main([*serve, "--num-warmups", "2"]) == 1 and "every request of the warm-up failed: 500: no" in capsys.readouterr().err


def test_a_real_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Both APIs of ours: every token counted, and the prompt's tokens are those that were drawn."""
    from tests.server.conftest import running
    from tinyvllm.server.core.config import ServerConfig

    with running(ServerConfig(port=0, access_log=False)) as server:
        serve = ["bench", "serve", "--base-url", server.url, "--num-prompts", "4", "--random-input-len", "12", "--random-output-len", "6"]
        serve += ["--ignore-eos", "--output-format", "json", "--quiet", "--num-warmups", "1", "--random-vocabulary", "200"]
        for more in ([], ["--endpoint", CHAT]):
            assert main([*serve, *more]) == 0
            [load] = json.loads(capsys.readouterr().out)["loads"]
            assert (load["completed"], load["errors"], load["total_output_tokens"]) == (4, {}, 24)
            assert load["total_input_tokens"] == 48 if not more else load["total_input_tokens"] > 40
