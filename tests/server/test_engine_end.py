"""An engine that ends all the same: its requests get errors, /ready says so, and the server process ends with exit code 1."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import ENGINE
from tinyvllm.engine.engine import Engine
from tinyvllm.errors import TinyvllmError
from tinyvllm.server.core.config import ServerConfig
from tinyvllm.server.core.keys import Keys
from tinyvllm.server.core.models import Models
from tinyvllm.server.http.app import create_app
from tinyvllm.server.http.listen import Server, bind, url_of

ROOT = Path(__file__).parents[2]
ASK: dict[str, Any] = {"prompt": "Once", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


class Broken(Exception):
    pass


def test_requests_in_flight_get_errors_and_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    step, broken = Engine.step, threading.Event()

    def breaks(self: Engine) -> Any:
        if broken.is_set():
            raise Broken("a prompt")
        return step(self)

    monkeypatch.setattr(Engine, "step", breaks)
    config, ready, raised = ServerConfig(port=0, access_log=False), threading.Event(), []
    sock = bind(config)

    async def serve() -> None:
        app, service = create_app(config, Models({"demo": ENGINE}), Keys())
        await service.models.start()
        await Server(app, service, sock, ready.set).run_until_stopped()

    def run() -> None:
        try:
            asyncio.run(serve())
        except TinyvllmError as error:
            raised.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(120)
    with httpx.Client(base_url=url_of(config, sock), trust_env=False, timeout=120) as client:
        address = client.base_url.host, client.base_url.port
        with socket.create_connection(address) as unfinished:
            # a request whose body is incomplete keeps the server open, so that the probe and the next request are answered; it is sent
            # before the stream's, and so the server has its head when the stream has its first event
            unfinished.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
            )
            with client.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as stream:
                lines = stream.iter_lines()
                assert next(lines).startswith("data: ")
                broken.set()
                assert any("internal_error" in line and "Broken" in line and "a prompt" not in line for line in lines)
            ready_now, refused = client.get("/ready"), client.post("/v1/completions", json=ASK)
            assert ready_now.status_code == refused.status_code == client.get("/health").status_code == 503
            assert "the engine of model demo has ended (Broken)" in ready_now.json()["error"]["message"]
            assert refused.json()["error"]["code"] == "engine_dead"
    thread.join(60)
    assert not thread.is_alive() and raised == ["serve: the engine of model demo has ended: Broken: a prompt"]


def test_the_process_ends_with_exit_code_1() -> None:
    program = """
import sys
from tinyvllm.engine.engine import Engine
def step(self):
    raise ZeroDivisionError("on purpose")
Engine.step = step
from tinyvllm.cli import main
sys.exit(main(["serve", "--port", "0", "--no-access-log", "--num-blocks", "64", "--no-warm-up"]))
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stderr is not None
        try:
            line = next(line for line in process.stderr if line.startswith("ready: "))
            answer = httpx.post(line.split()[1] + "/v1/completions", json=ASK, timeout=120, trust_env=False)
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
            rest = process.stderr.read()
            assert process.wait(120) == 1
        finally:
            process.kill()
    last = rest.strip().splitlines()[-1]
    assert last == "tinyvllm: error: serve: the engine of model tinyvllm has ended: ZeroDivisionError: on purpose"
