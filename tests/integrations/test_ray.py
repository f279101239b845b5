"""Ray Serve on a local cluster: OpenAI routes, prefixes that stay with their replica, a replica killed under load."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.ray
STREAMS = 32


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def processes(title: str) -> list[int]:
    """The processes of this user's cluster whose command line has `title`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if title in path.read_bytes().decode(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    from ray import serve

    from tinyvllm.integrations.ray import app

    environment = {"TINYVLLM_THREADS": "1", "TINYVLLM_SELFTEST": "off", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False, runtime_env={"env_vars": environment})
    port = free_port()  # after Ray has taken its own
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        engine = {"max_model_len": 1024, "max_num_seqs": 16, "num_blocks": 400, "warm_up": False}
        serve.run(app({"num_replicas": 2, "engine": engine, "server": {"grace_seconds": 5.0}}))
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def story(i: int, max_tokens: int = 8, **fields: object) -> dict[str, object]:
    prompt = f"Tenant {i % 2}. " + "Once upon a time there was a little dog. " * 12
    return {"prompt": f"{prompt}{i}", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}


def test_openai_routes(url: str) -> None:
    with httpx.Client(base_url=url, timeout=120) as client:
        assert client.get("/health").json() == {"status": "ok"} and client.get("/ready").status_code == 200
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tinyvllm"]
        answer = client.post("/v1/completions", json=story(0)).json()
        assert answer["usage"]["completion_tokens"] == 8
        chunks = []
        with client.stream("POST", "/v1/completions", json=story(0, stream=True)) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream") and stream.headers["x-request-id"]
            chunks = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
        assert chunks[-1] == "[DONE]" and "".join(json.loads(c)["choices"][0]["text"] for c in chunks[:-1]) == answer["choices"][0]["text"]
        assert len(chunks) > 3, "it streams"
        bad = client.post("/v1/completions", json={"prompt": "x", "max_tokens": -1})
        assert bad.status_code == 400 and "max_tokens" in bad.json()["error"]["message"]
        assert client.get("/v1/nothing").status_code == 404
        long = client.post("/v1/completions", content=b"x" * (70 << 20))
        assert long.status_code == 413


def test_prefixes_stay_with_their_replica(url: str) -> None:
    """Of two tenants each prompt after the first hits: with turns of two replicas, a third of them would miss."""
    with httpx.Client(base_url=url, timeout=120) as client:
        hits = []
        for i in range(10):
            usage = client.post("/v1/completions", json=story(100 + i)).json()["usage"]
            hits.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) > 0.8 * usage["prompt_tokens"])
    assert all(hits[2:]), hits


def test_a_killed_replica_loses_no_request_without_an_error(url: str) -> None:
    """Each of 32 streams ends with [DONE], or with an error that its client sees; the server recovers."""
    begun = threading.Semaphore(0)

    def ask(i: int) -> str:
        try:
            with (
                httpx.Client(base_url=url, timeout=120) as client,
                client.stream("POST", "/v1/completions", json={"prompt": f"{i} times", **more}) as stream,
            ):
                if stream.status_code != 200:
                    return "refused"
                lines = []
                for line in stream.iter_lines():
                    if line.startswith("data: "):
                        if not lines:
                            begun.release()
                        lines.append(line[6:])
                return "done" if lines[-1] == "[DONE]" else "error" if "replica_died" in lines[-1] else f"lost: {lines[-1]!r}"
        except httpx.HTTPError as error:
            return f"lost: {error!r}"

    more = {"max_tokens": 600, "temperature": 0, "ignore_eos": True, "stream": True}
    victims = processes("ServeReplica:default:Replica")
    assert len(victims) == 2
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        started = [pool.submit(ask, i) for i in range(STREAMS)]
        for _ in range(20):  # a replica runs 16 at a time, so both run some
            assert begun.acquire(timeout=120)
        os.kill(victims[0], signal.SIGKILL)
        ends = [one.result() for one in started]
    assert set(ends) == {"done", "error"}, ends
    with httpx.Client(base_url=url, timeout=120) as client:
        assert client.post("/v1/completions", json=story(0)).status_code == 200
