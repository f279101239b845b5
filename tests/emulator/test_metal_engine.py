"""The whole engine on the emulated Mac: the shipped Metal kernels as nodes of tinygrad's graphs, on tinygrad's own Metal device.

The model is the bundled one, the CPU's kernels are the reference. Products do not round x on Metal, so logits agree to a few hundredths.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.emulator.metal_runtime import metal_device
from tinyvllm import LLM, SamplingParams
from tinyvllm.backends import autotune, registry
from tinyvllm.backends.metal import plan as metal_records
from tinyvllm.config.engine import DEFAULT_MODEL as MODEL
from tinyvllm.runner.prepare import StepInputs
from tinyvllm.storage.cache import open_cache

GOLDEN = Path(__file__).parents[1] / "tiny" / "golden"
OPTIONS: dict[str, Any] = dict(max_model_len=128, max_num_seqs=32, seed=0)
TEXTS = ["Once upon a time", "Hello! How are you?", "7 + 5 =", '{"name": "', "The old gardener", "In Willowmere"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def cpu():
    with LLM(MODEL, device="CPU", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def mac():
    with metal_device() as runtime:
        yield runtime


@pytest.fixture(scope="module")
def gpu(mac):
    with LLM(MODEL, device="METAL", **OPTIONS) as llm:
        yield llm


def tokens(llm: LLM, texts: list[Any], params: Any = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(texts, params)]


def test_greedy_tokens_are_the_cpus_and_every_op_ran_a_kernel(cpu, gpu):
    assert tokens(gpu, TEXTS[:3]) == tokens(cpu, TEXTS[:3])
    chosen = {choice.stem: choice.variant for choice in registry.choices("METAL")}
    stems = {"embed", "norm_qkv_rope_store", "attention_decode", "attention_prefill", "matmul", "norm_gate_up_silu", "norm_head"}
    assert stems | {"advance"} <= set(chosen) and set(chosen.values()) == {"apple7"}


def test_logits(cpu, gpu):
    ids = [0, *range(40, 60)]
    a, b = cpu.prompt_logits(ids), gpu.prompt_logits(ids)
    assert np.abs(a - b).max() < 0.15 and np.abs(a - b).mean() < 0.015


@pytest.mark.long
def test_a_batch_of_up_to_sixteen_has_the_tokens_of_single_requests(gpu):
    """Greedy and sampled; small products have one order for one row and for sixteen."""
    sampled = [SamplingParams(temperature=0.9, seed=i, top_p=0.9, max_tokens=4, ignore_eos=True) for i in range(6)]
    params = [GREEDY if i % 2 else sampled[i] for i in range(6)]
    together = tokens(gpu, TEXTS, params)
    assert together == [tokens(gpu, [text], [param])[0] for text, param in zip(TEXTS, params, strict=True)]


@pytest.mark.long
def test_requests_that_the_host_checks_token_by_token(cpu, gpu):
    late = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=6, ignore_eos=True, stop_token_ids=[264])
    with_logprobs = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
    for _ in range(2):
        assert tokens(gpu, TEXTS[:1], late) == tokens(cpu, TEXTS[:1], late)
        assert tokens(gpu, TEXTS[:1], with_logprobs) == tokens(cpu, TEXTS[:1])


@pytest.mark.long
def test_tuning_changes_no_token_and_is_cached(gpu, monkeypatch, tmp_path):
    expected = tokens(gpu, TEXTS[:1])
    monkeypatch.setenv("TINYVLLM_AUTOTUNE", "1")
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path))
    autotune.tuner.cache_clear()
    try:
        with LLM(MODEL, device="METAL", **OPTIONS) as tuned:
            assert tokens(tuned, TEXTS[:1]) == expected
            assert not open_cache(tmp_path).read(autotune.FILE), "nothing is timed while requests run"
            tuned.settle()
            assert tokens(tuned, TEXTS[:1]) == expected
    finally:
        autotune.tuner.cache_clear()
    kept = json.loads(open_cache(tmp_path).read(autotune.FILE))
    assert {key.split()[0] for figures in kept.values() for key in figures} & {"matvec", "norm_gate_up_silu", "norm_qkv_rope_store"}


def test_a_step_over_several_partitions_is_five_launches_a_layer(mac, monkeypatch, tmp_path, tiny_model):
    """Up to 32 partitions, of which the tokens fill two; partitions are smaller here, because long prompts take long."""
    monkeypatch.setattr(metal_records, "partition_of", lambda attention: 64)
    for file in tiny_model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    config = json.loads((tiny_model / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt, options = {"prompt_token_ids": [0, *range(40, 100)]}, OPTIONS | dict(max_model_len=2048, max_num_seqs=2, dtype="bfloat16")
    with LLM(tmp_path, device="CPU", **options) as cpu:
        expected = tokens(cpu, [prompt])
    before = len(mac.indirect)
    with LLM(tmp_path, device="METAL", **options) as gpu:
        assert tokens(gpu, [prompt]) == expected
    steps = [Counter(command.name for command in commands.commands) for commands in mac.indirect[before:]]
    (decodes,) = [step for step in steps if "attention_decode" in step]
    layer = {"norm_qkv_rope_store": 1, "attention_decode": 1, "matvec": 2, "norm_gate_up_silu": 1}
    L = config["num_hidden_layers"]
    assert decodes.total() <= 5 * L + 6 and {name: decodes[name] for name in layer} == {name: L * n for name, n in layer.items()}


@pytest.mark.long
def test_partitions_merged_by_a_second_launch_change_no_token(mac, monkeypatch):
    monkeypatch.setattr(metal_records, "partition_of", lambda attention: 32)
    prompt, params = {"prompt_token_ids": [0, *range(40, 110)]}, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    found, names = [], []
    for variant in ("apple7", "apple7_merge"):
        monkeypatch.setenv("TINYVLLM_KERNELS", f"attention_decode={variant}")
        with LLM(MODEL, device="METAL", **OPTIONS) as llm:
            found.append(tokens(llm, [prompt], params))
        names.append(Counter(command.name for command in mac.indirect[-1].commands))
    assert found[0] == found[1]
    assert names[0]["attention_decode"] == names[1]["attention_decode"] == names[1]["attention_merge"] and not names[0]["attention_merge"]


@pytest.mark.long
def test_reading_a_shared_prompt_once_changes_no_token(mac, monkeypatch):
    """One captured step for sequences that share a prefix and for others: each step passes the shared lengths to the device."""
    monkeypatch.setattr(metal_records, "partition_of", lambda attention: 128)
    monkeypatch.setattr(metal_records, "SPREAD", 1)
    lengths, measure = [], StepInputs._measure_shared

    def spied(inputs: StepInputs, *arguments: Any) -> Any:
        changed = measure(inputs, *arguments)
        lengths.append(sorted(inputs.shared_prefix_lens.tolist()))
        return changed

    monkeypatch.setattr(StepInputs, "_measure_shared", spied)
    shared, params = [0, *range(40, 183)], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)  # nine blocks
    prompts = [{"prompt_token_ids": [*(shared if i < 2 else shared[::-1]), 50 + i]} for i in range(4)]
    with LLM(MODEL, device="METAL", **OPTIONS | dict(max_model_len=256, max_num_seqs=4, enable_prefix_caching=True)) as gpu:
        expected = [tokens(gpu, [prompt], params)[0] for prompt in prompts]
        assert not np.any(lengths)
        for indices in ([0, 2, 1], [0, 1, 2, 3], [0, 2]):
            assert tokens(gpu, [prompts[i] for i in indices], params) == [expected[i] for i in indices]
        assert [0, 0, 0, 144] in lengths and [0, 0, 144, 144] in lengths


@pytest.mark.long
@pytest.mark.parametrize("kind", ["int4", "fp8_e4m3", "int8"])  # of one kernel each in tests/kernels/metal/test_packed_cache.py
def test_packed_caches_on_kernels(mac, kind):
    """Prompts of several rows and single tokens, whose projections, stores and attention are other kernels."""
    registry.forget_choices()
    with LLM(MODEL, device="METAL", kv_cache_dtype=kind, **OPTIONS) as gpu:
        found = tokens(gpu, TEXTS[:2])
        assert {"attention_decode", "attention_prefill", "norm_qkv_rope_store"} <= {choice.stem for choice in registry.choices("METAL")}
        assert {choice.variant for choice in registry.choices("METAL")} == {"apple7"}
        assert tokens(gpu, TEXTS[1:2]) == found[1:]
    with LLM(MODEL, device="CPU", kv_cache_dtype=kind, **OPTIONS) as cpu:
        assert tokens(cpu, TEXTS[:2]) == found


@pytest.mark.long
@pytest.mark.parametrize(("name", "kind"), [("ministral3", "int8"), ("qwen3", "fp8_e4m3"), ("qwen3", "int8"), ("qwen3", "int4")])
def test_packed_caches_have_the_tokens_of_the_reference(mac, monkeypatch, kind, name):
    """And in a batch, from the prefix cache, in chunks, after a swap, in forks: everything works on packed blocks."""
    model = GOLDEN / name  # both have two query heads a KV head, the second norms of heads
    prompts = [{"prompt_token_ids": [0, *(17 * j % 250 for j in range(2, 47)), 50 + i]} for i in range(4)]
    # float32, so that no rounding of inputs decides which of two quants a number becomes
    options = dict(max_model_len=128, max_num_seqs=4, seed=0, kv_cache_dtype=kind, skip_tokenizer_init=True, dtype="float32")
    with monkeypatch.context() as patch:
        patch.setenv("TINYVLLM_KERNELS", "all=ref")
        registry.forget_choices()
        with LLM(model, device="CPU", **options) as reference:
            expected = [tokens(reference, [prompt])[0] for prompt in prompts]
    registry.forget_choices()
    for more in (
        dict(enable_prefix_caching=True),
        dict(enable_prefix_caching=False, max_num_batched_tokens=32, num_scheduler_steps=2),
        dict(enable_prefix_caching=False, num_blocks=10, preemption_mode="swap", swap_space="4MB"),
    ):
        with LLM(model, device="METAL", **options, **more) as gpu:
            assert [tokens(gpu, [prompts[0]])[0], *tokens(gpu, prompts)] == [expected[0], *expected], more
            assert bool(gpu.engine.scheduler.num_swaps) == ("swap_space" in more)
            forks = gpu.generate([prompts[1]], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, n=2))
            assert [part.token_ids for part in forks[0].outputs] == [expected[1]] * 2
    assert {choice.variant for choice in registry.choices("METAL")} == {"apple7"}


@pytest.mark.long
@pytest.mark.parametrize("format", ["q8_0", "q4_0"])  # a file in Q4_K_M is in test_metal_packed_files.py
def test_packed_weights(mac, format):
    """The CPU rounds x to int8 for packed weights, the GPU does not."""
    with LLM(MODEL, device="CPU", **OPTIONS, quantization=format) as cpu:
        logits = cpu.prompt_logits([0, 5, 9, 44])
    with LLM(MODEL, device="METAL", **OPTIONS, quantization=format) as gpu:
        assert np.abs(gpu.prompt_logits([0, 5, 9, 44]) - logits).max() < 0.3
        assert {len(ids) for ids in tokens(gpu, TEXTS[:2])} == {6}


def test_a_second_start_runs_no_model(mac, tmp_path, monkeypatch, tiny_model):
    """Neither the model nor tinygrad's scheduler: captured steps are on disk."""
    from tests.engine.starts import check_second_start

    params = [SamplingParams(temperature=0.8, seed=1, max_tokens=2, ignore_eos=True)]
    check_second_start(monkeypatch, tmp_path, tiny_model, "METAL", params=params, max_model_len=128, max_num_seqs=2, dtype="bfloat16")
