"""Adapters of families whose checkpoints differ from LLaMA's: matrices of several projections in one, rows in another order, norms of
outputs, biases. An adapter gives the tokens of the model that it is merged into, from safetensors and from GGUF.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.test_parity import GOLDEN, open_model
from tests.tiny.adapters import merge, write_adapter
from tests.tiny.families import FAMILIES
from tests.tiny.to_gguf import write_gguf
from tinyvllm import LLM, LoRARequest, SamplingParams

PROMPTS = [{"prompt_token_ids": list(range(start, start + 21))} for start in (40, 90)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
LONG = ("ernie4.5-bias", "gemma2", "granite4", "llama-bias", "olmo2", "phi4-mini", "qwen2", "qwen3", "smollm3")


def answers(llm: LLM, request: LoRARequest | None = None) -> list[dict[int, float]]:
    """The tokens with their log-probabilities."""
    outputs = llm.generate(PROMPTS, PARAMS, lora_request=request)
    return [{token: p.logprob for token, p in step.items()} for output in outputs for step in output.outputs[0].logprobs or []]


def check(model: Path, merged: Path, adapter: str) -> None:
    llm = open_model(model, enable_lora=True)
    plain, got = answers(llm), answers(llm, LoRARequest("one", lora_path=adapter))
    wanted = answers(open_model(merged))
    assert got == [pytest.approx(each, abs=2e-3) for each in wanted] and [*map(list, got)] != [*map(list, plain)]


@pytest.mark.parametrize("name", ["phi3", "glm4", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_an_adapter_gives_the_tokens_of_merged_weights(name, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", GOLDEN / name, size=0.3)
    check(GOLDEN / name, merge(GOLDEN / name, adapter, tmp_path / "merged", 2.0), str(adapter))


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama3.1", "phi3"])
def test_an_adapter_fits_the_model_of_a_gguf_file(name, tmp_path):
    """Whose rows of q and k may be in another order than those of the adapter."""
    adapter = write_adapter(tmp_path / "adapter", GOLDEN / name, size=0.3)
    merged = merge(GOLDEN / name, adapter, tmp_path / "merged", 2.0)
    write_gguf(GOLDEN / name, tmp_path / "model.gguf", FAMILIES[name].gguf or "")
    check(tmp_path / "model.gguf", merged, str(adapter))


def test_attention_of_a_mixture_of_experts_may_have_adapters(tmp_path):
    attention = [f"self_attn.{part}_proj" for part in "qkvo"]
    adapter = write_adapter(tmp_path / "adapter", GOLDEN / "qwen3moe", modules=attention, size=0.3)
    check(GOLDEN / "qwen3moe", merge(GOLDEN / "qwen3moe", adapter, tmp_path / "merged", 2.0), str(adapter))
