"""Running a server: keys and their limits, CORS, TLS, the access log, several models, SIGTERM, the command line."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from benchmarks.own_server import ready_url
from tests.server.conftest import ENGINE, Running, running
from tests.server.soak_client import complaints_in
from tinyvllm import LLM
from tinyvllm.engine.engine import Engine
from tinyvllm.errors import ArgumentError, OutOfMemoryError
from tinyvllm.server.core.config import ServerConfig
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.failures import Failure
from tinyvllm.server.core.keys import Key, Keys, Limits, read_keys
from tinyvllm.server.core.memory_budget import MemoryBudget, Need, plan_need
from tinyvllm.server.core.models import Models

ASK = {"prompt": "Once", "max_tokens": 1}
ROOT = Path(__file__).parents[2]


def wait_until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not reached():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def get(server: Running, path: str, **headers: str) -> httpx.Response:
    return httpx.get(server.url + path, headers=headers, timeout=60, trust_env=False)


def test_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    file.write_text("# whose\nsk-alice name=alice requests_per_minute=2\nsk-bob name=bob concurrent=1 tokens_per_minute=60\n")
    with running(ServerConfig(port=0), keys=read_keys(["sk-plain"], str(file))) as server:
        refused = server.post("/v1/completions", ASK)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert server.post("/v1/messages", ASK, **{"x-api-key": "sk-wrong"}).json()["error"]["type"] == "authentication_error"
        assert get(server, "/v1/models").status_code == get(server, "/metrics").status_code == 401
        assert get(server, "/health").status_code == get(server, "/ready").status_code == get(server, "/version").status_code == 200
        assert get(server, "/favicon.ico").status_code == 204  # a 404 would be an error in the console of every page that is open
        assert server.post("/v1/completions", ASK, Authorization="Bearer sk-plain").status_code == 200
        assert server.post("/v1/completions", ASK, **{"x-api-key": "sk-plain"}).status_code == 200
        alice = [server.post("/v1/completions", ASK, Authorization="Bearer sk-alice") for _ in range(3)]
        assert [a.status_code for a in alice] == [200, 200, 429] and 1 <= int(alice[2].headers["retry-after"]) <= 30
        spent = server.post("/v1/completions", {**ASK, "max_tokens": 70, "ignore_eos": True}, Authorization="Bearer sk-bob")
        assert spent.status_code == 200 and server.post("/v1/completions", ASK, Authorization="Bearer sk-bob").status_code == 429
    log = capsys.readouterr().out
    assert "sk-" not in log
    lines = [json.loads(line) for line in log.splitlines()]
    assert {line["key"] for line in lines} >= {"alice", "bob", "key-1"}
    done = next(line for line in lines if line["key"] == "bob" and line["status"] == 200)
    assert done["completion_tokens"] == 70 and done["path"] == "/v1/completions" and done["request_id"] and done["ms"] > 0


def test_every_key_is_compared() -> None:
    """In constant time: all keys are compared, wherever the right key is."""
    seen = []

    class Watched(Key):
        @property
        def digest(self) -> bytes:
            seen.append(self.name)
            return self.__dict__["digest"]

        @digest.setter
        def digest(self, value: bytes) -> None:
            self.__dict__["digest"] = value

    keys = read_keys(["sk-1", "sk-2", "sk-3"])._keys
    watched = Keys([Watched(k.name, k.digest) for k in keys])
    for secret in ("sk-1", "sk-2", "sk-3"):
        seen.clear()
        watched.find(secret)
        assert seen == ["key-1", "key-2", "key-3"]
    with pytest.raises(Failure):
        watched.find("sk-4")


def test_limits_of_a_key() -> None:
    key = Key("a", b"", Limits(requests_per_minute=2, concurrent=2))
    now = [time.monotonic()]
    key.enter(lambda: now[0])
    key.enter(lambda: now[0])
    with pytest.raises(Failure, match="2 concurrent requests"):
        key.enter(lambda: now[0])
    key.leave()
    with pytest.raises(Failure, match="2 requests a minute") as refused:
        key.enter(lambda: now[0])
    assert refused.value.headers["Retry-After"] == "30"
    now[0] += 31
    key.enter(lambda: now[0])


def test_tokens_of_a_key_are_reserved_and_given_back() -> None:
    """By requests: each reserves its prompt and max_tokens, pays for what it used, and returns the rest."""
    body = {"prompt": "Once upon", "max_tokens": 40, "ignore_eos": True, "stream": True}
    key = Key("a", hashlib.sha256(b"sk-1").digest(), Limits(tokens_per_minute=100))
    key._tokens.refilled = float("inf")  # no clock: it is never refilled
    key._tokens.refill = lambda now: None
    bearer = {"Authorization": "Bearer sk-1"}
    with running(ServerConfig(port=0, access_log=False), keys=Keys([key])) as server:
        prompt = len(server.post("/tokenize", {"prompt": body["prompt"]}, **bearer).json()["tokens"])
        streams = [
            httpx.stream("POST", server.url + "/v1/completions", json=body, headers=bearer, timeout=60, trust_env=False) for _ in range(3)
        ]
        opened = [stream.__enter__() for stream in streams]
        assert [one.status_code for one in opened] == [200, 200, 429]
        assert "needs" in opened[2].read().decode()
        for one in opened[:2]:
            one.read()
        for stream in streams:
            stream.__exit__(None, None, None)
        wait_until(lambda: not server.service.running)
        assert key._tokens.level == 100 - 2 * (prompt + 40)
        key._tokens.level = 100.0
        short = server.post("/v1/completions", {**body, "stream": False, "max_tokens": 90, "stop": [" "]}, **bearer).json()["usage"]
        assert short["completion_tokens"] < 90
        wait_until(lambda: key._tokens.level == 100 - short["total_tokens"])  # given back after the answer was sent
        key._tokens.level = 100.0
        assert (
            server.post("/v1/completions", {**body, "stream": False, "max_tokens": 120}, **bearer).status_code == 200
        )  # more than the limit
        wait_until(lambda: key._tokens.level == 100 - prompt - 120)
        assert server.post("/v1/completions", body, **bearer).status_code == 429


def test_tokens_beyond_a_reservation_are_charged_while_a_stream_runs() -> None:
    """Not at its end only: until then, the key's other requests would pass the limit."""
    key = Key("a", hashlib.sha256(b"sk-1").digest(), Limits(tokens_per_minute=100))
    key._tokens.refill = lambda now: None
    request: Any = SimpleNamespace(owner=key, tokens=0, reserved=key.reserve(20))
    levels = []
    for _ in range(3):
        RequestContext.count_tokens(request, 15)
        levels.append(key._tokens.level)
    assert levels == [80, 70, 55]


def test_clients_that_leave_pay_for_what_was_computed() -> None:
    body = {"prompt": "Once upon", "max_tokens": 900, "ignore_eos": True}
    key = Key("a", hashlib.sha256(b"sk-1").digest(), Limits(tokens_per_minute=10_000))
    key._tokens.refill = lambda now: None
    bearer = {"Authorization": "Bearer sk-1"}
    with running(ServerConfig(port=0, access_log=False), keys=Keys([key])) as server:
        with httpx.stream(
            "POST", server.url + "/v1/completions", json={**body, "stream": True}, headers=bearer, timeout=60, trust_env=False
        ) as answer:
            lines = [line for line in islice(answer.iter_lines(), 40) if line]
        wait_until(lambda: not server.service.running)
        prompt = len(server.post("/tokenize", {"prompt": body["prompt"]}, **bearer).json()["tokens"])
        assert len(lines) == 20 and prompt + 900 > 100 and prompt + 20 <= 10_000 - key._tokens.level < prompt + 900
        key._tokens.level = 10_000.0
        raw = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk-1\r\nContent-Length: {len(raw)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + raw)
            wait_until(lambda: any(one.reserved for one in list(server.service.running)))
        wait_until(lambda: not server.service.running)
        assert key._tokens.level == 10_000 - prompt - 900  # how many were computed is unknown


def test_every_request_of_a_key_counts() -> None:
    with running(ServerConfig(port=0, access_log=False), keys=Keys([Key("a", hashlib.sha256(b"sk-1").digest(), Limits(2))])) as server:
        bearer = {"Authorization": "Bearer sk-1"}
        assert [get(server, path, **bearer).status_code for path in ("/v1/models", "/status", "/metrics")] == [200, 200, 429]
        assert get(server, "/health", **bearer).status_code == 200


def test_the_key_of_the_environment_and_the_ready_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from tinyvllm.cli import serve

    monkeypatch.setenv("TINYVLLM_API_KEY", "sk-secret")
    assert read_keys(serve._environment_key()).find("sk-secret").name == "key-1"
    monkeypatch.setenv("TINYVLLM_API_KEY", "")
    assert serve._environment_key() == []
    line = serve.ready_line("http://127.0.0.1:8000", ["a"], 1.0, ServerConfig(root_path="/llm"))
    assert line == "ready: http://127.0.0.1:8000/llm serves a (1.0 s); pages of other origins than localhost need --cors-origin"
    assert "--cors-origin" not in serve.ready_line("http://127.0.0.1:8000", ["a"], 1.0, ServerConfig(cors_origins=("*",)))


@pytest.mark.parametrize("line", ["sk-1 nam=a", "sk-1 concurrent=0", "sk", "sk-1 concurrent", "sk-\x07abc"])
def test_invalid_key_files(tmp_path: Path, line: str) -> None:
    (tmp_path / "keys").write_text(line)
    with pytest.raises(ArgumentError):
        read_keys([], str(tmp_path / "keys"))
    with pytest.raises(ArgumentError):
        read_keys([], str(tmp_path / "nothing"))


def test_cors() -> None:
    with running(ServerConfig(port=0, cors_origins=("https://page.example",), access_log=False), keys=read_keys(["sk-1234"])) as server:
        asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        asked["Access-Control-Request-Headers"] = "authorization"
        before = httpx.options(server.url + "/v1/completions", headers=asked, timeout=60, trust_env=False)
        assert before.status_code == 200 and before.headers["access-control-allow-origin"] == "https://page.example"
        refused = server.post("/v1/completions", ASK, Origin="https://page.example")
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://page.example"
        other = httpx.options(
            server.url + "/v1/completions", headers={**asked, "Origin": "https://other.example"}, timeout=60, trust_env=False
        )
        assert "access-control-allow-origin" not in other.headers


def test_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*made, "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert], check=True, capture_output=True)
    with running(ServerConfig(port=0, ssl_certfile=str(cert), ssl_keyfile=str(key), access_log=False)) as server:
        trusted = ssl.create_default_context(cafile=str(cert))
        assert server.url.startswith("https://")
        assert httpx.post(server.url + "/v1/completions", json=ASK, verify=trusted, timeout=60, trust_env=False).status_code == 200
    with pytest.raises(ArgumentError, match="ssl-certfile"), running(ServerConfig(port=0, ssl_certfile=str(tmp_path / "no"))):
        pass


def test_probes(server: Running) -> None:
    assert get(server, "/health").json() == {"status": "ok"} and get(server, "/ready").json() == {"status": "ready"}
    assert httpx.head(server.url + "/health", timeout=60, trust_env=False).status_code == 200
    server.post("/v1/completions", ASK)
    assert "running" in get(server, "/status").json()["models"]["demo"]
    metrics = get(server, "/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert 'vllm:generation_tokens_total{engine="0",model_name="demo"}' in metrics.text
    info = get(server, "/tokenizer_info").json()
    assert info["vocab_size"] > 0 and info["chat_template"]
    ids = server.post("/tokenize", {"prompt": "Once upon", "return_token_strs": True}).json()
    assert ids["count"] == len(ids["tokens"]) == len(ids["token_strs"])
    assert server.post("/detokenize", {"tokens": ids["tokens"]}).json()["prompt"].endswith("Once upon")
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "Once"}]}).json()
    assert chat["count"] > ids["count"]


class FakeLLM:
    """The part of an engine that Models uses."""

    made: list[str] = []
    room = 2

    def __init__(self, model: str, served_model_name: str):
        if len(FakeLLM.made) >= FakeLLM.room:
            raise OutOfMemoryError("no room")
        FakeLLM.made.append(model)
        self.model = model
        self.adapters: dict[str, str] = {}

    def watch(self, on_failure: object) -> None:
        pass

    def close(self) -> None:
        FakeLLM.made.remove(self.model)


def test_models_are_loaded_and_unloaded() -> None:
    import asyncio

    async def run() -> None:
        FakeLLM.made = []
        specs = {name: {"model": name} for name in "abc"}
        models = Models(specs, load=FakeLLM)  # type: ignore[arg-type]
        await models.start()
        assert FakeLLM.made == []

        async def use(models: Models, name: str | None, until: asyncio.Event | None = None) -> None:
            async with models.use(name) as (_, llm):
                assert llm.model == (name or "a")  # type: ignore[attr-defined]
                if until is not None:
                    await until.wait()

        longer = asyncio.Event()
        held = [asyncio.create_task(use(models, name, longer)) for name in (None, "a")]
        await use(models, "b")
        longer.set()
        await asyncio.gather(*held)
        assert sorted(FakeLLM.made) == ["a", "b"]
        await use(models, "c")  # no memory: b has been idle for the longest time
        assert sorted(FakeLLM.made) == ["a", "c"]
        async with models.use("a"), models.use("b"):
            with pytest.raises(OutOfMemoryError):
                await use(models, "c")
        with pytest.raises(Failure) as missing:
            await use(models, "d")
        assert missing.value.status == 404
        await models.close()
        assert FakeLLM.made == []

        models = Models(specs, idle_seconds=0.01, load=FakeLLM)  # type: ignore[arg-type]
        async with models.use("a"):
            await use(models, "b")
            while FakeLLM.made != ["a"]:  # b is idle; a is in use, however long that takes
                await asyncio.sleep(0.005)
        while FakeLLM.made:
            await asyncio.sleep(0.005)
        await models.close()

    asyncio.run(run())


def test_a_memory_budget_unloads_idle_models_and_refuses_with_numbers() -> None:
    import asyncio

    def plan(options: Mapping[str, Any], budget: int) -> Need:
        return Need(int(options["model"]) << 20, 1 << 20, 0, 0, 2 << 20, options)

    async def run() -> None:
        FakeLLM.made, FakeLLM.room = [], 99
        specs = {name: {"model": str(size)} for name, size in (("a", 3), ("b", 3), ("c", 4), ("d", 9))}
        models = Models(specs, load=FakeLLM, budget=MemoryBudget(11 << 20, plan))  # type: ignore[arg-type]

        async def use(name: str) -> None:
            async with models.use(name):
                pass

        await use("a")
        await use("b")
        assert sorted(models.loaded()) == ["a", "b"]  # 2 and twice 3 + 1, in MiB, of 11
        await use("a")
        await use("c")  # 5 more: b has been idle for the longest time
        assert sorted(models.loaded()) == ["a", "c"]
        async with models.use("a"), models.use("c"):
            with pytest.raises(OutOfMemoryError, match="'b' needs 4 MiB .weights 3 MiB.* 11 MiB models in use take 'a' 4 MiB, 'c' 5 MiB"):
                await use("b")
        with pytest.raises(OutOfMemoryError, match="model 'd' needs 10 MiB .* running 2 MiB, and --memory-budget is 11 MiB: raise it"):
            await use("d")
        assert sorted(models.loaded()) == ["a", "c"], "nothing is unloaded for a model that cannot fit"
        await models.close()

    try:
        asyncio.run(run())
    finally:
        FakeLLM.room = 2


def test_the_budget_is_in_bytes_of_the_plan() -> None:
    """Two models of which one fits: a request for the other one unloads the first, and each has the KV cache that was planned."""
    one = plan_need(ENGINE, 1 << 30)
    sizes = LLM(memory=1 << 30, speed=False, **ENGINE, plan=True).plan.sizes
    assert sizes.start is not None and one.options["num_blocks"] == sizes.start.num_blocks
    assert one.total == sizes.memory.weights + sizes.memory.scratch + sizes.start.kv_bytes + sizes.start.drafter_bytes
    specs = {"one": ENGINE, "two": ENGINE, "large": {**ENGINE, "num_blocks": 100_000}}
    budget = MemoryBudget(one.run + 2 * one.total - 1)
    with running(ServerConfig(port=0, access_log=False), specs, budget=budget) as server:
        for name in ("one", "two"):
            assert server.post("/v1/completions", {**ASK, "model": name}).status_code == 200
            assert [m["id"] for m in get(server, "/v1/models").json()["data"] if m["loaded"]] == [name]
        refused = server.post("/v1/completions", {**ASK, "model": "large"})
        error = refused.json()["error"]
        assert refused.status_code == 503 and error["code"] == "out_of_memory"
        assert "model 'large' does not fit" in error["message"] and "(--memory-budget)" in error["message"], error


def test_two_models() -> None:
    with running(ServerConfig(port=0, access_log=False), {"one": ENGINE, "two": {**ENGINE, "max_model_len": 64}}) as server:
        assert [m["loaded"] for m in get(server, "/v1/models").json()["data"]] == [False, False]
        assert get(server, "/metrics").status_code == get(server, "/status").status_code == get(server, "/health").status_code == 200
        assert server.post("/v1/completions", {**ASK, "model": "two"}).json()["model"] == "two"
        listed = {m["id"]: m for m in get(server, "/v1/models").json()["data"]}
        assert not listed["one"]["loaded"] and listed["two"]["max_model_len"] == 64
        assert server.post("/v1/completions", {**ASK, "model": "two", "prompt": [5] * 70}).status_code == 400


def test_shutting_down_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted requests are finished and new ones refused; then the server ends."""
    said: list[str] = []
    step, started, refuses = Engine.step, threading.Event(), threading.Event()

    def held(self: Engine) -> Any:  # the request does not end before the server has refused another one
        if started.is_set():
            refuses.wait(120)
        return step(self)

    monkeypatch.setattr(Engine, "step", held)
    with running(ServerConfig(port=0, access_log=False)) as server:
        body = {"prompt": "Once", "max_tokens": 80, "ignore_eos": True, "stream": True}

        def stream() -> None:
            with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=240, trust_env=False) as answer:
                for line in answer.iter_lines():
                    started.set()
                    said.append(line)

        reader = threading.Thread(target=stream)
        reader.start()
        assert started.wait(120)
        server.server.stop()
        while not server.service.draining:
            time.sleep(0.001)
        refused = server.post("/v1/completions", ASK)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert get(server, "/ready").status_code == 503 and get(server, "/health").status_code == 200
        refuses.set()
        reader.join(240)
    data = [json.loads(line[6:]) for line in said if line.startswith("data: {")]
    assert said[-2:] == ["data: [DONE]", ""] or said[-1] == "data: [DONE]"
    assert data[-1]["choices"][0]["finish_reason"] == "length"


def test_after_the_grace_period_clients_get_an_error() -> None:
    with running(ServerConfig(port=0, access_log=False, grace_seconds=0.2)) as server:
        body = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60, trust_env=False) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.server.stop()
            rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and json.loads(rest[-2][6:])["error"]["code"] == "shutting_down"


@pytest.fixture(scope="module")
def process():
    """`main.py serve` in a process."""
    command = [sys.executable, "main.py", "serve", "--port", "0", "--num-blocks", "256", "--max-num-seqs", "4"]
    made = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    url = ready_url(made.stderr)
    assert url.startswith("http://127.0.0.1:")
    yield made, url
    made.kill()


def test_curl_and_sigterm(process) -> None:
    made, url = process
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    ask = ["curl", "-sS", "-i", "--noproxy", "*", f"{url}/v1/completions", "-H", "Content-Type: application/json"]
    whole = subprocess.run([*ask, "-d", json.dumps(ASK)], capture_output=True, text=True, check=True).stdout
    assert whole.startswith("HTTP/1.1 200 OK") and re.search(r"x-request-id: [0-9a-f]{32}\n", whole) and "date: " in whole
    assert '"finish_reason":"length"' in whole
    stream = subprocess.run([*ask, "-N", "-d", json.dumps({**ASK, "stream": True})], capture_output=True, text=True, check=True).stdout
    assert stream.rstrip().endswith("data: [DONE]")
    wrong = subprocess.run([*ask, "-d", "{"], capture_output=True, text=True, check=True).stdout
    assert wrong.startswith("HTTP/1.1 400") and '"invalid_json"' in wrong

    def cpu() -> float:
        fields = Path(f"/proc/{made.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    if Path("/proc").is_dir():
        end = time.monotonic() + 300
        spent = 1.0
        while spent > 0.02 and time.monotonic() < end:  # it first captures common steps
            before = cpu()
            time.sleep(1.5)
            spent = cpu() - before
        assert spent <= 0.02, "an idle server works"
    made.send_signal(signal.SIGTERM)
    out, err = made.communicate(timeout=120)
    assert made.returncode == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["status"] for line in lines] == [200, 200, 400]


def test_a_second_signal_ends_requests_without_a_traceback() -> None:
    command = [sys.executable, "main.py", "serve", "--port", "0", "--num-blocks", "256", "--max-num-seqs", "4", "--no-warm-up"]
    made = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = ready_url(made.stderr)
        body = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60, trust_env=False) as answer:
            lines = answer.iter_lines()
            next(lines)
            made.send_signal(signal.SIGTERM)
            made.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        out, err = made.communicate(timeout=300)
    finally:
        made.kill()
    assert rest[-1] == "data: [DONE]" and json.loads(rest[-2][6:])["error"]["code"] == "shutting_down"
    assert made.returncode == 0 and complaints_in(err) == ""


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--port", "99999"], "--port"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--model", "a=", "--model", "b"], "NAME=PATH"),
        (["--max-body", "much"], "--max-body"),
        (["--ssl-keyfile", "k"], "--ssl-certfile"),
        (["--chat-template", "/no/such/file"], "--chat-template"),
        (["--lenien"], "--lenient"),
    ],
)
def test_bad_arguments(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tinyvllm.cli import main

    assert main(["serve", *arguments]) == 2
    assert word in capsys.readouterr().err


def test_a_port_in_use(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    from tinyvllm.cli import main

    assert main(["serve", "--port", str(server.port)]) == 2
    assert f"--port {server.port}" in capsys.readouterr().err


def test_the_serving_docs_name_every_path_and_option() -> None:
    from tinyvllm.cli.arguments import PARSERS
    from tinyvllm.server.api.routes import ENDPOINTS, RESOURCES

    page = (ROOT / "docs" / "serving.md").read_text()
    resources = [r.path.replace("{name:path}", "NAME").replace("{name}", "ID") for r in RESOURCES]
    paths = [*(e.path for e in ENDPOINTS), *resources]
    group = next(g for g in PARSERS["serve"]()._action_groups if g.title == "server")
    options = [max(action.option_strings, key=len) for action in group._group_actions]
    assert not [word for word in [*paths, *options] if word not in page]
