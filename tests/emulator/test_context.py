"""Ranks that divide contexts on emulated GPUs, one a process: the bits of one GPU, and how they end."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.emulator.driver import Driver
from tests.emulator.rank import PEERS, on_gpus
from tests.engine.test_pipeline_parallel import results
from tests.engine.test_tensor_parallel import GOLDEN, alive, run_on, start
from tinyvllm import LLM, SamplingParams
from tinyvllm.backends import registry
from tinyvllm.config.engine import resolve
from tinyvllm.engine.frontend import plan_engine
from tinyvllm.errors import ArgumentError, RankError
from tinyvllm.runner import grid

OPTIONS: dict[str, Any] = dict(
    device="CUDA", dtype="float16", skip_tokenizer_init=True, max_model_len=600, max_num_seqs=4, max_num_batched_tokens=256, seed=0
)
PROMPTS = [{"prompt_token_ids": np.random.default_rng(n).integers(3, 250, n).tolist()} for n in (300, 40, 530)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, seed=7, max_tokens=6, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2),
]
TWICE = SamplingParams(n=2, temperature=0.9, seed=2, max_tokens=3, ignore_eos=True)
LAUNCHES = ("attention_decode_ranks", "merge_ranks", "gather_blocks", "own_rows", "gather_rows")


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with on_gpus(8, seed=3, races=False) as driver:
        registry.forget_choices()
        yield driver


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A golden model with heads of 32, half as many, that takes longer contexts."""

    @functools.cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name) / name
        shutil.copytree(GOLDEN / name, folder)
        config = json.loads((folder / "config.json").read_text())
        for key in ("num_attention_heads", "num_key_value_heads", "n_head"):
            config |= {key: config[key] // 2} if key in config and config.get("head_dim", 16) != 32 else {}
        config |= {"head_dim": 32} if "head_dim" in config else {}
        config |= {"max_position_embeddings": 1 << 15} if name != "gpt2" else {}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def open_ranks(folder: Path, size: int, **options: Any) -> LLM:
    """With a KV cache of the same number of tokens, whatever the size."""
    blocks = 2048 // (256 * size if size > 1 else 16)
    return LLM(folder, context_parallel_size=size, **{**OPTIONS, "num_blocks": blocks, **options})


def answers(folder: Path, size: int, **options: Any) -> dict[str, Any]:
    """Prompts in chunks next to decodes, a prefix from the cache, two answers to one prompt, and logits."""
    with open_ranks(folder, size, **options) as llm:
        found: dict[str, Any] = {"together": results(llm.generate(PROMPTS, PARAMS))}
        (again,) = llm.generate(PROMPTS[2:], PARAMS[2])
        assert again.num_cached_tokens == {1: 528, 2: 512}.get(size, 0), "whole blocks"
        found["cached"] = results([again])
        found["forks"] = [one.token_ids for one in llm.generate(PROMPTS[0], TWICE)[0].outputs]
        found["logits"] = llm.prompt_logits(PROMPTS[2]["prompt_token_ids"])[-3:]
    return found


@functools.cache
def of_one(folder: Path, **options: Any) -> dict[str, Any]:
    return answers(folder, 1, **options)


def compare(got: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in got.items():
        np.testing.assert_equal(value, expected[name], err_msg=name)


def test_ranks_have_the_bits_of_one_gpu(model: Callable[[str], Path], driver: Driver) -> None:
    folder = model("mistral")  # with a window that contexts outgrow
    expected, before = of_one(folder), len(driver.launched)
    compare(answers(folder, 2), expected)
    ran = driver.launched[before:]
    assert all(stem in ran for stem in LAUNCHES)
    assert not {"attention_decode", "attention_decode_team"} & {*ran}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("llama3.1", 2, {}),
        ("mistral", 4, {}),
        ("llama3.1", 4, {"kv_cache_dtype": "int8"}),
        ("llama3.1", 2, {"kv_cache_dtype": "int4", "quantization": "q8_0"}),
        ("llama3.1", 2, {"kv_cache_dtype": "fp8"}),
        ("qwen3", 2, {"dtype": "bfloat16"}),
        ("gpt-oss", 2, {}),
        ("mixtral", 2, {}),
        ("llama3.1", 8, {}),
        ("llama3.1", 2, {"pipeline_parallel_size": 2}),
    ],
    ids=str,
)
def test_other_models_and_ways(name: str, size: int, options: dict[str, Any], model: Callable[[str], Path], driver: Driver) -> None:
    alone = {key: value for key, value in options.items() if not key.endswith("_parallel_size")}
    compare(answers(model(name), size, **options), of_one(model(name), **alone))


@pytest.mark.long
def test_tensor_and_context_parallel_together(model: Callable[[str], Path], driver: Driver) -> None:
    """The bits of two GPUs that divide the matrices."""
    folder, options = model("qwen3"), {"tensor_parallel_size": 2}
    compare(answers(folder, 2, **options), answers(folder, 1, **options))


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_ops_without_kernels(name: str, model: Callable[[str], Path], driver: Driver) -> None:
    """Layers that tinygrad computes, whose sums depend on the number of rows: nearly the same."""
    prompts = [{"prompt_token_ids": prompt["prompt_token_ids"][:200]} for prompt in PROMPTS[::2]]
    found = []
    for size in (1, 2):
        with open_ranks(model(name), size, max_model_len=256) as llm:
            tokens = [one.outputs[0].token_ids for one in llm.generate(prompts, PARAMS[0])]
            found.append((tokens, llm.prompt_logits(prompts[1]["prompt_token_ids"])))
    (expected, of_one_gpu), (tokens, logits) = found
    assert tokens == expected
    np.testing.assert_allclose(logits, of_one_gpu, atol=0.02)


@pytest.mark.parametrize("why", ["none", pytest.param("rounds", marks=pytest.mark.long)])
def test_places(why: str, model: Callable[[str], Path], driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the host's memory, where GPUs do not reach each other's; and so small that sequences take turns and blocks come in rounds."""
    if why == "none":
        monkeypatch.setenv(PEERS, why)
        monkeypatch.setattr(driver, "_peers", why)
    else:
        monkeypatch.setattr(grid, "CUDA_PLACE", 4096)  # a piece of a block, or the results of one sequence of the longest
        monkeypatch.setattr(grid, "CUDA_RESULTS", 1)
    folder, before = model("mistral"), len(driver.launched)
    expected, longest = of_one(folder), 600 if why == "none" else 20_000
    with open_ranks(folder, 2, max_model_len=longest, num_blocks=4 if why == "none" else 40) as llm:
        assert results(llm.generate(PROMPTS, PARAMS)) == expected["together"]
    assert (driver.launched[before:].count("merge_ranks") > 40) == (why == "rounds")


@pytest.mark.parametrize("sent", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_a_rank_that_ends_or_hangs_ends_the_engine(sent: signal.Signals, model: Callable[[str], Path], driver: Driver) -> None:
    with open_ranks(model("llama3.1"), 2) as llm:
        (pid,) = start(llm)
        os.kill(pid, sent)
        with pytest.raises(RankError, match=r"rank 1 \(process \d+\) (ended with code -9|hangs)"):
            run_on(llm)
    assert not alive(pid)


def test_a_plan_counts_what_each_gpu_holds(model: Callable[[str], Path], driver: Driver) -> None:
    """A part of every block, all weights, and one layer of the other's blocks, for rows of prompts."""
    config = resolve(str(model("llama3.1")), **{**OPTIONS, "num_blocks": 8, "context_parallel_size": 2})
    sizes = plan_engine(config, speed=False).sizes
    one, two = sizes.ranks
    assert one.kv_token == two.kv_token and two.weights < one.weights < 2 * two.weights, "the head is rank 0's"


def test_what_is_refused(model: Callable[[str], Path], driver: Driver) -> None:
    with pytest.raises(ArgumentError, match="context_parallel_size=2 runs on the CPU and on CUDA, and ranks have the first GPUs"):
        LLM(model("llama3.1"), context_parallel_size=2, **{**OPTIONS, "device": "CUDA:1"})
    with pytest.raises(ArgumentError, match="enable_lora does not work with context_parallel_size=2 yet"):
        LLM(model("llama3.1"), context_parallel_size=2, enable_lora=True, **OPTIONS)
