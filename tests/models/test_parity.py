"""Parity with transformers without PyTorch: the golden checkpoints of tests/tiny/golden, which transformers wrote and evaluated.

For every family the logits of the prompt's recorded positions must be within 2e-3 of transformers' and 64 greedy tokens must be the
same, with the prompts run together in one batch. The same weights from a GGUF file must do the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.tiny.families import FAMILIES, MAX_MODEL_LEN, STEPS
from tests.tiny.to_gguf import dequantized, gguf_tensors, read_folder, write_gguf
from tinyvllm import LLM, SamplingParams
from tinyvllm.config.engine import resolve
from tinyvllm.runner import opened

GOLDEN = Path(__file__).parents[1] / "tiny" / "golden"
TOLERANCE = 2e-3
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)


@dataclass(frozen=True)
class Prompt:
    """ids, the max_model_len to run them in; positions [n] and transformers' logits there [n, V] float32; its greedy tokens."""

    context: int
    ids: list[int]
    positions: np.ndarray
    logits: np.ndarray
    tokens: list[int]


def read_golden(name: str) -> list[Prompt]:
    with np.load(GOLDEN / name / "golden.npz") as data:
        return [
            Prompt(context, data[f"prompt_{i}"].tolist(), data[f"positions_{i}"], data[f"logits_{i}"], data[f"tokens_{i}"].tolist())
            for i, context in enumerate(FAMILIES[name].contexts)
        ]


def open_model(path: Path, context: int = MAX_MODEL_LEN, **options: Any) -> LLM:
    return LLM(str(path), dtype="float32", max_model_len=context, max_num_seqs=2, skip_tokenizer_init=True, **options)


def greedy(llm: LLM, prompts: list[Prompt]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt.ids} for prompt in prompts], GREEDY)
    return [list(output.outputs[0].token_ids) for output in outputs]


def check(path: Path, name: str) -> None:
    """Fails unless the model at `path` has the logits and greedy tokens of the golden checkpoint `name`."""
    golden = read_golden(name)
    for context in sorted({prompt.context for prompt in golden}):
        prompts = [prompt for prompt in golden if prompt.context == context]
        llm = open_model(path, context)
        check_logits(llm, max(prompts, key=lambda prompt: len(prompt.ids)))  # the greedy tokens tell of the others; a length is a capture
        assert greedy(llm, prompts) == [prompt.tokens for prompt in prompts]


def check_in_pieces(path: Path, name: str) -> None:
    """As `check`, with prompts in chunks of 32 tokens: each alone, and then all of a context in one batch, with their prefixes cached."""
    golden = read_golden(name)
    for context in sorted({prompt.context for prompt in golden}):
        prompts = [prompt for prompt in golden if prompt.context == context]
        llm = open_model(path, context, max_num_batched_tokens=32)
        check_logits(llm, max(prompts, key=lambda prompt: len(prompt.ids)))
        assert [greedy(llm, [prompt])[0] for prompt in prompts] == [prompt.tokens for prompt in prompts]
        outputs = llm.generate([{"prompt_token_ids": prompt.ids} for prompt in prompts], GREEDY)
        assert all(output.num_cached_tokens > 0 for output in outputs)
        assert [list(output.outputs[0].token_ids) for output in outputs] == [prompt.tokens for prompt in prompts]


def check_logits(llm: LLM, prompt: Prompt) -> None:
    logits = llm.prompt_logits(prompt.ids)
    assert logits.shape == (len(prompt.ids), prompt.logits.shape[1])
    error = np.abs(logits[prompt.positions] - prompt.logits).max(axis=1)
    worst = int(error.argmax())
    assert error.max() < TOLERANCE, f"logits off by {error.max():.4g} at position {prompt.positions[worst]} of {len(prompt.ids)}"


# Their kernels, names and keys are in the plain suite by a family with the same policies; the rest, half a minute, is long.
RARE = frozenset(
    ("qwen2moe", "gpt-oss-clamped", "granitemoe", "glm4moe", "dots1", "ernie4.5moe", "deepseek2-groups", "glm4moelite", "qwen3next")
    + ("llama1", "tinyllama", "olmo2", "mistral", "granite")  # as llama2, llama2, olmo3, qwen2-window and granite4
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in RARE else ()) for name in FAMILIES])
def test_safetensors(name: str) -> None:
    check(GOLDEN / name, name)


# files of the others are long, too: their folders are in the plain suite
FILES = frozenset(("llama2", "qwen3", "gpt-oss", "gemma3", "deepseek2", "gpt2", "qwen2moe", "glm4moe", "qwen3next"))


@pytest.mark.parametrize(
    "name", [name if name in FILES else pytest.param(name, marks=pytest.mark.long) for name, family in FAMILIES.items() if family.gguf]
)
def test_gguf(name: str, tmp_path: Path) -> None:
    write_gguf(GOLDEN / name, tmp_path / "model.gguf", FAMILIES[name].gguf or "")
    check_in_pieces(tmp_path / "model.gguf", name)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama2", "F16"),
        ("llama2", "Q8_0"),
        ("qwen3moe", "Q8_0"),
        ("qwen3moe", "Q4_0"),
        pytest.param("deepseek2", "Q8_0", marks=pytest.mark.long),
    ],
)
def test_quantized_gguf_equals_its_dequantized_weights(name: str, kind: str, tmp_path: Path) -> None:
    folder, architecture = GOLDEN / name, FAMILIES[name].gguf or ""
    tensors = gguf_tensors(read_folder(folder), json.loads((folder / "config.json").read_text()), architecture)
    write_gguf(folder, tmp_path / "packed.gguf", architecture, kind)
    write_gguf(folder, tmp_path / "plain.gguf", architecture, tensors=dequantized(tensors, kind))
    prompts = read_golden(name)
    packed, plain = open_model(tmp_path / "packed.gguf"), open_model(tmp_path / "plain.gguf")
    np.testing.assert_allclose(packed.prompt_logits(prompts[1].ids), plain.prompt_logits(prompts[1].ids), rtol=0, atol=TOLERANCE)
    assert greedy(packed, prompts) == greedy(plain, prompts)


@pytest.mark.long
def test_a_gguf_file_with_one_matrix_for_keys_and_values(tmp_path: Path) -> None:
    folder = GOLDEN / "deepseek2"
    config = json.loads((folder / "config.json").read_text())
    tensors = gguf_tensors(read_folder(folder), config, "deepseek2", split_kv_b=False)
    assert "blk.0.attn_kv_b.weight" in tensors
    write_gguf(folder, tmp_path / "model.gguf", "deepseek2", tensors=tensors)
    golden = read_golden("deepseek2")
    assert greedy(open_model(tmp_path / "model.gguf"), golden) == [prompt.tokens for prompt in golden]


def experts_apart(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As the first GGUF files of Mixtral have them."""
    found = {}
    for name, value in tensors.items():
        each = {name.replace("_exps.", f".{expert}."): matrix for expert, matrix in enumerate(value)} if "_exps." in name else {name: value}
        found |= each
    return found


def gate_and_up_in_one(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As llama.cpp's converter writes them where it fuses them."""
    found = {name: value for name, value in tensors.items() if "ffn_gate_exps" not in name and "ffn_up_exps" not in name}
    gates = {name: value for name, value in tensors.items() if "ffn_gate_exps" in name}
    joined = {name: np.concatenate([value, tensors[name.replace("gate", "up")]], axis=1) for name, value in gates.items()}
    return found | {name.replace("ffn_gate_exps", "ffn_gate_up_exps"): value for name, value in joined.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kind", "layout"),
    [("mixtral", "F32", experts_apart), ("mixtral", "Q8_0", experts_apart), ("qwen3moe", "Q8_0", gate_and_up_in_one)],
)
def test_other_layouts_of_experts_in_gguf(name: str, kind: str, layout: Callable[..., dict[str, np.ndarray]], tmp_path: Path) -> None:
    """The same tokens as with the experts of a layer in three tensors."""
    folder, architecture, golden = GOLDEN / name, FAMILIES[name].gguf or "", read_golden(name)
    tensors = gguf_tensors(read_folder(folder), json.loads((folder / "config.json").read_text()), architecture)
    write_gguf(folder, tmp_path / "usual.gguf", architecture, kind, tensors=tensors)
    write_gguf(folder, tmp_path / "other.gguf", architecture, kind, tensors=layout(tensors))
    usual, other = open_model(tmp_path / "usual.gguf"), open_model(tmp_path / "other.gguf")
    assert other.engine.runner.weight_formats == usual.engine.runner.weight_formats
    assert greedy(other, golden) == greedy(usual, golden) and (kind != "F32" or greedy(other, golden) == [each.tokens for each in golden])


def test_norms_and_convolutions_as_mlx_writes_them(tmp_path: Path) -> None:
    """Norms' weights whole, as no other file of the family has them, and channels of convolutions last."""
    tensors = read_folder(GOLDEN / "qwen3.5")
    for name, value in tensors.items():
        if name.endswith("conv1d.weight"):
            tensors[name] = np.ascontiguousarray(np.moveaxis(value, 2, 1))
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            tensors[name] = value + 1
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(GOLDEN / "qwen3.5" / "config.json", tmp_path)
    check(tmp_path, "qwen3.5")


@pytest.mark.long
def test_experts_of_a_layer_in_one_tensor(tmp_path: Path) -> None:
    """As Qwen3.5 is published, with a layer for drafts, which is not read."""
    stored = read_folder(GOLDEN / "qwen3.5moe")
    tensors = {name: value for name, value in stored.items() if ".experts." not in name} | {"mtp.fc.weight": np.ones((4, 4), np.float32)}
    config = json.loads((GOLDEN / "qwen3.5moe" / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        own = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([stored[f"{own}.{expert}.{part}_proj.weight"] for expert in range(config["num_experts"])])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{own}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{own}.down_proj": down}
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(GOLDEN / "qwen3.5moe" / "config.json", tmp_path)
    check(tmp_path, "qwen3.5moe")


def old_keys(config: dict[str, Any]) -> dict[str, Any]:
    """`config` as transformers 4 wrote it, which is how most checkpoints on the hub look."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["torch_dtype"] = config.pop("dtype")
    if (partial := rope.pop("partial_rotary_factor", None)) is not None:
        config["partial_rotary_factor"] = partial
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    if rope["rope_type"] == "longrope":
        config["rope_scaling"] = {"type": "longrope", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    else:
        config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config.pop("head_dim" if config["model_type"] in ("llama", "mistral") else "layer_types", None)
    return config


def published_qwen35(config: dict[str, Any]) -> dict[str, Any]:
    """With what positions in images need, and without a list of the layers."""
    config.pop("layer_types")
    rope = config["rope_parameters"] | {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
    return config | {"rope_parameters": rope, "attn_output_gate": True, "full_attention_interval": 2, "mtp_num_hidden_layers": 1}


def hub_ernie(config: dict[str, Any]) -> dict[str, Any]:
    """ERNIE-4.5 as it was published before transformers had the family: another class name, and the default, tied, not spelt out."""
    config.pop("tie_word_embeddings")
    return config | {"architectures": ["Ernie4_5_ForCausalLM"]}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama3.1", old_keys),
        ("llama-linear", old_keys),
        ("phi3-partial", old_keys),
        ("phi3-longrope", old_keys),
        ("qwen2-window", old_keys),
        ("qwen3moe", old_keys),
        ("ernie4.5", hub_ernie),
        ("qwen3.5", published_qwen35),
    ],
)
def test_other_spellings_of_the_config(name: str, change: Callable[[dict[str, Any]], dict[str, Any]], tmp_path: Path) -> None:
    """They are read as the same model, of the same weights; its logits and tokens are those of `test_safetensors`."""
    shutil.copytree(GOLDEN / name, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(change(config)))
    usual, other = (opened.open_model(resolve(path, device="CPU", dtype="float32"), "CPU") for path in (GOLDEN / name, tmp_path))
    assert other.config == usual.config
    assert other.recipes == usual.recipes


def test_gpt2_with_the_names_and_masks_of_the_hub(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "gpt2" / "config.json", tmp_path)
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(GOLDEN / "gpt2" / "model.safetensors").items()}
    tensors |= {f"h.{layer}.attn.bias": np.tril(np.ones((1, 1, 256, 256), np.float32)) for layer in range(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    check(tmp_path, "gpt2")
