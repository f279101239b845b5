"""Adapters of experts and of latent attention over ranks: tokens and log-probabilities of one process, with all their bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.test_expert_adapters import LATENT, experts_of, parameters
from tests.tiny.adapters import ATTENTION, write_adapter
from tests.tiny.wide import with_wide_experts
from tinyvllm import LLM, LoRARequest, SamplingParams

PROMPTS = [{"prompt_token_ids": [3 + 7 * i % 240 for i in range(start, start + length)]} for start, length in ((0, 40), (5, 3), (9, 7))]
PARAMS = [SamplingParams(temperature=heat, seed=5, max_tokens=6, ignore_eos=True, logprobs=2) for heat in (0.0, 0.9, 0.0)]
CASES = [
    ("deepseek2", None, 2, 1),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in (
            ("qwen3moe", "q8_0", 2, 2),
            ("qwen3moe", "q4_k", 2, 1),
            ("mixtral", None, 1, 2),
            ("olmoe", None, 2, 1),
            ("gpt-oss", None, 2, 1),
        )
    ),
]


def answers(model: Path, adapters: list[Path], **options: Any) -> list[Any]:
    """Of requests with the first adapter, without one, and with the second; chunks divide the first prompt."""
    sizes = {"device": "CPU", "max_model_len": 64, "num_blocks": 32, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    lora = [LoRARequest("first", lora_path=str(adapters[0])), None, LoRARequest("second", lora_path=str(adapters[1]))]
    with LLM(model, enable_lora=True, lora_experts=True, max_loras=2, skip_tokenizer_init=True, **sizes, **options) as llm:
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in llm.generate(PROMPTS, PARAMS, lora_request=lora)]


@pytest.mark.parametrize(("name", "quantization", "tensor", "stages"), CASES)
def test_ranks_have_the_bits_of_one_process(name: str, quantization: str | None, tensor: int, stages: int, tmp_path: Path) -> None:
    """Experts have their rows of B of gate and up and their columns of A of down in each rank, heads their matrices of keys and values."""
    model, adapters = with_wide_experts(name, tmp_path / "model"), [tmp_path / "first", tmp_path / "second"]
    for seed, folder in enumerate(adapters):
        if name == "gpt-oss":
            parameters(model, folder, seed)
        else:
            write_adapter(folder, model, modules=[*ATTENTION, *LATENT, *experts_of(name)], size=0.3, seed=seed)
    expected = answers(model, adapters, quantization=quantization)
    found = answers(model, adapters, quantization=quantization, tensor_parallel_size=tensor, pipeline_parallel_size=stages)
    assert found == expected
    assert expected[1] == answers(model, adapters[::-1], quantization=quantization)[1] and expected[0] != expected[2]
