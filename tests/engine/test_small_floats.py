"""Checkpoints of floats of a few bits in the engine: greedy tokens of the dequantized model in float64, every matrix as packed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_kernels import answers, greedy, kernels, prompts_of
from tests.tiny import quantized
from tests.tiny.quantized import ct_settings, mlx_settings
from tests.tiny.small_floats import bitsandbytes, fp8, mxfp4, mxfp8, nvfp4, settings
from tinyvllm import LLM, SamplingParams
from tinyvllm.backends import registry
from tinyvllm.placement import Placement

FINE = settings("fp8", activation_scheme="dynamic", weight_block_size=[128, 128])
BNB = settings("bitsandbytes", load_in_4bit=True)
NVFP4 = ct_settings("nvfp4-pack-quantized", 4, "tensor_group", 16, type="float")
MXFP8 = mlx_settings(8, 32, mode="mxfp8", **{f"model.layers.{i}.mlp.up_proj": {"mode": "mxfp4", "bits": 4} for i in range(2)})
ENDS = dict.fromkeys(("embed_tokens", "lm_head"), mxfp8(mlx=True))
# Settings, matrices, other matrices, formats; and a seed with which no greedy step is a near tie.
KINDS = {
    "fp8": (FINE, fp8((128, 128)), {}, {"FP8_G128", "F16"}, 11),
    "nvfp4": (NVFP4, nvfp4(mlx=False), {}, {"NVFP4_G128", "F16"}, 7),
    "nf4": (BNB, bitsandbytes(nested=True), {}, {"NF4", "F16"}, 1),
    "mlx with its ends": (MXFP8, mxfp8(mlx=True), {"up_proj": mxfp4(mlx=True)} | ENDS, {"MXFP8", "MXFP4"}, 12),
}


def open_folder(folder: Path, **options) -> LLM:
    return LLM(folder / "quantized", device="CPU", max_model_len=160, skip_tokenizer_init=True, **options)


@pytest.mark.parametrize("kind", [kind if kind == "nvfp4" else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS])
def test_greedy_tokens_are_those_of_the_dequantized_model(tmp_path, kind):
    config, quantize, more, formats, seed = KINDS[kind]
    folder, prompts = quantized.write(tmp_path, config, quantize, more, seed), prompts_of(2, quantized.V)
    with kernels(registry.usable_variants(Placement("CPU"))[0]), open_folder(folder, max_num_seqs=2) as llm:
        got = greedy(llm, prompts, 12)
        assert llm.engine.runner.weight_formats == formats
    assert got == [quantized.greedy(folder, ids, 12) for ids in prompts]


def test_fp8_has_the_same_bits_in_any_batch(tmp_path):
    folder = quantized.write(tmp_path, FINE, fp8((128, 128)))
    prompts = [{"prompt_token_ids": ids} for ids in prompts_of(5, quantized.V)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
    with open_folder(folder, max_num_seqs=1) as llm:
        alone = [answers(llm.generate([prompt], [params]))[0] for prompt in prompts]
    with open_folder(folder, max_num_seqs=5, max_num_batched_tokens=24) as llm:
        assert answers(llm.generate(prompts, [params] * 5)) == alone
