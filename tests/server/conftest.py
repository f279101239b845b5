"""A real server on a free loopback port, in a thread, with the bundled model; one for all tests of a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httptools")

from tests.server import browser
from tinyvllm.server.core.config import ServerConfig
from tinyvllm.server.core.context import Service
from tinyvllm.server.core.keys import Keys
from tinyvllm.server.core.models import Models
from tinyvllm.server.http.app import create_app
from tinyvllm.server.http.listen import Server, bind, url_of

ENGINE = {"max_num_seqs": 8, "num_blocks": 512}
HERMES = (
    '{% if tools %}Tools: {{ tools | tojson }} Write <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>\n{% endif %}'
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["tree", "river"]}, "times": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["place", "times"],
            "additionalProperties": False,
        },
    },
}


@dataclass
class Running:
    """A server that runs in a thread of this process."""

    url: str
    server: Server
    service: Service
    log: list[dict[str, Any]]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=headers, timeout=60, trust_env=False)

    def raw(self, data: bytes, *, half_close: bool = False, seconds: float = 20.0) -> bytes:
        """Everything that the server sends in response to these bytes, until it closes the connection or is silent."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as connection:
            connection.sendall(data)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            received = b""
            with contextlib.suppress(TimeoutError, ConnectionResetError):
                while chunk := connection.recv(65536):
                    received += chunk
        return received


@contextlib.contextmanager
def running(config: ServerConfig | None = None, specs: dict[str, dict[str, Any]] | None = None, keys: Keys | None = None, **models: Any):
    """A server with these settings until the end of the block; it is then stopped as by SIGTERM."""
    config = config or ServerConfig(port=0)
    sock = bind(config)
    ready, started = threading.Event(), []

    async def main() -> None:
        app, service = create_app(config, Models(specs or {"demo": ENGINE}, **models), keys)
        await service.models.start()
        started.append((Server(app, service, sock, ready.set), service))
        await started[0][0].run_until_stopped()

    failed: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(240), "the server did not start"
    if failed:
        sock.close()
        raise failed[0]
    server, service = started[0]
    yield Running(url_of(config, sock), server, service, [])
    server.stop()
    thread.join(120)
    assert not thread.is_alive(), "the server did not stop"
    assert not failed, failed


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    config = ServerConfig(port=0, trust_request_chat_template=True, access_log=False, head_seconds=1.5, body_seconds=1.5, beat_seconds=0.2)
    with running(config) as made:
        yield made


@pytest.fixture(scope="session")
def window() -> Iterator[browser.Browser]:
    path = browser.find()
    assert path is not None
    with browser.browser(path) as page:
        yield page


@pytest.fixture
def page(window: browser.Browser, server: Running) -> browser.Browser:
    """The page in a browser without stored data."""
    window.go(server.url + "/version")
    window.run("""localStorage.clear(); sessionStorage.clear(); new Promise((done, failed) => {
        const request = indexedDB.deleteDatabase("tinyvllm");
        request.onsuccess = done; request.onerror = failed; }).then(() => 0)""")  # blocked: until the page before it has closed its own
    window.messages.clear()
    window.requests.clear()
    window.go(server.url + "/")
    window.wait("document.querySelector('#model').value")
    window.run("""{ let seed = 0; const random = crypto.getRandomValues.bind(crypto);
        crypto.getRandomValues = into => into instanceof Uint32Array ? into.fill(++seed) : random(into); }""")  # until a reload
    return window


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream's events, the JSON ones decoded."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
