"""Adapters of families whose checkpoints differ from LLaMA's: matrices of several projections in one, rows in another order, norms of
outputs, biases, layers with recurrent states or inputs of their own, experts that all rows share. An adapter gives the tokens of the model
that it is merged into, from safetensors and from GGUF.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.models.test_parity import GOLDEN, open_model
from tests.tiny.adapters import ATTENTION, MLP, SHARED, merge, write_adapter
from tests.tiny.families import FAMILIES
from tests.tiny.to_gguf import write_gguf
from tinyvllm import LLM, LoRARequest, SamplingParams
from tinyvllm.errors import ModelError
from tinyvllm.weights.peft import WEIGHTS_NAME, read_adapter

PROMPTS = [{"prompt_token_ids": list(range(start, start + 21))} for start in (40, 90)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
LONG = ("ernie4.5-bias", "gemma2", "glm4", "granite4", "llama-bias", "olmo2", "phi4-mini", "qwen2", "qwen3", "qwen3.5", "smollm3")


def answers(llm: LLM, request: LoRARequest | None = None) -> list[dict[int, float]]:
    """The tokens with their log-probabilities."""
    outputs = llm.generate(PROMPTS, PARAMS, lora_request=request)
    return [{token: p.logprob for token, p in step.items()} for output in outputs for step in output.outputs[0].logprobs or []]


def check(model: Path, merged: Path, adapter: str, **options: Any) -> None:
    llm = open_model(model, enable_lora=True, **options)
    plain, got = answers(llm), answers(llm, LoRARequest("one", lora_path=adapter))
    wanted = answers(open_model(merged))
    assert got == [pytest.approx(each, abs=2e-3) for each in wanted] and [*map(list, got)] != [*map(list, plain)]


@pytest.mark.parametrize("name", ["phi3", "gemma4", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_an_adapter_gives_the_tokens_of_merged_weights(name, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", GOLDEN / name, size=0.3)
    check(GOLDEN / name, merge(GOLDEN / name, adapter, tmp_path / "merged", 2.0), str(adapter))


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama3.1", "phi3", "qwen3.5", "gemma4"])
def test_an_adapter_fits_the_model_of_a_gguf_file(name, tmp_path):
    """Whose rows of q and k, or heads of values, may be in another order than those of the adapter."""
    adapter = write_adapter(tmp_path / "adapter", GOLDEN / name, size=0.3)
    merged = merge(GOLDEN / name, adapter, tmp_path / "merged", 2.0)
    write_gguf(GOLDEN / name, tmp_path / "model.gguf", FAMILIES[name].gguf or "")
    check(tmp_path / "model.gguf", merged, str(adapter))


DELTA = [f"linear_attn.{part}" for part in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")]
JOINED = [f"linear_attn.{part}" for part in ("in_proj_qkvz", "in_proj_ba", "out_proj")]
MIXTURES = {
    "qwen3moe": ATTENTION,
    "qwen3next": [*ATTENTION, *JOINED, *SHARED],
    "qwen3.5moe": [*ATTENTION, *DELTA, *SHARED],
    "gemma4moe": [*ATTENTION, *MLP],
    "granitemoe": [*ATTENTION, "shared_mlp.input_linear", "shared_mlp.output_linear"],
    "glm4moe": [*ATTENTION, *MLP, *(name.replace("expert.", "experts.") for name in SHARED)],
}


@pytest.mark.parametrize("name", ["qwen3next", *(pytest.param(name, marks=pytest.mark.long) for name in MIXTURES if name != "qwen3next")])
def test_an_adapter_of_all_but_the_experts_of_a_mixture(name, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", GOLDEN / name, modules=MIXTURES[name], size=0.3)
    check(GOLDEN / name, merge(GOLDEN / name, adapter, tmp_path / "merged", 2.0), str(adapter))


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3next", "qwen3.5moe"])
def test_an_adapter_of_a_mixture_fits_its_gguf_file(name, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", GOLDEN / name, modules=MIXTURES[name], size=0.3)
    merged = merge(GOLDEN / name, adapter, tmp_path / "merged", 2.0)
    write_gguf(GOLDEN / name, tmp_path / "model.gguf", FAMILIES[name].gguf or "")
    check(tmp_path / "model.gguf", merged, str(adapter))


def test_modules_that_a_layer_does_without_are_left_out(tmp_path):
    """Gemma 4's last layers read the keys of others; some versions of transformers have their projections all the same."""
    plain = write_adapter(tmp_path / "plain", GOLDEN / "gemma4", modules=ATTENTION)
    padded = write_adapter(tmp_path / "padded", GOLDEN / "gemma4", modules=ATTENTION)
    tensors = load_file(padded / WEIGHTS_NAME)
    name = "base_model.model.model.layers.5.self_attn.k_proj.lora_A.weight"
    assert name not in tensors
    added = {name: np.ones((4, 64), np.float32), name.replace("lora_A", "lora_B"): np.ones((64, 4), np.float32)}
    save_file(tensors | added, padded / WEIGHTS_NAME)
    pool = open_model(GOLDEN / "gemma4", enable_lora=True).engine.runner.adapters
    assert pool.prepare(read_adapter(padded)).digest == pool.prepare(read_adapter(plain)).digest


@pytest.mark.parametrize(("module", "listed"), [
    ("mlp.experts.0.gate_proj", "layers 0 to 2 are linear_attn.in_proj_ba, linear_attn.in_proj_qkvz, linear_attn.out_proj, "),
    ("mlp.shared_expert_gate", "mlp.shared_expert.down_proj, .*, self_attn.k_proj, self_attn.o_proj, self_attn.q_proj, self_attn.v_proj"),
])  # fmt: skip
def test_modules_without_adapters_are_refused_by_name(module, listed, tmp_path):
    folder = write_adapter(tmp_path, GOLDEN / "qwen3next", modules=[module])
    with pytest.raises(ModelError, match=f"layers.0.{module}' is no module that adapters may change here; .*{listed}"):
        open_model(GOLDEN / "qwen3next", enable_lora=True).load_lora("one", folder)
