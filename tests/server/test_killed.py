"""A server that is killed and restarted: its prefix cache is restored, and it gives the same answers."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx

from tests.server.soak_client import Server, serving

STORY = "Once upon a time there was a little dragon that lived under the old bridge by the river, and every morning " * 3
BLOCK_BYTES = 6 * 2 * 2 * 16 * 64 * 2  # of the bundled model: layers, keys and values, heads, slots, features, bfloat16
ASKED = {"prompt": STORY, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def ask(server: Server, **changed: object) -> tuple[int, list[int]]:
    """(cached tokens, tokens of the answer)"""
    said = httpx.post(f"{server.url}/v1/completions", json={**ASKED, **changed}, timeout=60, trust_env=False).json()
    return said["usage"]["prompt_tokens_details"]["cached_tokens"], said["choices"][0]["token_ids"]


def written(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/recent-*.kv"))


def wait_until_written(folder: Path) -> None:
    size, ends = -1, time.monotonic() + 20
    while (now := written(folder)) != size or not now:
        assert time.monotonic() < ends, "nothing is written while the server is idle"
        size = now
        time.sleep(0.5)


def wait_until_larger(folder: Path, size: int) -> None:
    ends = time.monotonic() + 60
    while written(folder) < size:
        assert time.monotonic() < ends, f"{written(folder)} bytes are written while the server is busy, expected {size}"
        time.sleep(0.05)


def test_an_idle_server_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    options = ("--num-blocks", "256", "--max-num-seqs", "4", "--prefix-cache-dir", str(tmp_path))
    with serving(*options) as server:
        cached, tokens = ask(server)
        assert cached == 0
        wait_until_written(tmp_path)
    assert not list(tmp_path.glob("*/prefix.kv")), "it was killed"
    with serving(*options) as server:
        cached, again = ask(server)
        assert again == tokens and cached > 32
        size = written(tmp_path)
        time.sleep(0.5)
        assert written(tmp_path) == size, "what is on disk is not written again"


def test_a_busy_server_that_is_killed_keeps_older_blocks(tmp_path: Path) -> None:
    options = ("--num-blocks", "256", "--max-num-seqs", "4", "--prefix-cache-dir", str(tmp_path))
    with serving(*options) as server:
        _, tokens = ask(server)
        ended = threading.Event()

        def keep_busy(n: int) -> None:
            while not ended.is_set():
                try:
                    ask(server, prompt=f"{n} {time.monotonic()} and then", max_tokens=60)
                except httpx.HTTPError:
                    return

        busy = [threading.Thread(target=keep_busy, args=(n,)) for n in range(3)]
        for thread in busy:
            thread.start()
        wait_until_larger(tmp_path, 24 * BLOCK_BYTES)  # oldest first: the blocks of `ask` are among them
        server.process.kill()
        ended.set()
        for thread in busy:
            thread.join()
    with serving(*options) as server:
        cached, again = ask(server)
        assert again == tokens and cached > 32
