"""Quantized checkpoints in the engine: greedy tokens of the dequantized model in float64, every matrix computed as packed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.engine.test_kernels import greedy, kernels, prompts_of
from tests.tiny import quantized
from tests.tiny.quantized import (
    gptq,
    gptq_settings,
    mlx,
    mlx_settings,
    plain,
    shuffled,
    shuffled_each,
)  # fmt: skip
from tinyvllm import LLM
from tinyvllm.backends import registry
from tinyvllm.placement import Placement

ENDS = {"embed_tokens": mlx(4, 64), "lm_head": mlx(4, 64)}
MIXED = gptq_settings(4, 128, sym=False, dynamic={"+:.*v_proj": {"bits": 8}, "-:.*up_proj": {}})
# Settings, matrices, other matrices, formats; and a seed with which no greedy step is a near tie.
KINDS = {
    "gptq with v in 8 bits and act-order": (
        MIXED, gptq(4, 128, False, index=shuffled), {"v_proj": gptq(8, 128, index=shuffled)}, {"INT4_G128", "INT8_G128", "F16"}, 1
    ),
    "mlx with its ends, v and up in floats": (
        mlx_settings(4, 64), mlx(4, 64), ENDS | {"v_proj": plain, "up_proj": plain}, {"INT4_G64", "F16"}, 1
    ),
}  # fmt: skip


def open_folder(folder: Path, **options) -> LLM:
    return LLM(folder / "quantized", device="CPU", max_model_len=160, skip_tokenizer_init=True, max_num_seqs=2, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_the_dequantized_model(tmp_path, kind):
    settings, quantize, more, formats, seed = KINDS[kind]
    folder, prompts = quantized.write(tmp_path, settings, quantize, more, seed), prompts_of(2, quantized.V)
    with kernels(registry.usable_variants(Placement("CPU"))[0]), open_folder(folder) as llm:
        got = greedy(llm, prompts, 12)
        assert llm.engine.runner.weight_formats == formats
    assert got == [quantized.greedy(folder, ids, 12) for ids in prompts]


def test_what_becomes_floats_is_named_and_gives_the_same_tokens(tmp_path, caplog):
    """q, k and v with different orders have no x in common; groups of 16 columns have no format. Biases of zeros are left out."""
    settings = gptq_settings(4, 64, dynamic={"+:down": {"group_size": 16}})
    folder = quantized.write(tmp_path, settings, gptq(4, 64, index=shuffled_each), {"down_proj": gptq(4, 16), "up_proj": gptq(4, 64)})
    tensors = load_file(folder / "quantized" / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.bias"] = np.zeros(128, np.float16)
    save_file(tensors, folder / "quantized" / "model.safetensors")
    prompts = prompts_of(2, quantized.V)
    with kernels(registry.usable_variants(Placement("CPU"))[0]), open_folder(folder) as llm:
        got = greedy(llm, prompts, 8)
    (line,) = [record.getMessage() for record in caplog.records if "quantized checkpoint" in record.getMessage()]
    assert "10 of 14 matrices become floats" in line and "proj.weight' and 7 more: columns in an order of their own" in line
    assert "down_proj.weight' and 1 more: groups of 16 columns of 512" in line
    assert got == [quantized.greedy(folder, ids, 8) for ids in prompts]
