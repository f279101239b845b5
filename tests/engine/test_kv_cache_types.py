"""The promise within each type of packed KV cache: a request has the same tokens alone, in a batch, in chunks, from the prefix cache, after
a preemption, in a fork, with several steps a round, and from the folder of an earlier process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tinygrad import dtypes

from tinyvllm import LLM, SamplingParams
from tinyvllm.backends import registry
from tinyvllm.cli import main
from tinyvllm.config.engine import KV_CACHE_DTYPES, resolve
from tinyvllm.errors import ArgumentError
from tinyvllm.models.config import Latent
from tinyvllm.runner.kv import BlockShape

PACKED = KV_CACHE_DTYPES[1:]
COUNT, LONG = 6, 9
SHARED = 48  # tokens that all prompts begin with: three blocks


def prompt(i: int) -> list[int]:
    common, own = np.random.default_rng(0), np.random.default_rng(100 + i)
    return [0, *common.integers(10, 3000, SHARED - 1).tolist(), *own.integers(10, 3000, 2 + 7 * i).tolist()]


def params(i: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=LONG, ignore_eos=True, **more)


def load(kv_cache_dtype: str, **options: Any) -> LLM:
    options = {"max_num_batched_tokens": 512, "num_blocks": 60, "max_num_seqs": 8, "enable_prefix_caching": False} | options
    return LLM(device="CPU", max_model_len=128, kv_cache_dtype=kv_cache_dtype, **options)


def tokens(llm: LLM, numbers: list[int], **more: Any) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt(i)} for i in numbers], [params(i, **more) for i in numbers])
    return [part.token_ids for output in outputs for part in output.outputs]


@pytest.fixture(scope="module", params=PACKED)
def alone(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[list[int]]]]:
    """A type, and the tokens of each request by itself, on kernels."""
    registry.forget_choices()
    with load(request.param) as llm:
        assert llm.engine.runner.pool.block.packed is not None
        found = [tokens(llm, [i])[0] for i in range(COUNT)]
        assert "ref" not in {choice.variant for choice in registry.choices()}
        assert tokens(llm, list(range(COUNT))) == found, "together"
        assert tokens(llm, [3], n=3) == [tokens(llm, [3], n=1)[0]] * 3, "forks of a greedy request"
        yield request.param, found


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16, "num_scheduler_steps": 4},
        {"enable_prefix_caching": True, "max_num_batched_tokens": 32, "async_scheduling": True},
        {"num_blocks": 13, "preemption_mode": "recompute"},
        {"num_blocks": 13, "preemption_mode": "swap", "swap_space": "4MB"},
    ],
    ids=["chunks and rounds", "prefix cache", "recompute", "swap"],
)
def test_same_tokens(alone: tuple[str, list[list[int]]], options: dict[str, Any]) -> None:
    kind, expected = alone
    with load(kind, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt(i)} for i in range(COUNT)], [params(i) for i in range(COUNT)])
        assert [output.outputs[0].token_ids for output in outputs] == expected
        scheduler, mode = llm.engine.scheduler, options.get("preemption_mode")
        assert bool(sum(output.metrics.preemptions for output in outputs)) == (mode is not None), "the test is meant to preempt"
        assert bool(scheduler.num_swaps) == (mode == "swap")
        if options.get("enable_prefix_caching"):
            before = scheduler.prefix.hits
            assert tokens(llm, list(range(COUNT))) == expected
            assert scheduler.prefix.hits >= before + COUNT * SHARED - 16


def test_a_folder_restores_its_own_type_only(alone: tuple[str, list[list[int]]], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kind, expected = alone
    folder: dict[str, Any] = {"prefix_cache_dir": str(tmp_path), "enable_prefix_caching": True}
    with load(kind, **folder) as llm:
        tokens(llm, [0])
    other = PACKED[PACKED.index(kind) - 1]
    caplog.clear()
    with load(kind, **folder) as llm:
        (output,) = llm.generate({"prompt_token_ids": prompt(0)}, params(0))
        assert output.num_cached_tokens == SHARED and output.outputs[0].token_ids == expected[0]
    assert "prefix cache" not in caplog.text
    with load(other, **folder) as llm:
        (output,) = llm.generate({"prompt_token_ids": prompt(0)}, params(0))
        assert output.num_cached_tokens == 0
    (line,) = [record.message for record in caplog.records if "prefix cache" in record.message]
    assert "starts with 0 blocks" in line and "in another dtype or layout" in line


def test_names_of_types() -> None:
    assert resolve(kv_cache_dtype="fp8").kv_cache_dtype == "fp8_e4m3" and resolve().kv_cache_dtype == "auto"
    for name, hint in {
        "q8_0": "nearest: int8",
        "q4_0": "nearest: int4",
        "fp8_e5m2": "nearest: fp8_e4m3",
        "int44": "did you mean 'int4'",
    }.items():
        with pytest.raises(ArgumentError, match=f"kv_cache_dtype must be one of auto, fp8_e4m3, int8, int4, got '{name}'.*{hint}"):
            resolve(kv_cache_dtype=name)


@pytest.mark.parametrize("option", ["-ctk", "--cache-type-v"])
def test_llama_cpps_options_name_the_nearest(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", option, "q8_0", "--prompt", "x"]) == 2
    error = capsys.readouterr().err
    assert "--kv-cache-dtype" in error and "int8 is nearest to q8_0" in error


def test_heads_that_cannot_be_packed() -> None:
    config: Any = SimpleNamespace(n_kv_heads=2, head_dim=20, num_blocks=1, latent=None)
    assert BlockShape.of(config, 16, "int8", dtypes.bfloat16).nbytes == 2 * 2 * 16 * 22
    with pytest.raises(ArgumentError, match="int4 packs heads in multiples of 8 numbers; the model's heads have 20: use auto"):
        BlockShape.of(config, 16, "int4", dtypes.bfloat16)


def test_latents_are_stored_once_and_not_packed() -> None:
    config: Any = SimpleNamespace(n_kv_heads=1, head_dim=576, num_blocks=1, latent=Latent(512, 128, 128))
    assert BlockShape.of(config, 16, "auto", dtypes.bfloat16).nbytes == 16 * 576 * 2
    with pytest.raises(ArgumentError, match="int8 does not pack the latents of multi-head latent attention: use auto"):
        BlockShape.of(config, 16, "int8", dtypes.bfloat16)
