"""The engine on the emulated Mac with the variant apple7_matrix, selected by the user: nine sequences in one decode batch."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.emulator.metal_runtime import metal_device
from tinyvllm import LLM, SamplingParams
from tinyvllm.config import DEFAULT_MODEL as MODEL

PRODUCTS = ("matmul", "norm_gate_up_silu", "norm_qkv_rope_store", "norm_head")


def test_a_batch_of_nine_is_multiplied_by_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [{"prompt_token_ids": [0, 40 + i]} for i in range(9)]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    counts, token_ids = [], []
    for variant in ("apple7", "apple7_matrix"):
        monkeypatch.setenv("TINYVLLM_KERNELS", ",".join(f"{stem}={variant}" for stem in PRODUCTS))
        with metal_device() as mac, LLM(MODEL, device="METAL", max_model_len=64, max_num_seqs=16, quantization="q4_0") as llm:
            token_ids.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
            counts.append([Counter(command.name for command in commands.commands) for commands in mac.indirect][-1])
    assert counts[0]["matmul16"] == 0 and counts[0]["matvec"] > 0
    layers = counts[1]["attention_decode"]
    assert counts[1]["matmul16"] == 4 * layers + 1 and counts[1]["rope_store"] == layers and counts[1]["matvec"] == 0
    assert sum(a == b for a, b in zip(*token_ids, strict=True)) >= 8, "other bits, but rarely other tokens"
