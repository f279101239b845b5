"""A server whose memory is used up over HTTP: what needs more is refused, requests after it get their tokens, and the process stays."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.soak_client import ROOT, Server, serving

pytestmark = [pytest.mark.long, pytest.mark.skipif(sys.platform != "linux", reason="needs prlimit and /proc")]
ROUNDS, AT_ONCE = 20, 3
ASK: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
SMALL = {**ASK, "prompt": [7, 8, 9], "max_tokens": 8, "return_token_ids": True}
OPTIONS = (
    "--load-format", "dummy", "--dtype", "float32", "--num-blocks", "1100", "--max-num-batched-tokens", "512", "--max-num-seqs", "64",
    "--no-enable-prefix-caching", "--no-warm-up",
)  # fmt: skip
Attack = tuple[int, str, Callable[[int], dict[str, Any]], set[int]]  # MiB to allocate, path, body of a round, statuses


def schema(n: int, names: int = 100) -> dict[str, Any]:
    """A grammar that no other round has compiled."""
    properties = {f"p{n}-{i}": {"type": "string", "maxLength": 20 + i} for i in range(names)}
    return {"json": {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}}


ATTACKS: dict[str, Attack] = {
    # a table of counts over the vocabulary for every sequence that could run
    "step": (40, "/v1/completions", lambda n: {**ASK, "prompt": [1, 2, 3], "repetition_penalty": 1.1}, {503}),
    "capture": (20, "/v1/completions", lambda n: {**ASK, "prompt": [5] * 400, "top_k": 5 + n, "temperature": 1.0, "n": 60}, {503}),
    "prompt": (20, "/v1/completions", lambda n: {**ASK, "prompt": [5] * 8000}, {200, 503}),
    "tokenization": (60, "/tokenize", lambda n: {"prompt": "A few words, and one more. " * 37_000}, {503}),
    "short tokenization": (20, "/tokenize", lambda n: {"prompt": f"{n} words " * 5_000}, {503}),
    "conversation": (
        24, "/v1/chat/completions", lambda n: {**ASK, "messages": [{"role": "user", "content": "so " * 14_000}] * 3}, {503, 400},
    ),
    "body": (48, "/v1/completions", lambda n: {**ASK, "prompt": [f"{i}" for i in range(300_000)]}, {503}),
    "grammar": (24, "/v1/completions", lambda n: {**ASK, "prompt": [1, 2, 3], "structured_outputs": schema(n)}, {503}),
    "thread": (20, "/tokenize", lambda n: {"prompt": "word " * 1_000}, {200, 503}),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, bundled = tmp_path_factory.mktemp("model"), ROOT / "tinyvllm" / "demo" / "model"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(bundled / name, folder)
    small = {"vocab_size": 262_144, "max_position_embeddings": 16_384, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    config = json.loads((bundled / "config.json").read_text())
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps({**config, **small, **shape}))
    with serving("--model", str(folder), "--max-model-len", "16384", *OPTIONS) as server:
        post(server, "/v1/completions", {**ASK, "prompt": [1, 2, 3], "structured_outputs": schema(-1)})  # imports the grammars' library
        yield server


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=120, trust_env=False)


def small_tokens(server: Server) -> list[int]:
    answer = post(server, "/v1/completions", SMALL)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


@contextmanager
def memory_left(server: Server, mebibytes: int) -> Iterator[None]:
    """The process may allocate this much more, as under ulimit -v."""
    pid, unlimited = server.process.pid, resource.RLIM_INFINITY
    used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.prlimit(pid, resource.RLIMIT_AS, (used + (mebibytes << 20), unlimited))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, (unlimited, unlimited))


def check(answer: httpx.Response, statuses: set[int]) -> None:
    assert answer.status_code in statuses, answer.text
    if answer.status_code == 503:
        assert answer.json()["error"]["code"] == "out_of_memory", answer.text


@pytest.mark.parametrize("name", ATTACKS)
def test_what_does_not_fit_is_refused_and_the_next_request_gets_its_tokens(server: Server, name: str) -> None:
    mebibytes, path, body, statuses = ATTACKS[name]
    expected = small_tokens(server)
    with memory_left(server, mebibytes), ThreadPoolExecutor(AT_ONCE) as threads:
        for n in range(ROUNDS):
            for answer in attack(server, threads, path, body(n)):
                check(answer, statuses)
            assert small_tokens(server) == expected, f"round {n}"
    check(post(server, path, body(0)), {200, 400})
    server.calm()
    assert server.status()["blocks"]["used"] == 0 and server.process.poll() is None


def attack(server: Server, threads: ThreadPoolExecutor, path: str, body: dict[str, Any]) -> list[httpx.Response]:
    return [one.result() for one in [threads.submit(post, server, path, body) for _ in range(AT_ONCE)]]


def test_without_any_memory_every_request_is_refused_until_there_is_some(server: Server) -> None:
    expected = small_tokens(server)
    with memory_left(server, 0), ThreadPoolExecutor(AT_ONCE) as threads:
        for _, path, body, _ in ATTACKS.values():
            for answer in attack(server, threads, path, body(0)):
                check(answer, {503})
    assert small_tokens(server) == expected and server.process.poll() is None
