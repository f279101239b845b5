"""/v1/files and /v1/batches with OpenAI's client: answers as of single requests, keys that see only their own, and every limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from openai import APIStatusError, OpenAI

from tests.server.conftest import Running, running
from tinyvllm.server.core import batch_runner, file_store, generation
from tinyvllm.server.core.batch_runner import Batch, Batches
from tinyvllm.server.core.config import ServerConfig
from tinyvllm.server.core.failures import Failure
from tinyvllm.server.core.file_store import FileStore, StoredFile
from tinyvllm.server.core.keys import Key, read_keys

FINAL = ("completed", "failed", "cancelled", "expired")


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    given = {"model": "demo", "messages": [{"role": "user", "content": f"Tell me of {custom_id}"}], "max_tokens": 5, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": {**given, **body}}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in lines).encode()


@pytest.fixture
def client_of() -> Iterator[Callable[..., OpenAI]]:
    """OpenAI's client for a server and a key; all are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(server: Running, key: str = "none") -> OpenAI:
            http = stack.enter_context(httpx.Client(timeout=60, trust_env=False))
            return OpenAI(base_url=f"{server.url}/v1", api_key=key, http_client=http, max_retries=0)

        yield make


def finished(client: OpenAI, batch_id: str) -> Any:
    for _ in range(3000):
        batch = client.batches.retrieve(batch_id)
        if batch.status in FINAL:
            return batch
        time.sleep(0.02)
    raise AssertionError(f"the batch is still {batch.status}")


def test_a_batch_from_upload_to_answers(server: Running, client_of: Callable[..., OpenAI]) -> None:
    client = client_of(server)
    lines = [line(f"r{i}") for i in range(12)]
    data = jsonl(*lines[:6], line("wrong", temperature=-1), *lines[6:])
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    assert (file.filename, file.purpose, file.bytes, file.status) == ("in.jsonl", "batch", len(data), "processed")
    assert client.files.content(file.id).read() == data and file.id in [one.id for one in client.files.list(purpose="batch")]
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"})
    batch = finished(client, batch.id)
    assert batch.status == "completed" and batch.metadata == {"a": "b"} and batch.completed_at and not batch.errors
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (13, 12, 1)
    answers = {one["custom_id"]: one["response"] for one in map(json.loads, client.files.content(batch.output_file_id).text.splitlines())}
    assert set(answers) == {one["custom_id"] for one in lines} and {one["status_code"] for one in answers.values()} == {200}
    alone = server.post("/v1/chat/completions", lines[3]["body"]).json()
    assert answers["r3"]["body"]["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]
    (failed,) = map(json.loads, client.files.content(batch.error_file_id).text.splitlines())
    assert failed["custom_id"] == "wrong" and failed["response"]["status_code"] == 400
    assert batch.id in [one.id for one in client.batches.list(limit=1)]
    for name in (file.id, batch.output_file_id):
        assert client.files.delete(name).deleted
        with pytest.raises(APIStatusError) as caught:
            client.files.retrieve(name)
        assert caught.value.status_code == 404
    with pytest.raises(APIStatusError) as caught:
        client.batches.cancel(batch.id)
    assert caught.value.status_code == 409


def test_wrong_lines_fail_the_batch_before_anything_runs(server: Running, client_of: Callable[..., OpenAI]) -> None:
    client = client_of(server)
    wrong = [line("a"), line("a"), {**line("b"), "url": "/v1/completions"}, line("c", stream=True), {"custom_id": "d"}]
    for data, codes in [(jsonl(*wrong), ["duplicate", "mismatched", "invalid", "invalid"]), (b"\n", ["empty"]), (b"{", ["invalid"])]:
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        batch = finished(client, batch.id)
        assert batch.status == "failed" and batch.request_counts.completed == 0 and batch.output_file_id is None
        assert [error.code.partition("_")[0] for error in batch.errors.data] == codes
        client.files.delete(file.id)


def test_uploads_that_are_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def post(**fields: Any) -> tuple[int, str]:
        response = httpx.post(f"{server.url}/v1/files", trust_env=False, timeout=60, **fields)
        return response.status_code, response.json()["error"]["message"]

    file = {"file": ("in.jsonl", b"{}")}
    assert post(json={})[0] == 415
    assert post(files=file, data={"purpose": "fine-tune"}) == (400, "purpose: must be 'batch', got 'fine-tune'")
    assert post(files={"other": ("a", b"x")}, data={"purpose": "batch"})[0] == 400
    assert post(data={"purpose": "batch"}, files={"file": (None, b"text")})[0] == 400
    assert post(content=b"garbage", headers={"Content-Type": "multipart/form-data; boundary=x"})[0] == 400
    assert post(content=b"garbage", headers={"Content-Type": "multipart/form-data"})[0] == 400
    assert post(files=file, data={"purpose": "b" * 100_000})[0] == 400
    monkeypatch.setattr("tinyvllm.server.api.files.MAX_FILE", 1000)
    assert post(files={"file": ("in.jsonl", b"x" * 200_000)}, data={"purpose": "batch"})[0] == 413
    assert server.service.body_bytes == 0


def test_a_key_sees_only_its_own(client_of: Callable[..., OpenAI]) -> None:
    with running(ServerConfig(port=0, access_log=False), keys=read_keys(["key-of-alice", "key-of-bob"])) as server:
        alice, bob = client_of(server, "key-of-alice"), client_of(server, "key-of-bob")
        file = alice.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")
        batch = alice.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        for act in (
            lambda: bob.files.retrieve(file.id),
            lambda: bob.files.content(file.id),
            lambda: bob.files.delete(file.id),
            lambda: bob.batches.retrieve(batch.id),
            lambda: bob.batches.cancel(batch.id),
            lambda: bob.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"),
        ):
            with pytest.raises(APIStatusError) as caught:
                act()
            assert caught.value.status_code == 404
        assert not list(bob.files.list()) and not list(bob.batches.list())
        assert finished(alice, batch.id).request_counts.completed == 1  # its lines run in the name of its key
        assert len(list(alice.files.list())) == 2


def test_limits_of_the_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    files, owner = FileStore(), Key("", b"")
    monkeypatch.setattr(file_store, "MAX_FILES", 2)
    monkeypatch.setattr(file_store, "MAX_FILES_BYTES", 10)
    files.add(StoredFile(owner, "a", "batch", b"123456"))
    with pytest.raises(Failure, match="would have 11 bytes"):
        files.add(StoredFile(owner, "b", "batch", b"12345"))
    files.add(StoredFile(owner, "b", "batch", b"1234"))
    with pytest.raises(Failure, match="limit; delete some"):
        files.add(StoredFile(owner, "c", "batch", b""))


def run_batch(lines: int, app: Any, change: Any = lambda batches, batch: None) -> Batch:
    """A batch of chat lines through `app`; `change` is called when the first of them runs."""
    files, owner = FileStore(), Key("", b"")
    file = StoredFile(owner, "in", "batch", jsonl(*(line(f"r{i}") for i in range(lines))))

    async def main() -> Batch:
        batches = Batches(files)
        began = asyncio.Event()

        async def observed(scope: Any, receive: Any, send: Any) -> None:
            began.set()
            await app(scope, receive, send)

        batches.app = observed
        batch = batches.start(Batch(owner, "/v1/chat/completions", file))
        await began.wait()
        change(batches, batch)
        await asyncio.gather(*batches._tasks)
        return batch

    return asyncio.run(asyncio.wait_for(main(), 60))


async def reply(send: Any, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def test_a_cancelled_batch_keeps_what_it_has() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0)
        await reply(send, 200)

    batch = run_batch(50, app, lambda batches, batch: batches.cancel(batch.owner, batch.id))
    assert batch.status == "cancelled" and 1 <= batch.completed <= batch_runner.CONCURRENCY and batch.output_file_id


def test_lines_run_after_requests_of_clients(server: Running, client_of: Callable[..., OpenAI], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line has a lower priority than a request that names none; a line that names one has that."""
    priorities: list[int] = []
    options_of = generation.request_options
    monkeypatch.setattr(generation, "request_options", lambda *a: (options := options_of(*a), priorities.append(options.priority))[0])
    client = client_of(server)
    file = client.files.create(file=("in.jsonl", jsonl(line("a"), line("b"), line("c", priority=-3))), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert finished(client, batch.id).request_counts.completed == 3
    assert sorted(priorities) == [-3, batch_runner.PRIORITY, batch_runner.PRIORITY]
    server.post("/v1/chat/completions", line("a")["body"])
    assert priorities[-1] == 0 < batch_runner.PRIORITY


def test_a_line_without_room_is_tried_again_and_late_batches_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = iter([429, 503, 200])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, next(statuses))

    batch = run_batch(1, app)
    assert batch.status == "completed" and (batch.completed, batch.failed) == (1, 0)

    async def busy(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, 429)

    batch = run_batch(3, busy, lambda batches, batch: batch.times.update(created=0))
    assert batch.status == "expired" and batch.completed == 0


def test_answers_beyond_the_room_fail_the_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, 200)

    monkeypatch.setattr(batch_runner, "MAX_FILES_BYTES", 100)
    batch = run_batch(9, app)
    assert batch.status == "failed" and "100 bytes" in batch.errors[0]["message"]
