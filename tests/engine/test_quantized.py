"""Quantized checkpoints in the engine: greedy tokens of the dequantized model in float64, every matrix computed as packed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_kernels import kernels, prompts_of
from tests.engine.test_packed_files import formats_read
from tests.tiny import quantized
from tests.tiny.quantized import (
    gptq,
    gptq_settings,
    mlx,
    mlx_settings,
    shuffled,
)  # fmt: skip
from tinyvllm import LLM, SamplingParams
from tinyvllm.backends import registry
from tinyvllm.placement import Placement

MIXED = gptq_settings(4, 128, sym=False, dynamic={"+:.*v_proj": {"bits": 8, "group_size": 32}, "-:.*up_proj": {}})
KINDS = {
    "gptq with v in 8 bits and act-order": (
        MIXED | {}, gptq(4, 128, False, index=shuffled), {"v_proj": gptq(8, 32)}, {"INT4_G128", "INT8_G32", "F16"},
    ),
    "mlx with its ends": (mlx_settings(4, 64), mlx(4, 64), {"embed_tokens": mlx(4, 64), "lm_head": mlx(4, 64)}, {"INT4_G64"}),
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def open_folder(folder: Path, **options) -> LLM:
    return LLM(folder / "quantized", device="CPU", max_model_len=160, skip_tokenizer_init=True, max_num_seqs=2, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_the_dequantized_model(tmp_path, kind):
    settings, quantize, more, formats = KINDS[kind]
    folder, prompts = quantized.write(tmp_path, settings, quantize, more), prompts_of(2, quantized.V)
    with kernels(registry.usable_variants(Placement("CPU"))[0]), open_folder(folder) as llm:
        got = [answer.outputs[0].token_ids for answer in llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY)]
        assert formats_read() == formats
    assert got == [quantized.greedy(folder, ids, 12) for ids in prompts]
