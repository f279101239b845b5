"""Quantized checkpoints on the emulated GPU: every matrix is packed, and greedy tokens are those of the dequantized model in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulator.driver import cuda_device
from tests.engine import test_quantized as integers
from tests.engine import test_small_floats as small_floats
from tests.engine.test_kernels import prompts_of
from tests.tiny import quantized
from tests.tiny.quantized import awq, awq_settings
from tinyvllm import LLM, SamplingParams
from tinyvllm.backends import registry

LENGTHS = (5, 19)  # of prompts: few rows, many rows
TOKENS = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
PRODUCTS = ("matmul", "norm_head", "norm_gate_up_silu")
# Settings, matrices, other matrices, formats on the GPU; and a seed with which no greedy step is a near tie.
KINDS = integers.KINDS | {"awq": (awq_settings(64), awq(64), {}, {"INT4_G64", "F16"}, 1)} | small_floats.KINDS
LONG = {*KINDS} - {"nf4"}


@pytest.fixture(scope="module")
def driver():
    with cuda_device(seed=5) as driver:
        yield driver


def tokens_of(folder: Path, device: str, kind: str) -> tuple[list[list[int]], list[list[int]]]:
    """Greedy tokens of a checkpoint of a kind, all packed on the device, and those of the dequantized model in float64."""
    settings, quantize, more, formats, seed = KINDS[kind]
    quantized.write(folder, settings, quantize, more, seed)
    prompts = [ids[:length] for ids, length in zip(prompts_of(2, quantized.V), LENGTHS, strict=True)]
    registry.forget_choices()
    with LLM(folder / "quantized", device=device, max_model_len=64, skip_tokenizer_init=True, max_num_seqs=2) as llm:
        assert llm.engine.runner.weight_formats == formats
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], [GREEDY] * len(prompts))
    return [output.outputs[0].token_ids for output in outputs], [quantized.greedy(folder, ids, TOKENS) for ids in prompts]


def without_kernel(device: str) -> set[str]:
    """Which of products and attention the reference ran, or nothing did."""
    choices = [choice for choice in registry.choices(device) if "load" not in choice.shape]
    by_reference = {choice.stem for choice in choices if choice.variant == registry.REFERENCE}
    return by_reference & {*PRODUCTS, "attention_decode", "attention_prefill"} | {"norm_head", "attention_decode"} - {
        c.stem for c in choices
    }


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.long if kind in LONG else ()) for kind in KINDS])
def test_greedy_tokens_are_those_of_the_dequantized_model(driver, tmp_path, caplog, kind):
    got, expected = tokens_of(tmp_path, "CUDA", kind)
    assert not without_kernel("CUDA")
    assert got == expected
    assert not [record for record in caplog.records if "become floats" in record.getMessage()]
