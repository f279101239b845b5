"""Families with policies of their own, on the emulated GPUs: the recorded tokens, which kernels run, and why some ops run without them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from tinygrad.helpers import USE_TC

from tests.emulator.driver import cuda_device
from tests.emulator.metal_runtime import metal_device
from tests.engine.drafting import Oracle, speculate
from tests.speculate import gated
from tinyvllm import LLM, SamplingParams
from tinyvllm.backends import registry

GOLDEN = Path(__file__).parents[1] / "tiny" / "golden"
TOKENS = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
REASONS = {  # parts of the reasons
    "gemma2": {"a norm of the outputs", "a gate with GELU", "a cap of the logits"},
    "gemma3": {"a norm of the outputs", "a gate with GELU", "a scale of the embedding"},
    "ministral3": set(),
    "qwen3moe": set(),
    "gpt-oss": set(),
    "glm4moe": set(),
    "deepseek2": {"values that are a part of the keys"},
}
EXPERTS = ("norm_route", "experts_gate_up_silu", "experts_down")
ATTENTION = ("attention_decode", "attention_prefill")


OPTIONS = {  # with which the layers of Gemma form groups
    "gemma2": {"max_model_len": 64},
    "gemma3": {"max_model_len": 256, "max_num_batched_tokens": 16},
    "ministral3": {"max_model_len": 64},
    "qwen3moe": {"max_model_len": 64},
    "gpt-oss": {"max_model_len": 64},
    "glm4moe": {"max_model_len": 64},
    "deepseek2": {"max_model_len": 64},
}
OF_EXPERTS = list(itertools.product(("qwen3moe", "gpt-oss", "glm4moe", "deepseek2"), ("CUDA", "METAL")))


@pytest.mark.parametrize("name, device", [OF_EXPERTS[0], *(pytest.param(*case, marks=pytest.mark.long) for case in OF_EXPERTS[1:])])
def test_experts_run_by_kernels(monkeypatch: pytest.MonkeyPatch, name: str, device: str) -> None:
    """Prompt and decodes; gpt-oss has biases and a clamped gate, GLM-4.5 sigmoids with a bias, groups and a shared expert,
    DeepSeek-V2 products with a matrix of each head.

    Attention of all but gpt-oss runs by the reference, for which tinygrad would use matrix instructions that the emulator does not have.
    """
    monkeypatch.setattr(USE_TC, "value", 0)
    with np.load(GOLDEN / name / "golden.npz") as data:
        prompt, expected = data["prompt_0"].tolist(), data["tokens_0"][:TOKENS].tolist()
    races = name != "deepseek2"  # the reference stores latents of padded rows in one place
    with cuda_device(seed=5, races=races) if device == "CUDA" else metal_device(races=races):
        registry.forget_choices()
        with LLM(GOLDEN / name, device=device, dtype="float16", skip_tokenizer_init=True, max_num_seqs=2, **OPTIONS[name]) as llm:
            assert llm.generate([{"prompt_token_ids": prompt}], GREEDY)[0].outputs[0].token_ids == expected
        ran = {choice.stem: choice.variant for choice in registry.choices(device) if "load" not in choice.shape}
        reasons = {choice.why for choice in registry.choices(device) if choice.variant == "ref"}
    kernels = (*EXPERTS, *ATTENTION) if name == "gpt-oss" else EXPERTS
    assert {ran[stem] for stem in kernels} == {"sm_80" if device == "CUDA" else "apple7"}
    assert all(any(part in reason for reason in reasons) for part in REASONS[name])


@pytest.mark.long
@pytest.mark.parametrize("device", ["CUDA", "METAL"])
def test_the_layer_for_drafts_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str) -> None:
    """Of a model with states and experts: after chunks of a prompt, and after steps whose guesses were accepted and rejected."""
    monkeypatch.setattr(USE_TC, "value", 0)
    with np.load(GOLDEN / "qwen3next" / "golden.npz") as data:
        prompt, expected = data["prompt_0"].tolist(), data["tokens_0"].tolist()
    model = gated.write_model("qwen3next", tmp_path, gated.fitted("qwen3next", [prompt + expected]))
    options = dict(max_num_seqs=2, max_model_len=64, max_num_batched_tokens=16, dtype="float16", skip_tokenizer_init=True)
    with cuda_device(seed=5) if device == "CUDA" else metal_device():
        registry.forget_choices()
        with LLM(model, device=device, speculative_config={"method": "mtp", "num_speculative_tokens": 2}, **options) as llm:
            (output,) = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
            assert output.outputs[0].token_ids == expected[:6]
            assert 0 < llm.engine.metrics.accepted_tokens < llm.engine.metrics.draft_tokens and llm.engine.speculation.on


@pytest.mark.long
@pytest.mark.parametrize("device", ["CUDA", "METAL"])
def test_recurrent_states_run_by_kernels(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A prompt in chunks, two sequences together, and decodes: without drafts, with one of two accepted, and with both."""
    monkeypatch.setattr(USE_TC, "value", 0)
    with np.load(GOLDEN / "qwen3.5" / "golden.npz") as data:
        prompt, expected = data["prompt_0"].tolist(), data["tokens_0"][:TOKENS].tolist()
    prompts, tokens = [{"prompt_token_ids": ids} for ids in (prompt, prompt)], []
    with cuda_device(seed=5) if device == "CUDA" else metal_device():
        registry.forget_choices()
        options = dict(
            device=device, dtype="float16", skip_tokenizer_init=True, max_num_seqs=2, max_model_len=64, max_num_batched_tokens=16
        )
        with LLM(GOLDEN / "qwen3.5", speculative_config="off", **options) as llm:
            outputs = llm.generate(prompts, GREEDY)
            tokens += [output.outputs[0].token_ids for output in outputs]
        with LLM(GOLDEN / "qwen3.5", **options) as llm:
            assert llm.engine.speculation.on, "auto"
            known = Oracle(outputs)
            for right in (1, 2):  # of two drafts
                _, controller = speculate(llm, lambda ids, n, right=right: known.right(ids, n)[:right] + known.wrong(ids, n)[right:], 2)
                tokens += [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
                assert controller.checked == [(2, right)] * 2
        assert tokens == [expected] * 6
        ran = {choice.variant for choice in registry.choices(device) if choice.stem == "gated_delta"}
    assert ran == {"sm_80" if device == "CUDA" else "apple7"}


@pytest.mark.parametrize("device", ["CUDA", "METAL"])
@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.long) for name in ("gemma2", "gemma3")), "ministral3"])
def test_recorded_tokens(name: str, device: str) -> None:
    with np.load(GOLDEN / name / "golden.npz") as data:
        prompt, expected = data["prompt_0"].tolist(), data["tokens_0"][:TOKENS].tolist()
    with cuda_device(seed=5) if device == "CUDA" else metal_device():
        registry.forget_choices()
        with LLM(GOLDEN / name, device=device, dtype="float16", skip_tokenizer_init=True, max_num_seqs=2, **OPTIONS[name]) as llm:
            assert llm.engine.runner.groups.blocks.count == (3 if name == "gemma3" else 1)
            assert llm.generate([{"prompt_token_ids": prompt}], GREEDY)[0].outputs[0].token_ids == expected
        reasons = {choice.why for choice in registry.choices(device) if choice.variant == "ref"}
        attention = {choice.variant for choice in registry.choices(device) if choice.stem in ATTENTION}
        products = {choice.variant for choice in registry.choices(device) if choice.stem == "matmul" and "normed" not in choice.shape}
    assert all(any(part in reason for reason in reasons) for part in REASONS[name]) and len(products) == 1 and "ref" not in products
    assert attention == {"sm_80" if device == "CUDA" else "apple7"}
