"""Adapters of the experts that rows choose, module by module and as PEFT writes parameters of all experts, and of latent attention: they
give the tokens of the model that they are merged into, and change no bit of a request without one.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.models.test_adapters import PARAMS, PROMPTS, check
from tests.models.test_parity import GOLDEN, open_model
from tests.tiny.adapters import in_float32, merge, write_adapter
from tests.tiny.families import FAMILIES
from tests.tiny.to_gguf import read_folder, write_gguf
from tinyvllm import LLM, LoRARequest
from tinyvllm.errors import ArgumentError, FormatError, ModelError
from tinyvllm.weights.peft import CONFIG_NAME, WEIGHTS_NAME, read_adapter

RANK, SCALE = 3, 2.0
LATENT = [f"self_attn.{part}" for part in ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")]


def experts_of(name: str) -> list[str]:
    """The modules of all experts in the golden checkpoint `name`, layer by layer the same."""
    parts = (tensor.removesuffix(".weight").split(".", 3)[3] for tensor in read_folder(GOLDEN / name) if ".experts." in tensor)
    return sorted(set(parts))


@pytest.mark.parametrize(
    "name", ["qwen3moe", *(pytest.param(name, marks=pytest.mark.long) for name in ("mixtral", "qwen3.5moe", "ernie4.5moe"))]
)
def test_an_adapter_of_each_expert(name, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", GOLDEN / name, modules=experts_of(name), size=0.3)
    check(GOLDEN / name, merge(GOLDEN / name, adapter, tmp_path / "merged", SCALE), str(adapter), lora_experts=True)


@pytest.mark.parametrize("name", ["deepseek2", *(pytest.param(name, marks=pytest.mark.long) for name in ("deepseek3", "glm4moelite"))])
def test_an_adapter_of_latent_attention(name, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", GOLDEN / name, modules=LATENT, size=0.3)
    assert {f"model.layers.1.{part}" for part in LATENT[3:]} <= read_adapter(adapter).modules.keys()
    check(GOLDEN / name, merge(GOLDEN / name, adapter, tmp_path / "merged", SCALE), str(adapter))


@pytest.mark.long
@pytest.mark.parametrize("name", ["deepseek2", "qwen3moe"])
def test_an_adapter_fits_the_model_of_a_gguf_file(name, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", GOLDEN / name, modules=[*LATENT, *experts_of(name)], size=0.3)
    merged = merge(GOLDEN / name, adapter, tmp_path / "merged", SCALE)
    write_gguf(GOLDEN / name, tmp_path / "model.gguf", FAMILIES[name].gguf or "")
    check(tmp_path / "model.gguf", merged, str(adapter), lora_experts=True)


def parameters(model: Path, folder: Path, seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Write an adapter of the parameters of all experts, as PEFT 0.21 does; its A [X, r, I] and B [X, O, r] by the parameter's name."""
    random, config = np.random.default_rng(seed), json.loads((model / "config.json").read_text())
    X, E = config.get("num_experts") or config["num_local_experts"], config["hidden_size"]
    F = config.get("moe_intermediate_size") or config["intermediate_size"]
    tensors, found = dict[str, np.ndarray](), {}
    for layer in range(config["num_hidden_layers"]):
        for part, suffix, I, O in (("gate_up_proj", ".base_layer", E, 2 * F), ("down_proj", "", F, E)):
            a, b = random.standard_normal((X, RANK, I)) * I**-0.5, random.standard_normal((X, O, RANK)) * 0.3
            module = f"model.layers.{layer}.mlp.experts"
            tensors[f"base_model.model.{module}{suffix}.lora_A.weight"] = a.reshape(X * RANK, I).astype(np.float32)
            tensors[f"base_model.model.{module}{suffix}.lora_B.weight"] = np.ascontiguousarray(
                b.transpose(1, 2, 0).reshape(O, RANK * X), np.float32
            )
            found[f"{module}.{part}"] = a, b
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "target_modules": [], "peft_version": "0.21.2"}
    folder.mkdir()
    settings["target_parameters"] = ["mlp.experts.gate_up_proj", "experts.down_proj"]
    (folder / CONFIG_NAME).write_text(json.dumps(settings))
    save_file(tensors, folder / WEIGHTS_NAME)
    return found


def merged_parameters(name: str, low: dict[str, tuple[np.ndarray, np.ndarray]], folder: Path) -> Path:
    weights = read_folder(GOLDEN / name)
    for parameter, (a, b) in low.items():
        change = SCALE * b @ a  # [X, O, I]
        if parameter in weights:  # [X, I, O] in gpt-oss
            weights[parameter] = weights[parameter] + change.swapaxes(1, 2)
            continue
        experts, part = parameter.rsplit(".", 1)
        for expert, own in enumerate(change):
            halves = dict(zip(("gate_proj", "up_proj"), np.split(own, 2), strict=True)) if part == "gate_up_proj" else {part: own}
            for projection, delta in halves.items():
                weights[f"{experts}.{expert}.{projection}.weight"] = weights[f"{experts}.{expert}.{projection}.weight"] + delta
    return in_float32(GOLDEN / name, folder, weights)


@pytest.mark.parametrize("name", ["gpt-oss", pytest.param("qwen3moe", marks=pytest.mark.long)])
def test_an_adapter_of_the_parameters_of_all_experts(name, tmp_path):
    """Of gpt-oss, whose rows of gate and up alternate, and whose experts have biases."""
    low = parameters(GOLDEN / name, tmp_path / "adapter")
    check(GOLDEN / name, merged_parameters(name, low, tmp_path / "merged"), str(tmp_path / "adapter"), lora_experts=True)


def answers(llm: LLM, prompts: list[dict[str, list[int]]], lora: list[LoRARequest | None]) -> list[list[dict[int, float]]]:
    outputs = llm.generate(prompts, PARAMS, lora_request=lora)
    return [[{token: p.logprob for token, p in step.items()} for step in output.outputs[0].logprobs or []] for output in outputs]


@pytest.mark.parametrize("name", ["qwen3moe", pytest.param("deepseek2", marks=pytest.mark.long)])
def test_no_bit_depends_on_the_batch(name, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", GOLDEN / name, modules=[*LATENT, *experts_of(name)], size=0.3)
    one = LoRARequest("one", lora_path=str(adapter))
    llm, plain = open_model(GOLDEN / name, enable_lora=True, lora_experts=True), open_model(GOLDEN / name)
    mixed = answers(llm, PROMPTS, [one, None])
    assert mixed[1:] == answers(plain, PROMPTS[1:], [None])
    assert mixed[:1] == answers(llm, PROMPTS[:1], [one])


def test_room_for_experts_is_asked_for(tmp_path):
    adapter = write_adapter(tmp_path / "adapter", GOLDEN / "qwen3moe", modules=experts_of("qwen3moe"))
    with pytest.raises(ModelError, match=r"are self_attn.k_proj, .*; of experts that rows choose with lora_experts"):
        open_model(GOLDEN / "qwen3moe", enable_lora=True).load_lora("one", adapter)
    with pytest.raises(ModelError, match="lora_experts: models of llama have no experts that adapters may change"):
        open_model(GOLDEN / "llama2", enable_lora=True, lora_experts=True)
    with pytest.raises(ArgumentError, match="lora_experts=True has no use without enable_lora"):
        open_model(GOLDEN / "qwen3moe", lora_experts=True)


def test_parameters_that_cannot_be_read_are_refused_by_name(tmp_path):
    parameters(GOLDEN / "qwen3moe", tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / CONFIG_NAME).read_text())

    def refused(expected: str, **changes: object) -> None:
        (tmp_path / "adapter" / CONFIG_NAME).write_text(json.dumps(config | changes))
        with pytest.raises((ModelError, FormatError), match=expected):
            read_adapter(tmp_path / "adapter")

    refused("target_parameters of peft_version '0.18.1' are not supported.* with PEFT 0.19.1 or later", peft_version="0.18.1")
    refused("of peft_version 'None'", peft_version=None)
    refused("must be a list of names that end with experts.gate_up_proj or experts.down_proj", target_parameters=["q.weight"])
    refused("its rank is 5", r=5)
    refused("target_modules does not name 'model.layers.0.mlp.experts", target_parameters=[])


def test_two_adapters_of_one_parameter_are_refused(tmp_path):
    parameters(GOLDEN / "qwen3moe", tmp_path / "adapter")
    path = tmp_path / "adapter" / WEIGHTS_NAME
    tensors = load_file(path)
    for matrix in "AB":
        name = f"base_model.model.model.layers.0.mlp.experts.lora_{matrix}.weight"
        tensors[name.replace(".lora", ".base_layer.lora")] = tensors[name]
    save_file(tensors, path)
    pool = open_model(GOLDEN / "qwen3moe", enable_lora=True, lora_experts=True).engine.runner.adapters
    with pytest.raises(FormatError, match="are both of 'model.layers.0.mlp.experts.down_proj'"):
        pool.prepare(read_adapter(tmp_path / "adapter"))
