"""Bad input and bad clients: errors in the shape of the API, and other clients unaffected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.server.conftest import Running, running
from tinyvllm import RequestOutput
from tinyvllm.engine.engine import Engine
from tinyvllm.server.core.config import ServerConfig

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
LONG = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}


def send(server: Running, raw: bytes, path: str = CHAT, **headers: str) -> httpx.Response:
    said = {"content-type": "application/json", **headers}
    return httpx.post(server.url + path, content=raw, headers=said, timeout=120, trust_env=False)


def request(raw: bytes, path: str = CHAT, more: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n{more}\r\n"
    return head.encode() + raw


def wait_for(what, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def idle(server: Running) -> bool:
    llm = server.service.models.loaded()["demo"]
    return llm.status()["running"] == llm.status()["waiting"] == 0 and not server.service.running


@pytest.mark.parametrize(
    ("raw", "status", "word"),
    [
        (b"", 400, "JSON"),
        (b"{", 400, "JSON"),
        (b'{"a": NaN}', 400, "JSON"),
        (b"[]", 400, "object"),
        (b'"text"', 400, "object"),
        (b"\xff\xfe{}", 400, "JSON"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', 400, "JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "JSON"),
        (b"[" * 40000, 400, "JSON"),
        (b'{"messages": []}', 400, "messages"),
        (b'{"messages": "hello"}', 400, "messages"),
        (b'{"messages": [{"content": "a"}]}', 400, "messages[0].role"),
        (b'{"messages": [{"role": "user"}]}', 400, "content"),
        (b'{"messages": [{"role": "user", "content": "a"}], "n": "2"}', 400, "n"),
        (b'{"messages": [{"role": "user", "content": "a"}], "n": 1e400}', 400, ""),
        (b'{"messages": [{"role": "user", "content": "a"}], "seed": 99999999999999999999999999}', 400, "seed"),
        (b'{"messages": [{"role": "user", "content": "a"}], "temperature": -1}', 400, "temperature"),
        (b'{"messages": [{"role": "user", "content": "a"}], "stop": [""]}', 400, "stop"),
        (b'{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"a": 1}}', 400, "logit_bias"),
        (b'{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"99999": 1}}', 400, "logit_bias"),
        (b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}', 400, "tool"),
        (b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "deadline_ms": 0}', 400, "deadline_ms"),
        (b'{"messages": [{"role": "user", "content": "a"}], "model": "other"}', 404, "other"),
        (b'{"messages": [' + b'{"role": "user", "content": 5},' * 40000 + b"1]}", 400, "40000 further entries of messages"),
    ],
)
def test_invalid_bodies(server: Running, raw: bytes, status: int, word: str) -> None:
    answer = send(server, raw)
    error = answer.json()["error"]
    assert answer.status_code == status and error["type"].endswith("_error") and set(error) == {"message", "type", "param", "code"}
    assert word in f"{error['message']} {error['param']}"


@pytest.mark.parametrize(
    "structure",
    [
        {"regex": "(a{1,1000}){1,1000}"},
        {"regex": "(" * 5000},
        {"grammar": "start: start start | start"},
        {"json": {"$ref": "#"}},
        {"json": {"type": "object", "properties": {f"k{i}": {"type": "string", "maxLength": 10000} for i in range(2000)}}},
        {"choice": []},
        {"choice": ["a"], "regex": "b"},
    ],
)
def test_grammar_bombs(server: Running, structure: dict) -> None:
    """Refused, or served within their length, and quickly; the server continues in both cases."""
    began = time.process_time()  # the server is in this process
    answer = server.post(CHAT, {**ASK, "structured_outputs": structure})
    assert answer.status_code in (200, 400) and time.process_time() - began < 15
    assert server.post(CHAT, ASK).status_code == 200


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10**9) %}a{% endfor %}",
        "{{ messages.__init__.__globals__ }}",
        "{{",
        "{% include '/etc/passwd' %}",
    ],
)
def test_templates_stay_in_their_sandbox(server: Running, template: str) -> None:
    answer = server.post(CHAT, {**ASK, "chat_template": template})
    assert answer.status_code == 400 and "root:" not in answer.text


def test_templates_in_requests_need_a_server_option() -> None:
    with running(ServerConfig(port=0, access_log=False)) as server:
        answer = server.post(CHAT, {**ASK, "chat_template": "a"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "chat_template"


def test_prompts_beyond_the_context_and_long_answers(server: Running) -> None:
    answer = server.post("/v1/completions", {"prompt": [5] * 5000})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    capped = server.post("/v1/completions", {"prompt": [5] * 1020, "ignore_eos": True}).json()
    assert capped["choices"][0]["finish_reason"] == "length" and capped["usage"]["total_tokens"] == 1024
    kept = server.post("/v1/completions", {"prompt": [5] * 5000, "truncate_prompt_tokens": 7, "max_tokens": 1}).json()
    assert kept["usage"]["prompt_tokens"] == 7
    assert server.post("/v1/completions", {"prompt": [10**8]}).status_code == 400


def test_paths_methods_and_types(server: Running) -> None:
    assert server.post("/v1/nothing", {}).json()["error"]["code"] == "not_found"
    wrong = httpx.get(server.url + CHAT, timeout=60, trust_env=False)
    assert wrong.status_code == 405 and wrong.json()["error"]["code"] == "method_not_allowed" and wrong.headers["allow"] == "POST"
    for kind in ("multipart/form-data", "application/octet-stream", "text/html"):
        other = httpx.post(server.url + CHAT, content=b"{}", headers={"content-type": kind}, timeout=60, trust_env=False)
        assert other.status_code == 415 and other.json()["error"]["code"] == "unsupported_media_type"


def test_huge_bodies() -> None:
    with running(ServerConfig(port=0, max_body=10000, access_log=False)) as server:
        announced = server.raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n{")
        assert b" 413 " in announced.split(b"\r\n")[0] and b'"request_too_large"' in announced
        chunk = b"1000\r\n" + b"a" * 4096 + b"\r\n"
        sent = server.raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk * 4)
        assert b" 413 " in sent.split(b"\r\n")[0]
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_slow_senders_get_a_timeout(server: Running) -> None:
    silent = server.raw(b"")
    assert b" 408 " in silent.split(b"\r\n")[0] and json.loads(silent.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"
    assert b" 408 " in server.raw(b"POST /v1/comple").split(b"\r\n")[0]
    assert b" 408 " in server.raw(request(b"a" * 50)[:-5]).split(b"\r\n")[0]


def test_invalid_heads(server: Running) -> None:
    garbage = server.raw(b"\x16\x03\x01 hello\r\n\r\n")
    assert b" 400 " in garbage.split(b"\r\n")[0] and b'"invalid_http"' in garbage
    endless = server.raw(b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * 20000)
    assert b" 431 " in endless.split(b"\r\n")[0]
    injected = server.raw(request(b"{}", more="X-Request-Id: a\x0bb\r\nConnection: close\r\n"))
    assert b"a\x0bb" not in injected


def test_half_closed_sockets_leak_nothing(server: Running) -> None:
    server.raw(request(json.dumps(LONG).encode(), "/v1/completions"), half_close=True, seconds=2)
    server.raw(request(b"{" * 100)[:-10], half_close=True, seconds=2)
    wait_for(lambda: idle(server))


def aborted(server: Running) -> float:
    """Continuations that ended by an abort since the server began."""
    text = httpx.get(f"{server.url}/metrics", timeout=60, trust_env=False).text
    return sum(map(float, re.findall(r'^vllm:request_success_total\{.*finished_reason="abort".*\} (\S+)$', text, re.MULTILINE)))


def test_a_disconnect_ends_the_request(server: Running) -> None:
    """Long before its last token, also without streaming."""
    for body in (LONG, {**LONG, "stream": False}):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(request(json.dumps(body).encode(), "/v1/completions"))
            wait_for(lambda: not idle(server) and server.service.models.loaded()["demo"].status()["running"] == 1)
            before = aborted(server)
        wait_for(lambda: idle(server))
        assert aborted(server) == before + 1


def test_many_disconnects_mid_stream(server: Running) -> None:
    used = server.service.models.loaded()["demo"].status()["blocks"]["used"]

    async def vanish(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request(json.dumps({**LONG, "prompt": f"Once {number}"}).encode(), "/v1/completions"))
        await reader.read(200)
        writer.transport.abort()

    async def many() -> None:
        for _ in range(5):
            await asyncio.gather(*(vanish(i) for i in range(20)))

    asyncio.run(many())
    wait_for(lambda: idle(server))
    assert server.service.models.loaded()["demo"].status()["blocks"]["used"] <= used
    assert server.post(CHAT, ASK).status_code == 200


@contextlib.contextmanager
def held_from(monkeypatch: pytest.MonkeyPatch, requests: int) -> Iterator[None]:
    """While an engine has this many requests it does no step, however fast the machine is or slow its clients are."""
    step, go = Engine.step, threading.Event()

    def held(self: Engine) -> list[RequestOutput]:
        if len(self.requests) >= requests and not go.wait(0.01):
            return []  # between two steps the engine takes requests, and refuses some
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", held)
        try:
            yield
        finally:
            go.set()


def test_keep_alive_comments_while_a_request_waits(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine requests with max_num_seqs=8: the last one waits, and gets keep-alive comments."""
    with held_from(monkeypatch, 8), httpx.Client(base_url=server.url, trust_env=False, timeout=120) as client:
        others = [client.stream("POST", "/v1/completions", json=LONG) for _ in range(8)]
        opened = [other.__enter__() for other in others]
        with client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 1}) as waiting:
            first = next(waiting.iter_raw())
        for other in others:
            other.__exit__(None, None, None)
    assert first.startswith(b": keep-alive\n\n") and all(o.status_code == 200 for o in opened)
    wait_for(lambda: idle(server))


def test_deadlines(server: Running) -> None:
    """Refused at once, or cut off: never late."""
    answer = server.post("/v1/completions", {**LONG, "stream": False}, **{"X-Deadline-Ms": "150"})
    if answer.status_code == 200:
        choice = answer.json()["choices"][0]
        assert choice["stop_reason"] == "deadline" and choice["finish_reason"] == "length"
    else:
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    assert server.post("/v1/completions", {"prompt": "a"}, **{"X-Deadline-Ms": "soon"}).status_code == 400


async def overfill(server: Running) -> httpx.Response:
    """A third request while one is running and one is waiting."""
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=120) as client:
        runs = client.stream("POST", "/v1/completions", json=LONG)
        chunks = (await runs.__aenter__()).aiter_raw()  # kept: a generator that is dropped closes its connection
        while b"data:" not in await anext(chunks):
            pass
        waits = client.stream("POST", "/v1/completions", json=LONG)
        await waits.__aenter__()  # its head comes with a keep-alive comment
        refused = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        await waits.__aexit__(None, None, None)
        await runs.__aexit__(None, None, None)
        return refused


def test_the_queue_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = {"demo": {"max_num_seqs": 1, "num_blocks": 256, "max_num_queued_reqs": 1}}
    with running(ServerConfig(port=0, access_log=False, beat_seconds=0.1), specs) as server, held_from(monkeypatch, 2):
        refused = asyncio.run(overfill(server))
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "server_busy"


def test_requests_of_an_engine_that_ends_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="has ended"), running(ServerConfig(port=0, access_log=False)) as server:
        monkeypatch.setattr(Engine, "step", lambda self: 1 / 0)
        answer = server.post(CHAT, ASK)
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
