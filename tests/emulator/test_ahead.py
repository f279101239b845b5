"""The host and the emulated GPU, never at the same place: what is launched runs when somebody waits for it, or any time before."""

from __future__ import annotations

from typing import Any

import pytest

from tests.emulator.driver import cuda_device
from tinyvllm import LLM, SamplingParams
from tinyvllm.config import DEFAULT_MODEL as MODEL

OPTIONS: dict[str, Any] = dict(max_model_len=128, max_num_seqs=16, seed=0)
TEXTS = ["Once upon a time", "Hello! Who are you?"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def cpu():
    with LLM(MODEL, device="CPU", **OPTIONS) as llm:
        yield llm


@pytest.fixture(
    scope="module", params=[pytest.param(0, id="as late as can be", marks=pytest.mark.long), pytest.param(1, id="at any moment")]
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


def test_steady_decoding_is_one_launch_a_step(gpu, driver):
    """Nothing is set anew, nothing is waited for but the tokens of the step before, and those come through pinned memory."""
    tokens(gpu, TEXTS[:1], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    before = driver.counts.copy()
    tokens(gpu, TEXTS[:1], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    spent = driver.counts - before
    assert spent["cuGraphLaunch"] == 9, "the prompt, and eight decodes"
    assert spent["cuMemcpyDtoHAsync_v2"] == 9 and spent["cuGraphExecKernelNodeSetParams"] == 0 and spent["cuLaunchKernel"] == 0
    assert spent["cuMemcpyHtoDAsync_v2"] <= 5, "prompt, first decode, the sampler's lines and a new block; no step needs one"
    assert spent["cuCtxSynchronize"] == 0 and spent["cuMemAlloc_v2"] == 0


def test_several_steps_at_once(gpu, driver):
    expected = tokens(gpu, TEXTS[:2])
    with LLM(MODEL, device="CUDA", **OPTIONS, num_scheduler_steps=4) as several:
        assert tokens(several, TEXTS[:2]) == expected == tokens(several, TEXTS[:2]), "also where all is captured"


def test_the_host_looks_at_each_token_where_it_must(cpu, gpu):
    """Twice: the second time, all is captured, and launches come back before anything has run."""
    asking = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
    late = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=6, ignore_eos=True, stop_token_ids=[264])
    expected = tokens(cpu, TEXTS[:1], late)
    for _ in range(2):
        output = gpu.generate(TEXTS[:1], asking)[0].outputs[0]
        assert output.token_ids == tokens(cpu, TEXTS[:1])[0]
        for token, found in zip(output.token_ids, output.logprobs, strict=True):
            assert max(found, key=lambda t: found[t].logprob) == token
        assert tokens(gpu, TEXTS[:1], late) == expected


def test_new_blocks_come_in_the_middle_of_steps_that_go_on(cpu, gpu, monkeypatch):
    """One copy takes them there, behind the step in flight, and with them a part of what the device has moved on itself."""
    long, scheduler, crossed = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), gpu.engine.scheduler, []
    onward = scheduler._reuse

    def told(unseen: int) -> Any:
        plan = onward(unseen)
        crossed.extend(plan.changed if plan is not None else ())
        return plan

    monkeypatch.setattr(scheduler, "_reuse", told)
    texts = [*TEXTS, "The old mill by the river"]
    assert tokens(gpu, texts, long) == tokens(cpu, texts, long) and len(crossed) > 2


def test_steps_captured_on_padding_alone_give_the_same(cpu, driver):
    with LLM(MODEL, device="CUDA", **OPTIONS | dict(max_num_seqs=2, max_num_batched_tokens=32), warm_up=True) as warmed:
        assert len(warmed.engine.runner._steps) == 6, "two sizes of prompts, alone and beside decodes, and one and two decodes"
        assert tokens(warmed, TEXTS) == tokens(cpu, TEXTS)
