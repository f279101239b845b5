"""The prefix cache over a restart: another process hits and says the same, and a file that cannot be used means a cold start."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.notices import without_notices
from tests.storage.test_digests import edit
from tinyvllm import LLM, AsyncLLM, SamplingParams
from tinyvllm.errors import OutputError

PROMPT = "the rules of this shop are these, and they are many: "  # 53 characters, 54 tokens, 3 blocks
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
ELSEWHERE = """
import json, sys
from tinyvllm import LLM, SamplingParams
model, folder, prompt = sys.argv[1:]
with LLM(model, num_blocks=24, prefix_cache_dir=folder) as llm:
    output = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))[0]
print(json.dumps([output.num_cached_tokens, output.outputs[0].token_ids]))
"""


def ask(model: Path, folder: Path, **options: Any) -> tuple[int, list[int]]:
    with LLM(model, prefix_cache_dir=folder, **{"num_blocks": 24} | options) as llm:
        output = llm.generate(PROMPT, GREEDY)[0]
    return output.num_cached_tokens, output.outputs[0].token_ids


def test_another_process_hits_and_says_the_same(tiny_model: Path, tmp_path: Path) -> None:
    cached, tokens = ask(tiny_model, tmp_path)
    assert cached == 0
    words = [sys.executable, "-c", ELSEWHERE, str(tiny_model), str(tmp_path), PROMPT]
    again = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(again.stdout) == [48, tokens]
    with LLM(tiny_model, num_blocks=24, prefix_cache_dir=tmp_path) as llm:  # the answer too, as the next turn of a chat wants it
        prompt = [256, *PROMPT.encode(), *tokens, 32]
        assert llm.generate({"prompt_token_ids": prompt}, GREEDY)[0].num_cached_tokens == 64


def test_many_blocks_come_back_in_pieces(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyvllm.engine.prefix_store._BATCH_BYTES", 3 * 2 * 2 * 2 * 16 * 16 * 4)  # 3 blocks
    prompt = {"prompt_token_ids": [n % 250 for n in range(130)]}  # 8 blocks: the last piece is no whole one
    with LLM(tiny_model, num_blocks=24, prefix_cache_dir=tmp_path) as llm:
        tokens = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
    with LLM(tiny_model, num_blocks=24, prefix_cache_dir=tmp_path) as llm:
        output = llm.generate(prompt, GREEDY)[0]
    assert output.num_cached_tokens == 128 and output.outputs[0].token_ids == tokens


def test_a_smaller_cache_takes_what_it_has_room_for(tiny_model: Path, tmp_path: Path) -> None:
    _, tokens = ask(tiny_model, tmp_path)
    assert ask(tiny_model, tmp_path, num_blocks=6, max_model_len=90) == (0, tokens)  # max_model_len may say what positions mean
    with LLM(tiny_model, num_blocks=24, prefix_cache_dir=tmp_path / "b") as llm:
        llm.generate([{"prompt_token_ids": [n] * 65} for n in range(4)], GREEDY)
    with LLM(tiny_model, num_blocks=6, prefix_cache_dir=tmp_path / "b") as llm:
        assert llm.engine.scheduler.pool.num_cached == 6 and llm.engine.scheduler.pool.num_free == 6


@pytest.mark.parametrize("damage", ["torn", "foreign", "damaged", "no key"])
def test_a_file_that_cannot_be_used_means_a_cold_start(
    tiny_model: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, tokens = ask(tiny_model, tmp_path)
    (path,) = tmp_path.glob("*/prefix.kv")
    content = bytearray(path.read_bytes())
    if damage == "torn":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "foreign":
        path.write_text("a letter to another client")
    elif damage == "damaged":
        content[-1] ^= 1  # of the last block's data; those before it are good
        path.write_bytes(content)
    else:
        path.with_name("key").write_bytes(b"short")
    with caplog.at_level(logging.WARNING, "tinyvllm"):
        assert ask(tiny_model, tmp_path) == (48 if damage == "damaged" else 0, tokens)
    (message,) = without_notices(caplog.messages)
    assert {"torn": "truncated", "foreign": "not a prefix cache", "damaged": "are damaged", "no key": "it starts without blocks"}[
        damage
    ] in message
    assert ask(tiny_model, tmp_path) == (48, tokens)  # it was written again


@pytest.mark.parametrize("other", [{"dtype": "bfloat16"}, {"block_size": 8}, {"max_model_len": 300}], ids=str)
def test_keys_and_values_of_something_else_are_not_taken(
    tiny_model: Path, tmp_path: Path, other: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    ask(tiny_model, tmp_path)
    assert ask(tiny_model, tmp_path, **other)[0] == 0
    assert len(without_notices(caplog.messages)) == 1


def test_other_kernels_are_something_else(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(tiny_model, tmp_path)
    monkeypatch.setenv("TINYVLLM_KERNELS", "attention_decode=ref")
    assert ask(tiny_model, tmp_path)[0] == 0


def test_edited_weights_are_another_model(tiny_model: Path, tmp_path: Path) -> None:
    """One byte of the last tensor, in place, with its time set back: no first byte of a tensor, no size and no time differ."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    _, tokens = ask(model, tmp_path / "kept")
    assert ask(model, tmp_path / "kept") == (48, tokens)
    weights = model / "model.safetensors"
    edit(weights, weights.stat().st_size - 3)
    assert ask(model, tmp_path / "kept")[0] == 0
    assert ask(tiny_model, tmp_path / "kept") == (48, tokens), "the same content, elsewhere"


def test_a_folder_of_others_is_refused(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept").chmod(0o777)
    _, tokens = ask(tiny_model, tmp_path / "kept")
    (message,) = without_notices(caplog.messages)
    assert "will not outlive this process" in message and "put another folder in its place" in message
    caplog.clear()
    assert ask(tiny_model, Path("/dev/null/kept")) == (0, tokens) and len(without_notices(caplog.messages)) == 1


def test_models_share_a_folder(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, tokens = ask(tiny_model, tmp_path)
    assert ask(tiny_model, tmp_path, load_format="dummy")[0] == 0
    assert ask(tiny_model, tmp_path) == (48, tokens)
    assert ask(tiny_model, tmp_path, load_format="dummy")[0] == 48 and not without_notices(caplog.messages)


def test_what_was_cached_is_there_while_the_engine_runs(tiny_model: Path, tmp_path: Path) -> None:
    """As after a kill: the folder is copied before anything is closed."""
    with LLM(tiny_model, num_blocks=24, prefix_cache_dir=tmp_path / "a") as llm:
        tokens = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
        while (pause := llm.engine.on_idle()) is not None:
            time.sleep(pause)
        llm.engine._store._journal.close()
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        assert [path.name for path in tmp_path.glob("b/*/*.kv")] == ["recent-1.kv"]
    assert [path.name for path in tmp_path.glob("a/*/*.kv")] == ["prefix.kv"]
    assert ask(tiny_model, tmp_path / "b") == (48, tokens)


def test_an_idle_engine_writes_by_itself(tiny_model: Path, tmp_path: Path) -> None:
    async def generate(llm: AsyncLLM) -> None:
        async for _ in llm.generate(PROMPT, GREEDY):
            pass
        for _ in range(2400):
            if sum(path.stat().st_size for path in tmp_path.glob("*/recent-1.kv")) > 4 * 8192:  # all four blocks
                return
            await asyncio.sleep(0.05)
        raise AssertionError("nothing was written")

    llm = AsyncLLM(tiny_model, num_blocks=24, prefix_cache_dir=tmp_path)
    try:
        asyncio.run(generate(llm))
    finally:
        llm.close()


def test_a_disk_that_fails_while_the_engine_runs_is_said_once(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*given: Any) -> None:
        raise OutputError("prefix cache: no space left")

    monkeypatch.setattr("tinyvllm.cache.journal.append", full)
    with caplog.at_level(logging.WARNING, "tinyvllm"), LLM(tiny_model, num_blocks=24, prefix_cache_dir=tmp_path) as llm:
        tokens = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
        for n in range(3):
            llm.generate({"prompt_token_ids": [n] * 40}, GREEDY)
            while (pause := llm.engine.on_idle()) is not None:
                time.sleep(pause)
    (message,) = without_notices(caplog.messages)
    assert "not written any more while the engine runs: prefix cache: no space left" in message
    assert ask(tiny_model, tmp_path) == (48, tokens)
