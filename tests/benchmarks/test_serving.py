"""Load on a server: what is drawn, what a client sees of a stream however it is cut, and what becomes of the times."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import serving
from benchmarks.event_stream import Client, Stream
from benchmarks.serving import Done, Lengths, arrivals, figures, parse, parse_slo, requests, run_load, summary


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
            while (await reader.read(65536)) and waiting:
                for piece in waiting.pop(0):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if close:
                    break
            writer.close()

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
    ],
)
def test_what_goes_wrong_is_said(answer: bytes, error: str) -> None:
    [stream] = ask([[answer]], close=True)
    assert stream.error is not None and error in stream.error


def test_lengths() -> None:
    chance = random.Random(0)
    assert {Lengths.parse("7").draw(chance) for _ in range(9)} == {7}
    assert {Lengths.parse("3-5").draw(chance) for _ in range(99)} == {3, 4, 5}
    drawn = sorted(Lengths.parse("lognormal:100,0.5,300").draw(chance) for _ in range(2001))
    assert 90 < drawn[1000] < 110 and drawn[-1] <= 300 and drawn[0] >= 1
    for wrong in ("0", "5-3", "x", "lognormal:1,2", "-3"):
        with pytest.raises(argparse.ArgumentTypeError):
            Lengths.parse(wrong)
    for wrong in ("", "ttft", "ttft=x", "speed=3"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_slo(wrong)


def test_arrivals() -> None:
    assert arrivals("fixed", 4, 3, random.Random(0)) == [0, 0.25, 0.5]
    drawn = arrivals("poisson", 10, 5001, random.Random(0))
    assert drawn == sorted(drawn) and 9.5 < 5000 / drawn[-1] < 10.5
    gaps = [b - a for a, b in zip(drawn, drawn[1:], strict=False)]
    assert 0.36 < sum(gap > 0.1 for gap in gaps) / 5000 < 0.38  # exp(-1)


def test_requests_are_the_same_for_the_same_seed_and_share_prefixes() -> None:
    options, server = parse(["--prefix", "40x2", "--prompt", "5-9", "--seed", "3", "--model", "m", "--", "--num-blocks", "9"])
    assert server == ["--num-blocks", "9"]
    first, again, other = (requests(options, [0.0] * 20, number) for number in (0, 0, 1))
    assert first == again and first != other
    prompts = [json.loads(request.body)["prompt"] for request in first + other]
    assert len({tuple(prompt[:40]) for prompt in prompts}) == 2 and len({tuple(prompt) for prompt in prompts}) == 40
    assert all(45 <= len(prompt) <= 49 and all(10 <= i < 1000 for i in prompt) for prompt in prompts)
    assert json.loads(first[0].body)["ignore_eos"] is True and first[0].tokens == 64
    chat, _ = parse(["--chat", "--no-ignore-eos", "--model", "m"])
    body = json.loads(requests(chat, [0.0], 0)[0].body)
    assert isinstance(body["messages"][0]["content"], str) and "ignore_eos" not in body


def done(arrival: float, times: list[tuple[float, int]], ended: float, error: str | None = None, wanted: int = 0) -> Done:
    usage = {"prompt_tokens": 10, "completion_tokens": sum(count for _, count in times)}
    return Done(arrival, Stream(200, times, usage, "length", ended, error), wanted)


def test_figures() -> None:
    fast = done(1.0, [(1.1, 1), (1.2, 1), (1.3, 2)], 1.4, wanted=4)
    slow = done(2.0, [(4.0, 1), (4.1, 1)], 4.2)
    failed = done(0.0, [], 9.0, "429: busy")
    short = done(0.0, [(0.1, 1)], 0.2, wanted=5)
    found = figures([fast, slow, failed, short], 2.0, {"ttft": 500.0, "itl": 150.0})
    assert found["requests"] == 4 and found["errors"] == {"429: busy": 1, "1 tokens instead of 5": 1}
    assert found["ttft_ms"]["p50"] == pytest.approx(1050) and found["ttft_ms"]["mean"] == pytest.approx(1050)
    assert found["e2e_ms"]["p50"] == pytest.approx(1300)  # between 400 and 2200
    assert fast.gaps == pytest.approx([0.1, 0.1, 0.0]) and fast.tpot == pytest.approx(0.2 / 3)
    assert found["tokens_s"] == 3 and found["requests_s"] == 1 and found["prompt_tokens_s"] == 10
    assert found["goodput_s"] == 0.5  # one of the two was late
    assert figures([failed], 1.0, {"ttft": 1.0})["ttft_ms"] == {}


def test_late_sending_counts_from_the_arrival() -> None:
    class Slow:
        async def post(self, path: str, body: bytes) -> Stream:
            import time

            time.sleep(0.05)  # delays all requests, as a busy client would
            now = time.perf_counter()
            return Stream(200, [(now, 1)], {"completion_tokens": 1}, "stop", now)

    work = [serving.Request(0.0, b"", 0) for _ in range(3)]
    found = asyncio.run(run_load(Slow(), "/", work, None))  # type: ignore[arg-type]
    assert found[2].ttft >= 0.14
    closed = asyncio.run(run_load(Slow(), "/", work, 1))  # type: ignore[arg-type]
    assert len(closed) == 3 and all(0.04 < d.ttft < 0.14 for d in closed)


def test_table_and_picture(tmp_path: Path) -> None:
    line = {"rate": 2.0, **figures([done(0.0, [(0.1, 1), (0.2, 1)], 0.3)], 1.0, {"ttft": 500.0}), "client_cpu": 0.01}
    assert "goodput" in summary([line]) and "100" in summary([line])
    pytest.importorskip("matplotlib")
    assert serving.draw([line, {**line, "rate": 4.0}], "title", tmp_path / "p.png") and (tmp_path / "p.png").stat().st_size > 5000
