"""Cached prefixes and API keys: apart by default in memory, in flight and on disk; and what `explain` shows over HTTP."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import Running, running
from tinyvllm.cli import main
from tinyvllm.cli.serve import ready_line
from tinyvllm.server.core.config import ServerConfig
from tinyvllm.server.core.keys import read_keys

SMALL = {"max_num_seqs": 4, "num_blocks": 64, "max_model_len": 256}
SECRET = [65 + i % 26 for i in range(100)]  # 6 blocks of 16 tokens, and 4
KEYS = ["sk-alice", "sk-bob"]


def config_of(**more: Any) -> ServerConfig:
    return ServerConfig(port=0, access_log=False, **more)


def ask(server: Running, key: str | None, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, **more}
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    answer = httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(server: Running, key: str | None, prompt: list[int], **more: Any) -> int:
    return int(ask(server, key, prompt, **more)["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_each_key_has_its_own_prefixes_and_explain_shows_no_other() -> None:
    with running(config_of(), {"demo": SMALL}, read_keys(KEYS)) as server:
        assert cached(server, "sk-alice", SECRET) == 0 and cached(server, "sk-alice", SECRET) == 96
        assert cached(server, "sk-bob", SECRET) == 0, "another key measures nothing"
        assert cached(server, "sk-alice", SECRET, cache_salt="mine") == 0, "a salt divides the prefixes of a key further"
        assert cached(server, "sk-alice", SECRET, cache_salt="mine") == 96
        assert cached(server, "sk-bob", SECRET, cache_salt="mine") == 0, "and is not shared between keys"
        other = [40 + i % 26 for i in range(32)]
        assert cached(server, "sk-alice", other) == 0
        explanation = ask(server, "sk-bob", [*other[:8], *[9] * 24], explain=True)["explanation"]
        assert "diverged at token 0: " in explanation, "compared with bob's own prompt alone"
        explanation = ask(server, "sk-alice", [*other[:8], *[9] * 24], explain=True)["explanation"]
        assert "0 of 2 blocks hit, 0 were evicted; diverged at token 8: " in explanation and " vs '" in explanation


def test_requests_of_two_keys_do_not_wait_for_each_others_blocks() -> None:
    """The prefixes in flight are told apart by the same salt."""
    with running(config_of(), {"demo": SMALL}, read_keys(KEYS)) as server:
        found: dict[str, int] = {}

        def send(key: str) -> None:
            found[key] = cached(server, key, SECRET)

        threads = [threading.Thread(target=send, args=(key,)) for key in KEYS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == {"sk-alice": 0, "sk-bob": 0}


def test_shared_prefixes_are_shared_but_not_shown() -> None:
    with running(config_of(share_prefixes=True), {"demo": SMALL}, read_keys(KEYS)) as server:
        assert cached(server, "sk-alice", SECRET) == 0 and cached(server, "sk-bob", SECRET) == 96
        explanation = ask(server, "sk-bob", [*SECRET[:90], *[9] * 24], explain=True)["explanation"]
        assert explanation == "5 of 7 blocks hit, 0 were evicted", "counts, but neither text nor the position of a difference"


def test_a_server_without_keys_shows_no_prompt() -> None:
    with running(config_of(), {"demo": SMALL}) as server:
        assert cached(server, None, SECRET) == 0 and cached(server, None, SECRET) == 96
        explanation = ask(server, None, [*SECRET[:90], *[9] * 24], explain=True)["explanation"]
        assert explanation == "5 of 7 blocks hit, 0 were evicted"


def test_prefixes_on_disk_belong_to_a_secret_and_not_to_a_name(tmp_path: Path) -> None:
    specs = {"demo": {**SMALL, "prefix_cache_dir": str(tmp_path)}}
    with running(config_of(), specs, read_keys(["sk-alice"])) as server:
        assert cached(server, "sk-alice", SECRET) == 0
    with running(config_of(), specs, read_keys(["sk-mallory", "sk-alice"])) as server:  # mallory is now key-1, as alice was
        explanation = ask(server, "sk-mallory", [*SECRET[:90], *[9] * 24], explain=True)["explanation"]
        assert explanation == "0 of 7 blocks hit, 0 were evicted"
        assert cached(server, "sk-alice", SECRET) == 96


def test_shared_prefixes_need_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--share-prefixes"]) == 2
    assert "--share-prefixes is for API keys, and there are none" in capsys.readouterr().err


def test_sharing_is_named_at_start() -> None:
    assert "share" not in ready_line("http://h", ["a", "b"], 1.25, config_of())
    line = ready_line("http://h", ["a"], 1.25, config_of(share_prefixes=True))
    assert "API keys share cached prefixes (--share-prefixes)" in line
