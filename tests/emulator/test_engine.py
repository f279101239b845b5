"""The whole engine on the emulated GPU: the shipped CUDA kernels as nodes of tinygrad's graphs, on tinygrad's own CUDA device.

The model is the bundled one. The CPU kernels are the reference; both round x to bfloat16, the GPU's also the queries and the attention
weights, so logits agree to a few hundredths, and greedy tokens where no two logits are that close.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.emulator.driver import cuda_device
from tinyvllm import LLM, SamplingParams
from tinyvllm.backends import registry
from tinyvllm.backends.cuda import call as cuda
from tinyvllm.backends.cuda import hopper_plan, limits
from tinyvllm.backends.cuda import plan as records
from tinyvllm.config.engine import DEFAULT_MODEL as MODEL
from tinyvllm.runner.memory import read_bandwidth

OPTIONS: dict[str, Any] = dict(max_model_len=128, max_num_seqs=16, seed=0)
TEXTS = ["Once upon a time", "Hello! How are you?", "7 + 5 =", '{"name": "', "The old gardener", "In Willowmere"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def cpu():
    with LLM(MODEL, device="CPU", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def driver():
    with cuda_device(seed=1) as driver:
        yield driver


@pytest.fixture(scope="module")
def gpu(driver):
    registry.forget_choices()
    with LLM(MODEL, device="CUDA", **OPTIONS) as llm:
        yield llm


def tokens(llm: LLM, texts: list[str], params: Any = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(texts, params)]


def test_greedy_tokens_are_the_cpus(cpu, gpu):
    assert tokens(gpu, TEXTS[:3]) == tokens(cpu, TEXTS[:3])


def test_a_profile_has_the_kernels_of_a_step_and_changes_no_token(gpu, driver, monkeypatch):
    """A sampled step runs them one by one; the next one is a graph again."""
    from tinyvllm.engine.tools.trace_output import TraceMemory
    from tinyvllm.engine.tracing import start_trace, stop_trace

    monkeypatch.setattr("tinyvllm.engine.tracing.memory_bandwidth", lambda device: 0.0)  # to read it takes the emulator minutes
    expected = tokens(gpu, TEXTS[:1])
    output, before = TraceMemory(), driver.counts["cuGraphLaunch"]
    trace = start_trace(gpu.engine, output)
    assert tokens(gpu, TEXTS[:1]) == expected and driver.counts["cuGraphLaunch"] > before
    stop_trace(gpu.engine, trace)
    events = json.loads(output.text())
    steps = [event for event in events if event["name"] == "step"]
    assert [step["args"]["sampled"] for step in steps].count(True) == 1
    kernels = [event for event in events if event.get("tid") == 3 and event["ph"] == "X"]
    attention = [event["args"]["bytes"] for event in kernels if event["name"].startswith("attention_")]
    layers = gpu.engine.runner.config.num_blocks
    assert len(attention) >= layers and all(nbytes > 0 for nbytes in attention) and trace.table.num_steps == 1


def test_a_launch_that_fails_leaves_no_counts(gpu, driver, caplog):
    """Some blocks of the head have counted themselves when its launch fails: the engine recovers, and the next launch finds zeros."""
    expected = tokens(gpu, TEXTS[:1])
    driver.fail_once = "norm_head"
    assert tokens(gpu, TEXTS[:1]) == expected and driver.fail_once is None
    assert "a step failed" in caplog.text
    caplog.clear()  # the traceback holds programs of the driver


def test_every_op_runs_a_kernel(gpu, driver):
    tokens(gpu, TEXTS[:1])
    before = len(driver.launched)
    gpu.prompt_logits([0])  # one row streams the weights; its input is not prepared
    ran = set(driver.launched[before:])
    assert {"norm_qkv_rope_store", "attention_decode_team", "matvec", "norm_gate_up_silu", "norm_head"} <= ran
    assert "quantize_input" not in ran
    chosen = {choice.stem: choice.variant for choice in registry.choices("CUDA")}
    wanted = {"embed", "norm_qkv_rope_store", "attention_decode", "attention_prefill", "matmul", "norm_gate_up_silu", "norm_head"}
    assert wanted | {"advance"} <= set(chosen) and set(chosen.values()) == {"sm_80", "sm_90a"}


def test_logits(cpu, gpu):
    ids = [0, *range(40, 60)]
    a, b = cpu.prompt_logits(ids), gpu.prompt_logits(ids)
    assert np.abs(a - b).max() < 0.15 and np.abs(a - b).mean() < 0.015, (np.abs(a - b).max(), np.abs(a - b).mean())


@pytest.mark.long
def test_a_request_gives_the_same_tokens_in_any_batch(gpu):
    """Ten together are rows of the large products, alone they are rows of the small ones; greedy and drawn."""
    texts = [TEXTS[i % 6] + " " * (i // 6) for i in range(10)]
    params = [GREEDY if i % 2 else SamplingParams(temperature=0.9, seed=i, top_p=0.9, max_tokens=4, ignore_eos=True) for i in range(10)]
    together = tokens(gpu, texts, params)
    assert together == [tokens(gpu, [text], [param])[0] for text, param in zip(texts, params, strict=True)]


def test_a_long_prompt_in_chunks(cpu, driver):
    text = "Once upon a time there was a girl. " * 8
    with LLM(MODEL, device="CUDA", **OPTIONS | {"max_num_batched_tokens": 24}) as chunked:
        assert tokens(chunked, [text]) == tokens(cpu, [text])


def test_a_small_gpu_uses_the_kernels_of_many_rows(gpu, driver, monkeypatch):
    """Where x does not fit in shared memory with the sums, few rows are prepared like many; the bits are the same."""
    expected = tokens(gpu, TEXTS[:1])
    small = records.GPU(4, 99 << 10, 100 << 10)
    monkeypatch.setattr(cuda, "gpu_at", lambda like: small)
    monkeypatch.setattr(cuda, "fits", lambda kernel, gpu: kernel.stem in ("matmul", "attention_decode"))
    monkeypatch.setattr(limits, "gpu_of", lambda placement: records.GPU(4, 227 << 10, 228 << 10))
    before = len(driver.launched)
    with LLM(MODEL, device="CUDA", **OPTIONS) as other:
        assert tokens(other, TEXTS[:1]) == expected
    ran = set(driver.launched[before:])
    assert {"quantize_input", "matmul", "rope_store", "argmax"} <= ran
    assert not ran & {"matvec", "norm_gate_up_silu", "norm_qkv_rope_store", "norm_head"}


@pytest.mark.parametrize("format", [pytest.param("q8_0", marks=pytest.mark.long), "q4_0"])
def test_packed_weights(driver, format):
    with LLM(MODEL, device="CPU", **OPTIONS, quantization=format) as cpu:
        expected, logits = tokens(cpu, TEXTS[:1]), cpu.prompt_logits([0, 5, 9, 44])
    with LLM(MODEL, device="CUDA", **OPTIONS, quantization=format) as gpu:
        assert np.abs(gpu.prompt_logits([0, 5, 9, 44]) - logits).max() < 0.15
        assert tokens(gpu, TEXTS[:1]) == expected


def test_bandwidth_is_measured_by_a_kernel(driver):
    before = len(driver.launched)
    assert read_bandwidth("CUDA", 0.0, nbytes=1 << 12) > 0
    assert driver.launched[before:].count("read") >= 2


def test_the_hopper_variant(gpu, driver, monkeypatch):
    """In the emulator, where all matrix instructions add in one order, the bits are those of the base variant."""
    ids = [0, *range(40, 60)]
    expected = gpu.prompt_logits(ids)
    monkeypatch.setattr(hopper_plan, "LEAST_ROWS", 16)
    monkeypatch.setenv("TINYVLLM_KERNELS", "all=sm_80,norm_qkv_rope_store=sm_90a")
    before = len(driver.launched)
    with LLM(MODEL, device="CUDA", **OPTIONS) as hopper:
        np.testing.assert_array_equal(hopper.prompt_logits(ids), expected)
    assert driver.launched[before:].count("matmul_hopper") == 6


@pytest.mark.parametrize("kind", ["int8", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("fp8_e4m3", "int4"))])
def test_packed_caches_on_kernels(driver, kind):
    """Prompts of several rows and single tokens, whose projections, stores and attention are other kernels."""
    registry.forget_choices()
    with LLM(MODEL, device="CUDA", kv_cache_dtype=kind, **OPTIONS) as gpu:
        found = tokens(gpu, TEXTS[:2])
        assert {"attention_decode", "attention_prefill", "norm_qkv_rope_store"} <= {choice.stem for choice in registry.choices()}
        assert "ref" not in {choice.variant for choice in registry.choices() if "attention" in choice.stem or "store" in choice.stem}
        assert tokens(gpu, TEXTS[1:2]) == found[1:]
    with LLM(MODEL, device="CPU", kv_cache_dtype=kind, **OPTIONS) as cpu:
        assert tokens(cpu, TEXTS[:2]) == found


def test_a_second_start_runs_no_model(driver, tmp_path, monkeypatch, tiny_model):
    """Neither the model nor tinygrad's scheduler: captured steps are on disk."""
    from tests.engine.starts import check_second_start

    params = [SamplingParams(temperature=0.8, seed=1, max_tokens=2, ignore_eos=True)]
    check_second_start(monkeypatch, tmp_path, tiny_model, "CUDA", params=params, max_model_len=128, max_num_seqs=2, dtype="bfloat16")
