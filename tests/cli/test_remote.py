"""`chat --url`: a talk with a server that answers as the test wants, and the pauses between attempts."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.replies import ReplyServer
from tinyvllm import cli
from tinyvllm.cli import remote
from tinyvllm.cli.remote import Remote, retry_after
from tinyvllm.errors import ArgumentError, RequestError, TinyvllmError


def stream(*pieces: str, done: bool = True) -> bytes:
    chunks = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
    chunks.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}})
    text = ": keep-alive\n\n" + "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return (text + ("data: [DONE]\n\n" if done else "")).encode()


class Server(ReplyServer):
    """A reply with "hang" and without an end is interrupted and never ends."""

    models = ("first-model",)

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def note_sent(self, body: bytes) -> None:
        if b"DONE" not in body and b"hang" in body:
            self._interrupt()

    def _interrupt(self) -> None:
        """Press Ctrl-C once the first part of the answer is on stdout (which pytest captures), and never end the answer."""
        ends = time.monotonic() + 60
        while "hang on" not in sys.stdout.getvalue() and time.monotonic() < ends:  # type: ignore[attr-defined]
            self.over.wait(0.001)  # the tests replace time.sleep
        os.kill(os.getpid(), signal.SIGINT)
        self.over.wait(60)


@pytest.fixture
def server() -> Iterator[Server]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    with Server().serving() as server:
        yield server
        signal.signal(signal.SIGINT, before)
        server.over.set()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Instead of being slept, pauses are noted."""
    taken: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", taken.append)
    return taken


@pytest.fixture
def talk(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def talk(*lines: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        code = cli.main(["chat", "--url", server.url, *options])
        return code, *capsys.readouterr()

    return talk


def test_a_conversation(server: Server, talk: Callable[..., tuple[int, str, str]]) -> None:
    server.replies = [(200, {}, stream("one ", "é")), (200, {}, stream("two"))]
    options = ("--api-key", "k", "--system", "S", "--temperature", "0.5", "--stop", "X", "--max-tokens", "9")
    code, out, err = talk("hi", "/set seed 3", "/set max_tokens null", "more", "/stats", options=options)
    assert (code, out) == (0, "one é\ntwo\n") and "7 prompt + 5 generated tokens, first token after" in err
    first, second = server.bodies
    system = {"role": "system", "content": "S"}
    assert first == {
        "model": "first-model", "messages": [system, {"role": "user", "content": "hi"}], "stream": True,
        "stream_options": {"include_usage": True}, "max_tokens": 9, "temperature": 0.5, "stop": ["X"],
    }  # fmt: skip
    assert second["messages"][2:] == [{"role": "assistant", "content": "one é"}, {"role": "user", "content": "more"}]
    assert second["seed"] == 3 and "max_tokens" not in second
    assert server.headers[0]["Authorization"] == "Bearer k"


@pytest.mark.parametrize(
    "error",
    [
        {"code": "context_length_exceeded", "message": "too long"},
        {"type": "exceed_context_size_error", "message": "too long"},
        {"message": "This model's maximum context length is 8 tokens"},
        {"code": "context_length_exceeded", "message": "too long", "n_prompt_tokens": 9, "n_ctx": 8},
        {"code": "context_length_exceeded", "message": "too long", "n_prompt_tokens": "9", "n_ctx": 8},
    ],
)
def test_the_oldest_turns_leave_a_full_context(
    server: Server, talk: Callable[..., tuple[int, str, str]], pauses: list[float], error: dict[str, Any]
) -> None:
    full, good = (400, {}, json.dumps({"error": error}).encode()), (200, {}, stream("ok"))
    server.replies = [good, good, full, full, good]
    code, out, err = talk("one", "two", "three", options=("--model", "m"))
    assert (code, out) == (0, "ok\nok\nok\n") and not pauses
    counts = "it holds 8 tokens and the conversation has 9: " if error.get("n_prompt_tokens") == 9 else ""
    assert err == f"(the context is full: {counts}the oldest 2 turns leave the conversation; /reset starts over)\n"
    assert [[m["content"] for m in body["messages"]] for body in server.bodies[2:]] == [
        ["one", "ok", "two", "ok", "three"], ["two", "ok", "three"], ["three"],
    ]  # fmt: skip
    assert "max_tokens" not in server.bodies[0]  # a default must not be beyond the context of the server
    server.replies = [good, full]
    code, out, err = talk("one", "two", "/show", options=("--model", "m"))
    assert code == 1 and error["message"] in err and "messages = 2\n" in err and "the oldest" not in err


def test_a_cut_answer_is_marked(server: Server, talk: Callable[..., tuple[int, str, str]]) -> None:
    cut = stream("ab").replace(b'"index": 0, ', b'"index": 0, "finish_reason": "length", ')
    server.replies = [(200, {}, cut)]
    options = ("--model", "m")
    assert talk("hi", options=options)[2].startswith("(the answer is cut by the end of the context: /undo ")
    assert talk("hi", options=(*options, "--max-tokens", "5"))[2].startswith("(the answer is cut by max_tokens=5: /set max_tokens N ")
    assert talk("hi", options=(*options, "--max-tokens", "6"))[2].startswith("(the answer is cut by max_tokens or by the end of ")
    assert talk("hi", options=(*options, "--quiet")) == (0, "ab\n", "")


def test_a_temporary_failure_is_retried(server: Server, talk: Callable[..., tuple[int, str, str]], pauses: list[float]) -> None:
    busy = {"error": {"message": "too many wait"}}
    server.replies = [(429, {"Retry-After": "7"}, json.dumps(busy).encode()), "close", (503, {}, b"<html>"), (200, {}, b""),
                      (200, {}, stream("at last"))]  # fmt: skip
    code, out, err = talk("hi", options=("--model", "m"))
    assert (code, out) == (0, "at last\n") and len(server.bodies) == 5 and all(body == server.bodies[0] for body in server.bodies)
    assert pauses[0] == 7 and 0.5 <= pauses[1] <= 1 and 1 <= pauses[2] <= 2 and 2 <= pauses[3] <= 4
    lines = err.splitlines()
    assert len(lines) == 4 and lines[0] == "429 Too Many Requests: too many wait: retry in 7.0 s"


def test_patience_ends(server: Server, pauses: list[float]) -> None:
    server.replies = [(503, {}, b"")]
    with pytest.raises(TinyvllmError, match="503 Service Unavailable; tried 8 times"):
        list(Remote(server.url, model="m").answer([], Remote.default_params, {}))
    assert len(server.bodies) == 8 and len(pauses) == 7 and max(pauses) <= 30
    server.replies = [(429, {"Retry-After": "86400"}, b"")]
    with pytest.raises(TinyvllmError, match="429"):
        list(Remote(server.url, model="m").answer([], Remote.default_params, {}))
    assert len(server.bodies) == 9  # no wait of a day


def test_nothing_is_said_twice(server: Server, talk: Callable[..., tuple[int, str, str]], pauses: list[float]) -> None:
    server.replies = [(200, {}, stream("half an ans", done=False)), (200, {}, stream("whole"))]
    code, out, err = talk("hi", "again", options=("--model", "m"))
    assert (code, out) == (1, "half an ans\nwhole\n") and "broke in the middle" in err and not pauses
    assert [body["messages"] for body in server.bodies][1] == [{"role": "user", "content": "again"}]
    server.replies = [(200, {}, b'data: {"error": {"message": "out of memory"}}\n\ndata: [DONE]\n\n')]
    code, out, err = talk("hi", options=("--model", "m"))
    assert (code, out) == (1, "") and "out of memory" in err


def test_an_answer_can_be_interrupted(server: Server, talk: Callable[..., tuple[int, str, str]]) -> None:
    server.replies = [(200, {}, stream("hang on", done=False)), (200, {}, b": hang\n\n"), (200, {}, stream("well"))]
    code, out, err = talk("hi", "what?", "more", options=("--model", "m"))
    assert (code, out, err) == (0, "hang on\nwell\n", "")
    assert [m["content"] for m in server.bodies[2]["messages"]] == ["hi", "hang on", "more"]


def test_what_a_server_refuses_is_not_tried_again(server: Server, pauses: list[float]) -> None:
    server.replies = [(400, {}, json.dumps({"error": {"message": "top_k: unknown"}}).encode())]
    with pytest.raises(RequestError, match="400 Bad Request: top_k: unknown"):
        list(Remote(server.url, model="m").answer([], Remote.default_params, {"top_k": 3}))
    assert len(server.bodies) == 1 and not pauses and server.bodies[0]["top_k"] == 3


def test_a_server_that_does_not_answer(pauses: list[float]) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    with pytest.raises(TinyvllmError, match="no answer from http.*refused.*tried 8 times"):
        list(Remote(url, model="m").answer([], Remote.default_params, {}))
    assert len(pauses) == 7


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://h:port", "http://h/?q=1", ""])
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(ArgumentError, match="--url"):
        Remote(url)


def test_options_that_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in [
        (["--url", "http://localhost:1", "--device", "CPU"], ["--device", "--url"]),
        (["--api-key", "k"], ["--api-key", "--url"]),
        (["--url", "http://localhost:1", "--api-key", "k\nX: y"], ["--api-key"]),
    ]:
        assert cli.main(["chat", *arguments]) == 2
        message = capsys.readouterr().err
        assert all(word in message for word in words), message


def test_retry_after() -> None:
    assert retry_after("3") == 3 and retry_after("0.5") == 0.5 and retry_after("-1") == 0 and retry_after(None) is None
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT", now=1445412470.0) == 10 and retry_after("soon") is None
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
