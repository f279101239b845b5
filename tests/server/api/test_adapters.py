"""Adapters over HTTP: models by name, their parent, loading and unloading as vLLM spells it, while requests run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import Running, running
from tests.tiny.adapters import write_adapter
from tinyvllm.server.core.config import ServerConfig

BODY = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second", "third")):
        write_adapter(folder / name, tiny_model, seed=seed + 1)
    return folder


@pytest.fixture(scope="module")
def served(tiny_model: Path, folders: Path) -> Iterator[Running]:
    options = {"model": str(tiny_model), "max_model_len": 256, "num_blocks": 64, "device": "CPU"}
    spec = {**options, "lora_modules": [f"first={folders / 'first'}"], "max_loras": 2}
    with running(ServerConfig(port=0, allow_runtime_lora=True, access_log=False), specs={"base": spec}) as server:
        yield server


def text(server: Running, model: str, **more: Any) -> str:
    answer = server.post("/v1/completions", BODY | {"model": model} | more).json()
    assert answer["model"] == model
    return str(answer["choices"][0]["text"])


def post(server: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60, trust_env=False)


def test_an_adapter_is_a_model_with_a_parent(served: Running) -> None:
    listed = {entry["id"]: entry for entry in httpx.get(f"{served.url}/v1/models", timeout=60, trust_env=False).json()["data"]}
    assert listed["first"]["parent"] == "base" and listed["base"]["parent"] is None
    assert listed["first"]["max_model_len"] == listed["base"]["max_model_len"] == 256
    assert text(served, "first") == text(served, "first") != text(served, "base")
    chat = post(served, "/v1/chat/completions", {"model": "first", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]})
    assert chat.status_code == 200 and chat.json()["model"] == "first"


def test_adapters_are_loaded_and_unloaded_while_requests_run(served: Running, folders: Path) -> None:
    wanted, plain = text(served, "first"), text(served, "base")
    stop, seen = threading.Event(), list[tuple[str, str]]()

    def talk() -> None:
        while not stop.is_set():
            seen.append((text(served, "first"), text(served, "base")))

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        for name in ("second", "third", "second"):
            path = str(folders / name)
            assert post(served, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}).status_code == 200
            answers = [text(served, name), text(served, name, n=2)]
            assert answers[0] not in (wanted, plain)
            assert post(served, "/v1/unload_lora_adapter", {"lora_name": name}).status_code == 200
            gone = post(served, "/v1/completions", BODY | {"model": name})
            assert gone.status_code == 404 and gone.json()["error"]["code"] == "model_not_found"
    finally:
        stop.set()
        thread.join(60)
    assert seen and set(seen) == {(wanted, plain)}


@pytest.mark.parametrize(("body", "status", "param"), [
    ({"lora_name": "first", "lora_path": "/"}, 400, "lora_name"),
    ({"lora_name": "base", "lora_path": "/"}, 400, "lora_name"),
    ({"lora_name": "new", "lora_path": "/nowhere"}, 400, "lora_path"),
    ({"lora_name": "new", "lora_path": "/proc"}, 400, "lora_path"),
    ({"lora_name": "new", "lora_path": "/", "load_inplace": True}, 400, "load_inplace"),
    ({"lora_name": "a\nb", "lora_path": "/"}, 400, None),
    ({"lora_name": "new"}, 400, "lora_path"),
    ({"lora_name": "new", "lora_path": "/", "model": "other"}, 404, "model"),
])  # fmt: skip
def test_what_cannot_be_loaded(served: Running, body: dict[str, Any], status: int, param: str | None) -> None:
    answer = post(served, "/v1/load_lora_adapter", body)
    assert answer.status_code == status, answer.text
    assert param in (None, answer.json()["error"]["param"]) and len(answer.text) < 900


def test_what_an_adapter_does_not_compute(served: Running) -> None:
    answer = post(served, "/v1/embeddings", {"model": "first", "input": "x"})
    assert answer.status_code == 400 and "send 'base'" in answer.json()["error"]["message"]
    assert post(served, "/v1/segments", {"model": "first", "text": "x" * 40}).status_code == 400
    assert post(served, "/v1/unload_lora_adapter", {"lora_name": "never"}).status_code == 404


def test_a_server_loads_nothing_unless_it_may(server: Running, folders: Path) -> None:
    for path in ("load", "unload"):
        body = {"lora_name": "x"} | ({"lora_path": str(folders / "first")} if path == "load" else {})
        answer = post(server, f"/v1/{path}_lora_adapter", body)
        assert answer.status_code == 403 and "--allow-runtime-lora" in answer.json()["error"]["message"]
