"""Context parallelism on the CPU, alone and with the other two ways: the tokens and log-probabilities of one process, and contexts that no
rank's share holds.
"""

from __future__ import annotations

import functools
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.test_kernels import kernels
from tests.engine.test_pipeline_parallel import results
from tests.engine.test_tensor_parallel import GOLDEN, PARAMS, alive, run_on, start, wide_description
from tinyvllm import LLM, SamplingParams
from tinyvllm.distributed import ranks
from tinyvllm.errors import KernelError, RankError, RequestError
from tinyvllm.request import BeamSearchParams

LENGTHS = (500, 600, 300, 900)
LONG = [{"prompt_token_ids": np.random.default_rng(n).integers(3, 3000, n).tolist()} for n in LENGTHS]
TO_THE_END = SamplingParams(temperature=0.8, seed=5, max_tokens=30, ignore_eos=True, logprobs=1)
SEVERAL = SamplingParams(n=2, temperature=0.9, seed=2, max_tokens=12, ignore_eos=True)
POOL_TOKENS = 2048


def open_ranks(size: int, **options: Any) -> LLM:
    """With a KV cache of the same number of tokens, whatever the size."""
    blocks = POOL_TOKENS // (256 * size if size > 1 else 16)
    given: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 4, "num_blocks": blocks, "speculative_config": "off"} | options
    return LLM(device="CPU", context_parallel_size=size, **given)


@functools.cache
def answers(size: int, **options: Any) -> dict[str, Any]:
    """Tokens and log-probabilities with all their bits: prompts in chunks of 200 tokens, and a cache that does not hold all four."""
    with open_ranks(size, max_num_batched_tokens=200, **options) as llm:
        found = {"greedy and seeded": results(llm.generate(LONG, PARAMS))}
        outputs = llm.generate(LONG[:3], TO_THE_END)
        (again,) = llm.generate(LONG[1:2], TO_THE_END)
        found |= {"seeded": results(outputs), "cached": results([again])}
        assert again.num_cached_tokens == (592 if size == 1 else 512 if size == 2 else 0), "whole blocks"
        found["forks"] = [one.token_ids for one in llm.generate(LONG[1:2], SEVERAL)[0].outputs]
        found["beams"] = [one.token_ids for one in llm.beam_search(LONG[1], BeamSearchParams(2, 6))[0].outputs]
        found["scored"] = llm.prompt_logits(LONG[1]["prompt_token_ids"])
        if "tensor_parallel_size" not in options:
            found["embedding"] = llm.embed(LONG[2])
    return found


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {}),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (4, {}),
                (2, {"kv_cache_dtype": "int8"}),
                (4, {"kv_cache_dtype": "int4"}),
                (2, {"kv_cache_dtype": "fp8", "quantization": "q8_0"}),
                (2, {"quantization": "q4_k_m"}),
                (2, {"quantization": "mxfp4"}),
                (2, {"tensor_parallel_size": 2}),
                (2, {"tensor_parallel_size": 2, "quantization": "q4_k", "kv_cache_dtype": "int8"}),
                (2, {"tensor_parallel_size": 4, "quantization": "q8_0"}),
                (4, {"tensor_parallel_size": 2}),
                (2, {"pipeline_parallel_size": 2}),
                (2, {"pipeline_parallel_size": 3, "quantization": "q4_k_m"}),
                (2, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
            )
        ),
    ],
)
def test_ranks_have_the_bits_of_one_process(size: int, options: dict[str, Any]) -> None:
    expected, got = answers(1, **alone(options)), answers(size, **options)
    for name, value in got.items():
        np.testing.assert_equal(value, expected[name], err_msg=name)


def alone(options: dict[str, Any]) -> dict[str, Any]:
    """The same options of one process."""
    return {name: value for name, value in options.items() if not name.endswith("_parallel_size")}


@pytest.mark.parametrize("way", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_grid_of_four_ranks(way: str) -> None:
    """A prompt in chunks, a prefix hit, greedy and seeded rows in one batch; then a rank is killed that is no neighbour of rank 0."""
    expected = answers(1)
    with open_ranks(2, max_num_batched_tokens=200, **{way: 2}) as llm:
        assert results(llm.generate(LONG[:2], PARAMS[:2])) == expected["greedy and seeded"][:2]
        (again,) = llm.generate(LONG[1:2], TO_THE_END)
        assert again.num_cached_tokens == 512 and results([again]) == expected["cached"]
        np.testing.assert_array_equal(llm.prompt_logits(LONG[1]["prompt_token_ids"]), expected["scored"])
        pids = start(llm)
        os.kill(pids[2], signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank 3 \(process \d+\) ended with code -9"):
            run_on(llm)
    assert len(pids) == 3 and not any(alive(pid) for pid in pids)


@pytest.mark.long
@pytest.mark.parametrize("way", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize(("rank", "sent"), [(1, signal.SIGKILL), (2, signal.SIGKILL), (2, signal.SIGSTOP), (3, signal.SIGSTOP)])
def test_any_rank_of_a_grid_ends_the_engine(way: str, rank: int, sent: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_ranks(2, **{way: 2}) as llm:
        pids = start(llm)
        monkeypatch.setattr(ranks, "SILENT_SECONDS", 2.0)
        os.kill(pids[rank - 1], sent)
        reason = "ended with code -9" if sent == signal.SIGKILL else r"hangs: no heartbeat for \d+ s"
        for _ in range(2):
            with pytest.raises(RankError, match=rf"rank {rank} \(process \d+\) {reason}"):
                run_on(llm)
    assert not any(alive(pid) for pid in pids)


@pytest.mark.long
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_pass_on_the_side_of_steps_in_flight(tensor: int) -> None:
    """All ranks of the last stage run it before the steps that were announced earlier, as rank 0 does: their kernels meet."""
    tokens = LONG[2]["prompt_token_ids"]
    with open_ranks(1) as llm:
        expected, logits = results(llm.generate(LONG[:2], TO_THE_END)), llm.prompt_logits(tokens)
    with open_ranks(2, pipeline_parallel_size=2, tensor_parallel_size=tensor, num_blocks=8) as llm:
        for number, prompt in enumerate(LONG[:2]):
            llm.engine.add(f"{number}", prompt["prompt_token_ids"], TO_THE_END)
        finished: dict[str, Any] = {}
        for turn in range(200):
            finished |= {output.request_id: output for output in llm.engine.step() if output.finished}
            if turn in (3, 12):
                assert llm.engine.loop.in_flight
                np.testing.assert_array_equal(llm.prompt_logits(tokens), logits)
        assert results([finished["0"], finished["1"]]) == expected


def test_a_context_fits_that_no_share_holds() -> None:
    """Two ranks with room for 768 tokens each hold a sequence of 900, which one process with a cache of as many bytes refuses; of two
    sequences that outgrow the cache together one is preempted.
    """
    few = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompts = [LONG[3], LONG[0], {"prompt_token_ids": LONG[0]["prompt_token_ids"][::-1]}]
    with open_ranks(1) as llm:
        expected = results(llm.generate(prompts, few))
    with open_ranks(1, num_blocks=48) as llm:
        share = llm.engine.runner.pool.num_blocks * llm.engine.runner.pool.block_bytes
        with pytest.raises(RequestError, match="48 of 16 tokens"):
            llm.generate(LONG[3], few)
    with open_ranks(2, num_blocks=3) as llm:
        pool = llm.engine.runner.pool
        assert (pool.num_blocks * pool.block_bytes, pool.layers[0].S, pool.block_size) == (share, 256, 512)
        outputs = llm.generate(prompts, few)
        assert results(outputs) == expected
        assert sum(output.metrics.preemptions for output in outputs), "the case is of no use"


def test_a_rank_that_is_killed_ends_the_engine() -> None:
    with open_ranks(2) as llm:
        (pid,) = start(llm)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank 1 \(process \d+\) ended with code -9"):
            run_on(llm)
    assert not alive(pid)


def test_the_reference_is_refused() -> None:
    with pytest.raises(KernelError, match="no kernel stores a rank's part of keys and values; leave TINYVLLM_KERNELS out"), kernels("ref"):
        open_ranks(2)


FAMILIES = ("deepseek2", "gemma2", "gemma3", "glm4moe", "gpt-oss", "gpt2", "granite", "mixtral", "olmo2", "phi3", "qwen3")


def wider(name: str, folder: Path) -> Path:
    """The description of a golden model with heads that have kernels, and contexts of several partitions; its weights are random."""
    folder.mkdir()
    config = json.loads((GOLDEN / name / "config.json").read_text())
    heads, width = ("n_head", "n_embd") if name == "gpt2" else ("num_attention_heads", "hidden_size")
    narrow = config.get("head_dim") or config[width] // config[heads]
    if narrow < 32 and "kv_lora_rank" not in config:
        config |= {"head_dim": 32} if config.get("head_dim") else {width: 32 * config[heads]}
    config["n_positions" if name == "gpt2" else "max_position_embeddings"] = 1024
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def family_answers(path: Path, **sizes: int) -> list[Any]:
    options: dict[str, Any] = {"max_model_len": 720, "max_num_batched_tokens": 250, "max_num_seqs": 2, "kv_memory": "8MiB"}
    options |= {"load_format": "dummy", "skip_tokenizer_init": True, "speculative_config": "off"}
    with LLM(path, device="CPU", **options, **sizes) as llm:
        prompts = [{"prompt_token_ids": [5 + i % 70 for i in range(700)]}, {"prompt_token_ids": [7, 9, 11]}]
        return results(llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2)))


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_the_bits_of_one_process(name: str, tmp_path: Path) -> None:
    """Windows, sinks, caps, latents, experts, norms of outputs, and learned positions."""
    path = wider(name, tmp_path / name)
    expected = family_answers(path)
    for stages in (1, 2):
        assert family_answers(path, context_parallel_size=2, pipeline_parallel_size=stages) == expected


@pytest.mark.long
@pytest.mark.parametrize("name", ["deepseek2", "gemma3", "gpt-oss", "mixtral", "olmo2"])
def test_a_family_in_a_grid(name: str, tmp_path: Path) -> None:
    """Rows of prompts are divided among ranks with the same weights, and the experts of these rows among the others."""
    path = wide_description(name, tmp_path / name)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    assert family_answers(path, context_parallel_size=2, tensor_parallel_size=2) == family_answers(path)


def test_heads_without_kernels_are_refused() -> None:
    with pytest.raises(KernelError, match="kernel supports head dimension from 32 to 512; the model has 16"):
        LLM(GOLDEN / "llama3", device="CPU", context_parallel_size=2, skip_tokenizer_init=True, max_model_len=64)
