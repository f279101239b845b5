"""The host runs ahead of the emulated GPU: launched work runs when the host waits for it, or at any time before."""

from __future__ import annotations

from typing import Any

import pytest

from tests.emulator.driver import cuda_device
from tinyvllm import LLM, SamplingParams
from tinyvllm.config.engine import DEFAULT_MODEL as MODEL

OPTIONS: dict[str, Any] = dict(max_model_len=128, max_num_seqs=16, seed=0)
TEXTS = ["Once upon a time", "Hello! How are you?"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def cpu():
    with LLM(MODEL, device="CPU", **OPTIONS) as llm:
        yield llm


@pytest.fixture(
    scope="module", params=[pytest.param(0, id="as late as possible", marks=pytest.mark.long), pytest.param(1, id="at any time")]
)
def driver(request):
    with cuda_device(seed=request.param) as driver:
        yield driver


@pytest.fixture(scope="module")
def gpu(driver):
    with LLM(MODEL, device="CUDA", **OPTIONS) as llm:
        yield llm


def tokens(llm: LLM, texts: list[str], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(texts, params)]


def test_greedy_tokens_are_the_cpus(cpu, gpu):
    assert tokens(gpu, TEXTS) == tokens(cpu, TEXTS) == tokens(gpu, TEXTS)


def test_decoding_without_changes_is_one_launch_a_step(gpu, driver):
    """No node is updated, the host waits only for the tokens of the previous step, and they arrive through pinned memory."""
    tokens(gpu, TEXTS[:1], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    before = driver.counts.copy()
    tokens(gpu, TEXTS[:1], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    spent = driver.counts - before
    assert spent["cuGraphLaunch"] == 9, "the prompt and eight decodes"
    assert spent["cuMemcpyDtoHAsync_v2"] == 9 and spent["cuGraphExecKernelNodeSetParams"] == 0 and spent["cuLaunchKernel"] == 0
    assert spent["cuMemcpyHtoDAsync_v2"] <= 5, "prompt, first decode, sampling parameters and a new block; no step needs one"
    assert spent["cuCtxSynchronize"] == 0 and spent["cuMemAlloc_v2"] == 0


@pytest.mark.long
def test_several_steps_in_one_schedule(gpu, driver):
    expected = tokens(gpu, TEXTS[:2])
    with LLM(MODEL, device="CUDA", **OPTIONS, num_scheduler_steps=4) as several:
        assert tokens(several, TEXTS[:2]) == expected == tokens(several, TEXTS[:2]), "also when every step is captured"


def test_the_host_reads_each_token_where_a_request_needs_it(cpu, gpu):
    """Twice: the second time every step is captured, and launches return before anything has run."""
    with_logprobs = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
    late_stop = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=6, ignore_eos=True, stop_token_ids=[264])
    expected = tokens(cpu, TEXTS[:1], late_stop)
    for _ in range(2):
        output = gpu.generate(TEXTS[:1], with_logprobs)[0].outputs[0]
        assert output.token_ids == tokens(cpu, TEXTS[:1])[0]
        for token, logprobs in zip(output.token_ids, output.logprobs, strict=True):
            assert max(logprobs, key=lambda t: logprobs[t].logprob) == token
        assert tokens(gpu, TEXTS[:1], late_stop) == expected


def test_new_blocks_arrive_during_reused_decodes(cpu, gpu, monkeypatch):
    """One copy after the step in flight brings them, and also overwrites state that the device has advanced itself."""
    params, scheduler, crossed = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), gpu.engine.scheduler, []
    reuse = scheduler._reuse

    def record_changes(unseen: int) -> Any:
        plan = reuse(unseen)
        crossed.extend(plan.changed if plan is not None else ())
        return plan

    monkeypatch.setattr(scheduler, "_reuse", record_changes)
    texts = [*TEXTS, "The old mill by the river"]
    assert tokens(gpu, texts, params) == tokens(cpu, texts, params) and len(crossed) > 2


def test_steps_captured_on_padding_only_give_the_same_tokens(cpu, driver):
    few = OPTIONS | {"max_num_seqs": 2, "max_num_batched_tokens": 32}
    with LLM(MODEL, device="CUDA", **few, warm_up=True, speculative_config="off") as warmed:  # steps with drafts are captured, too
        assert len(warmed.engine.runner._steps) == 6, "two sizes of prompts, with and without decodes, and one and two decodes"
        assert tokens(warmed, TEXTS) == tokens(cpu, TEXTS)
