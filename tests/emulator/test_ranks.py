"""Ranks on emulated GPUs, one a process: their tokens, how they end, and what is refused."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinygrad.helpers import USE_TC

from tests.emulator.driver import Driver
from tests.emulator.rank import PEERS, on_gpus
from tests.engine.drafting import Fixed, Oracle, Scripted
from tests.engine.test_tensor_parallel import EXPERTS, GOLDEN, alive, run_on, start
from tests.models.test_expert_adapters import LATENT, experts_of
from tests.tiny.adapters import ATTENTION, write_adapter
from tests.tiny.wide import with_wide_experts
from tinyvllm import LLM, LoRARequest, SamplingParams
from tinyvllm.backends import registry
from tinyvllm.config.engine import DEFAULT_MODEL as MODEL
from tinyvllm.config.engine import resolve
from tinyvllm.engine.frontend import plan_engine
from tinyvllm.errors import ArgumentError, ModelError, RankError
from tinyvllm.runner import grid

OPTIONS: dict[str, Any] = dict(max_model_len=64, max_num_seqs=4, seed=0, num_blocks=16)
TEXTS = ["Once upon a time", "Hello! How are you?", "7 + 5 ="]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with on_gpus(4, seed=3, races=False) as driver:
        registry.forget_choices()
        yield driver


def tokens(llm: LLM, prompts: Any = TEXTS, params: Any = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def expected(driver: Driver) -> list[list[int]]:
    with LLM(MODEL, device="CUDA", **OPTIONS) as one:
        return tokens(one)


@pytest.mark.parametrize("name", [pytest.param("tensor"), pytest.param("context", marks=pytest.mark.long)])
def test_drafts_change_no_token(name: str, driver: Driver) -> None:
    """Drafts of half of the next tokens: rows that the ranks compute together, and that rank 0 draws."""
    sizes, params = {f"{name}_parallel_size": 2}, SamplingParams(temperature=0.7, seed=5, max_tokens=10, ignore_eos=True)
    with LLM(MODEL, device="CUDA", **OPTIONS | ({"num_blocks": 4} if name == "context" else {}), speculative_config="off", **sizes) as llm:
        alone = llm.generate(TEXTS, params)
        controller = Fixed(3)
        llm.engine.speculate(Scripted(Oracle(alone).half_right), controller)
        drafted = llm.generate(TEXTS, params)
    assert [one.outputs[0].token_ids for one in drafted] == [one.outputs[0].token_ids for one in alone] and controller.accepted > 3


@pytest.mark.long
def test_a_draft_model_is_whole_on_the_first_gpu(driver: Driver) -> None:
    options, config = {**OPTIONS, "tensor_parallel_size": 2}, {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 2}
    with LLM(MODEL, device="CUDA", **options, speculative_config="off") as llm:
        alone = tokens(llm)
    with LLM(MODEL, device="CUDA", **options, speculative_config=config) as llm:
        drafted = llm.generate(TEXTS, GREEDY)
    assert [one.outputs[0].token_ids for one in drafted] == alone and any(one.metrics.accepted_tokens for one in drafted)


@pytest.mark.parametrize("name", ["tensor", "pipeline"])
def test_greedy_tokens_are_those_of_one_gpu(name: str, expected: list[list[int]], driver: Driver) -> None:
    before, divides = len(driver.launched), name == "tensor"
    with LLM(MODEL, device="CUDA", **OPTIONS, **{f"{name}_parallel_size": 2}) as llm:
        assert tokens(llm) == expected
        runner, whole = llm.engine.runner, 6
        assert len(runner.model.blk) == (whole if divides else whole // 2)
        assert 2 * runner.pool.block_bytes == runner.block_bytes
    ran = driver.launched[before:]
    assert (ran.count("all_reduce") > 0 and ran.count("all_reduce") % (2 * whole) == 0) == divides
    assert ("gather_logits" in ran) == divides and "norm_head" in ran


def test_gpus_meet_in_each_others_memory(driver: Driver) -> None:
    """Each has memory of its own there and maps the other's, and only the page with the word that ends all waiting is the host's."""
    gc.collect()  # engines of other tests
    before, opened = {*driver.pinned}, driver.counts["cuIpcOpenMemHandle_v2"]
    with LLM(MODEL, device="CUDA", tensor_parallel_size=2, **OPTIONS) as llm:
        tokens(llm, TEXTS[:1])
        assert driver.counts["cuIpcOpenMemHandle_v2"] == opened + 1 and len(driver.imported) == len(driver._shared) == 1
        assert 4096 in [driver.pinned[start].nbytes for start in {*driver.pinned} - before]
    del llm
    gc.collect()
    assert not driver.imported and not driver._shared, "what is mapped is let go of with the engine"


@pytest.mark.parametrize("why", ["none", "lost", "lost by one", pytest.param("switched off", marks=pytest.mark.long)])
def test_gpus_that_do_not_reach_each_other_meet_in_the_hosts_memory(
    why: str, expected: list[list[int]], driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, also where one alone finds that numbers do not arrive."""
    if why == "switched off":
        monkeypatch.setenv("TINYVLLM_PEER_ACCESS", "0")
    else:
        monkeypatch.setenv(PEERS, why.split()[0])
        monkeypatch.setattr(driver, "_peers", "reached" if why == "lost by one" else why)
    gc.collect()
    before = {*driver.pinned}
    with LLM(MODEL, device="CUDA", tensor_parallel_size=2, **OPTIONS) as llm:
        assert tokens(llm) == expected
        assert not driver.imported and not driver._shared
        whole = llm.engine.runner.ranks._memory.layout.tensor_bytes
        assert whole in [driver.pinned[start].nbytes for start in {*driver.pinned} - before]


@pytest.mark.long
def test_tensor_and_pipeline_parallel_together(expected: list[list[int]], driver: Driver) -> None:
    with LLM(MODEL, device="CUDA", tensor_parallel_size=2, pipeline_parallel_size=2, **OPTIONS) as llm:
        assert tokens(llm) == expected


@pytest.mark.long
def test_tokens_do_not_depend_on_the_batch(driver: Driver) -> None:
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=4, ignore_eos=True) for i in range(3)]
    with LLM(MODEL, device="CUDA", tensor_parallel_size=2, **OPTIONS) as llm:
        assert tokens(llm, TEXTS, params) == [tokens(llm, [text], [param])[0] for text, param in zip(TEXTS, params, strict=True)]


def test_a_gpu_whose_rank_is_killed_is_not_waited_for(driver: Driver) -> None:
    """Its kernels stop waiting, and the engine ends with an error that names the rank."""
    with LLM(MODEL, device="CUDA", tensor_parallel_size=2, **{**OPTIONS, "max_model_len": 128}) as llm:
        (pid,) = start(llm)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank 1 \(process \d+\) ended with code -9"):
            run_on(llm)
    assert not alive(pid)


def test_the_fullest_gpu_decides_the_blocks(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what its weights leave; the plan says the same."""
    options: dict[str, Any] = {**OPTIONS, "num_blocks": None, "max_num_seqs": 64, "max_model_len": 512}
    gc.collect()  # what engines of other tests hold must not become free meanwhile
    monkeypatch.setattr(driver, "_capacity", driver._capacity - driver.free() + (12 << 20))
    for name in ("tensor", "pipeline"):
        config = resolve(MODEL, device="CUDA", **options, **{f"{name}_parallel_size": 2})
        sizes = plan_engine(config, speed=False).sizes
        assert sizes.start is not None and [rank.device for rank in sizes.ranks] == ["CUDA", "CUDA"]
        most = max(rank.weights for rank in sizes.ranks)
        taken = sizes.start.num_blocks * max(rank.kv_token for rank in sizes.ranks) * 16
        assert 0.9 * ((12 << 20) - most) < 2 * taken <= (12 << 20) - most
        assert 0.99 * (24 << 20) < sizes.memory.available <= 24 << 20 and sizes.memory.limit == "free memory of CUDA, 2 times"


def test_a_plan_of_one_memory_is_refused(driver: Driver) -> None:
    with pytest.raises(ArgumentError, match="--memory is the memory of one device, and 2 ranks have a CUDA each"):
        plan_engine(resolve(MODEL, device="CUDA", tensor_parallel_size=2, **OPTIONS), 1 << 30)


def test_logits_of_a_prompt_in_rounds(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """More logits than fit a place at a time, and sums of more rows."""
    ids = np.random.default_rng(1).integers(3, 3000, 40).tolist()
    with LLM(MODEL, device="CUDA", **OPTIONS) as one:
        expected = one.prompt_logits(ids)
    monkeypatch.setattr(grid, "CUDA_PLACE", 4096)
    with LLM(MODEL, device="CUDA", tensor_parallel_size=2, **OPTIONS) as llm:
        assert llm.engine.runner.model.weights.head.share.group.place == 4096
        np.testing.assert_allclose(llm.prompt_logits(ids), expected, atol=0.05)


def test_what_gpus_cannot_do_is_refused_by_name(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"tensor_parallel_size=2 runs on the CPU and on CUDA, and ranks have the first GPUs: .*=1,"):
        LLM(MODEL, device="CUDA:1", tensor_parallel_size=2, **OPTIONS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(driver, "_gpus", 1)
    with pytest.raises(ArgumentError, match=r"2 ranks need as many GPUs, and there are 1 \(CUDA_VISIBLE_DEVICES=3\)"):
        LLM(MODEL, device="CUDA", tensor_parallel_size=2, **OPTIONS)


def test_each_rank_sees_a_gpu_of_its_own(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinyvllm.backends.cuda.call import CudaBackend

    name, environments = "CUDA_VISIBLE_DEVICES", CudaBackend().rank_environments
    monkeypatch.delenv(name, raising=False)
    assert environments(4, False) == [{name: str(rank)} for rank in range(4)]
    monkeypatch.setenv(name, "GPU-a,GPU-b,5,1")
    assert environments(3, False) == [{name: "GPU-a"}, {name: "GPU-b"}, {name: "5"}]
    monkeypatch.setattr(driver, "_gpus", 1)
    monkeypatch.setenv(name, "GPU-a")
    assert environments(2, True) == [{name: "GPU-a"}] * 2


@pytest.mark.parametrize("name", ["tensor", "pipeline"])
def test_adapters(name: str, driver: Driver, tmp_path: Path) -> None:
    """Two and none in a batch. A is divided where columns are, and its sums meet; a request without one has its usual bits."""
    folders = [write_adapter(tmp_path / str(rank), MODEL, rank=rank, seed=rank) for rank in (4, 7)]
    first, second = (LoRARequest(folder.name, lora_path=str(folder)) for folder in folders)
    found, params = [], replace(GREEDY, max_tokens=3, logprobs=2)
    for size in (1, 2):
        options: dict[str, Any] = {**OPTIONS, "max_loras": 2, "enable_prefix_caching": False, f"{name}_parallel_size": size}
        with LLM(MODEL, device="CUDA", enable_lora=True, **options) as llm:
            for adapters in ([first, None, second], [None] * 3):
                found.append([output.outputs[0] for output in llm.generate(TEXTS, params, lora_request=adapters)])
    ids = [[one.token_ids for one in outputs] for outputs in found]
    assert ids[:2] == ids[2:] and ids[0][0] != ids[1][0] and ids[0][2] != ids[1][2]
    scores = [[[p.logprob for step in one.logprobs for p in step.values()] for one in outputs] for outputs in found]
    for one, two in zip(scores[:2], scores[2:], strict=True):
        np.testing.assert_allclose(np.concatenate(two), np.concatenate(one), atol=0.02)
    assert scores[2][1] == scores[3][1]


FAMILIES = ("qwen3moe", "olmoe", "qwen2moe", "gemma2", "qwen3", "olmo2", "deepseek2", "qwen3next", "gemma4", "smollm3", "gpt-oss")


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_its_recorded_tokens(name: str, driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With experts, latents, states, norms of outputs and of q and k over all heads. Attention of the reference has no kernels here."""
    monkeypatch.setattr(USE_TC, "value", 0)
    monkeypatch.setenv("TC", "0")  # of the rank
    with np.load(GOLDEN / name / "golden.npz") as data:
        prompt, recorded = data["prompt_0"].tolist(), data["tokens_0"][:4].tolist()
    model = with_wide_experts(name, tmp_path / name) if name in EXPERTS else GOLDEN / name
    options: dict[str, Any] = dict(device="CUDA", dtype="float16", skip_tokenizer_init=True, max_model_len=64, max_num_seqs=2)
    found = []
    for size in (1, 2):
        with LLM(model, tensor_parallel_size=size, **options) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            found.append(llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids)
    assert found[1] == found[0] and (name in EXPERTS or found[0] == recorded)


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3moe", "deepseek2"])
def test_adapters_of_experts_and_of_latents(name: str, driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gate and up of a row's experts have a bias of a pair, which takes the reference; sums of down meet."""
    monkeypatch.setattr(USE_TC, "value", 0)
    monkeypatch.setenv("TC", "0")
    model = with_wide_experts(name, tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", model, modules=[*ATTENTION, *LATENT, *experts_of(name)], size=0.3)
    options: dict[str, Any] = dict(device="CUDA", dtype="float16", skip_tokenizer_init=True, max_model_len=64, num_blocks=16)
    prompts, found = [{"prompt_token_ids": [5, 9, 40, 7]}] * 2, []
    for size in (1, 2):
        with LLM(model, tensor_parallel_size=size, enable_lora=True, lora_experts=True, max_num_seqs=2, **options) as llm:
            lora = [LoRARequest("one", lora_path=str(adapter)), None]
            outputs = llm.generate(prompts, replace(GREEDY, max_tokens=2, logprobs=2), lora_request=lora)
            found.append([[p.logprob for step in one.outputs[0].logprobs for p in step.values()] for one in outputs])
    np.testing.assert_allclose(found[1], found[0], atol=0.02)
    assert np.abs(np.subtract(*found[0])).max() > 0.2, "the adapter changes them"


@pytest.mark.long
def test_biases_of_experts_are_added_once(driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(USE_TC, "value", 0)
    monkeypatch.setenv("TC", "0")
    model = with_wide_experts("gpt-oss", tmp_path / "model")
    options: dict[str, Any] = dict(device="CUDA", dtype="float16", skip_tokenizer_init=True, max_model_len=64, num_blocks=16)
    logits = []
    for size in (1, 2):
        with LLM(model, tensor_parallel_size=size, **options) as llm:
            logits.append(llm.prompt_logits([5, 9, 40, 7]))
    np.testing.assert_allclose(logits[1], logits[0], atol=0.01)


def test_columns_in_blocks_that_ranks_would_cut_are_refused(driver: Driver) -> None:
    with pytest.raises(
        ModelError, match=r"tensor_parallel_size=2: the \d+ columns of blk.0.\w+.weight are in blocks of 256 in Q4_K, which CUDA"
    ):
        LLM(MODEL, device="CUDA", tensor_parallel_size=2, quantization="q4_k", **OPTIONS)
