"""A server that is killed and restarted: its prefix cache is restored, and it gives the same answers."""

from __future__ import annotations

import itertools
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
    cached, tokens, _ = ask_and_count(server, **changed)
    return cached, tokens


def ask_and_count(server: Server, **changed: object) -> tuple[int, list[int], int]:
    """(cached tokens, tokens of the answer, bytes of the blocks that it has filled)"""
    said = httpx.post(f"{server.url}/v1/completions", json={**ASKED, **changed}, timeout=60, trust_env=False).json()
    usage = said["usage"]
    cached, blocks = usage["prompt_tokens_details"]["cached_tokens"], (usage["total_tokens"] - 1) // 16  # the last token is not computed
    return cached, said["choices"][0]["token_ids"], (blocks - cached // 16) * BLOCK_BYTES


def written(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/recent-*.kv"))


def wait_until_larger(folder: Path, size: int) -> None:
    ends = time.monotonic() + 120
    while written(folder) < size:
        assert time.monotonic() < ends, f"{written(folder)} bytes are written, expected {size}"
        time.sleep(0.05)


def test_an_idle_server_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    options = ("--num-blocks", "256", "--max-num-seqs", "4", "--prefix-cache-dir", str(tmp_path))
    with serving(*options) as server:
        cached, tokens, filled = ask_and_count(server)
        assert cached == 0 and filled > 2 * BLOCK_BYTES
        wait_until_larger(tmp_path, filled)
    assert not list(tmp_path.glob("*/prefix.kv")), "it was killed"
    with serving(*options) as server:
        cached, again = ask(server)
        assert again == tokens and cached > 32
        size = written(tmp_path)
        _, _, more = ask_and_count(server, prompt="Another story. " * 20)
        wait_until_larger(tmp_path, size + more)  # the oldest first: what is on disk would come before
        assert written(tmp_path) < size + more + BLOCK_BYTES, "what is on disk is not written again"


def test_a_busy_server_that_is_killed_keeps_older_blocks(tmp_path: Path) -> None:
    options = ("--num-blocks", "256", "--max-num-seqs", "4", "--prefix-cache-dir", str(tmp_path))
    with serving(*options) as server:
        _, tokens = ask(server)
        ended, turns = threading.Event(), itertools.count()

        def keep_busy(n: int) -> None:
            while not ended.is_set():
                try:
                    ask(server, prompt=f"{n} {next(turns)} and then", max_tokens=60)
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
