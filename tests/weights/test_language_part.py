"""The language model of a checkpoint that has parts for images: the tokens of the text-only checkpoint, in the layouts of both writers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.test_parity import GOLDEN, check
from tests.tiny.to_gguf import write_gguf
from tinyvllm.errors import ModelError
from tinyvllm.weights.checkpoint import open_checkpoint, open_description
from tinyvllm.weights.mapping import TensorRecord
from tinyvllm.weights.safetensors import read_safetensors

WHOLE = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "ministral3": "Mistral3ForConditionalGeneration",
    "mistral": "Mistral3ForConditionalGeneration",
    "qwen2": "Qwen2_5_VLForConditionalGeneration",
    "qwen3.5": "Qwen3_5ForConditionalGeneration",
}
OTHERS = "vision_tower.patch_conv.weight", "multi_modal_projector.linear.weight"
ONES = TensorRecord("", "F32", (4, 4), np.ones(16, np.float32).view(np.uint8))


def renamed(name: str, version: int) -> str:
    if version >= 5:
        return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
    return f"language_model.{name}"


def written(folder: Path, family: str, version: int, **whole: Any) -> Path:
    """The golden checkpoint `family` as the language model of one that has a vision tower; `whole` replaces keys of its description."""
    config = json.loads((GOLDEN / family / "config.json").read_text())
    text = {key: value for key, value in config.items() if key not in ("architectures", "eos_token_id")}
    described = {"architectures": [WHOLE[family]], "model_type": family, "eos_token_id": config["eos_token_id"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(described | {"vision_config": {"hidden_size": 4}} | whole))
    tensors = {renamed(name, version): tensor for name, tensor in read_safetensors(GOLDEN / family / "model.safetensors").items()}
    outer = "model." if version >= 5 else ""
    tensors |= {outer + name: ONES for name in OTHERS}
    save(folder, tensors)
    return folder


def save(folder: Path, tensors: dict[str, TensorRecord]) -> None:
    header, at = dict[str, Any](), 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.format, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    body = b"".join(tensor.data.tobytes() for tensor in tensors.values())
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)


@pytest.mark.parametrize(("family", "version"), [("gemma3", 4), ("gemma3", 5), ("ministral3", 5), ("mistral", 4), ("qwen3.5", 5)])
def test_tokens_are_those_of_the_language_model(tmp_path: Path, family: str, version: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check(written(tmp_path, family, version), family)
    assert "left out: 'vision_tower' (1 tensors), 'multi_modal_projector' (1 tensors)" in caplog.text
    assert open_checkpoint(tmp_path).config["eos_token_id"] == 2, "of the whole"


def test_a_layer_for_drafts_belongs_to_the_language_model(tmp_path: Path) -> None:
    written(tmp_path, "qwen3.5", 5)
    save(tmp_path, read_safetensors(tmp_path / "model.safetensors") | {"mtp.fc.weight": ONES})
    assert "mtp.fc.weight" in open_checkpoint(tmp_path).tensors


@pytest.mark.parametrize("head", [False, True])
def test_where_the_descriptions_contradict_each_other_a_head_in_the_file_decides(tmp_path: Path, head: bool) -> None:
    """transformers 5 ties Mistral 3 by the whole's key, whatever text_config says, and leaves the head out of the file."""
    written(tmp_path, "ministral3", 5, tie_word_embeddings=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {name: one for name, one in read_safetensors(tmp_path / "model.safetensors").items() if not name.startswith("lm_head.")}
    save(tmp_path, tensors | ({"lm_head.weight": ONES} if head else {}))
    assert open_checkpoint(tmp_path).config["tie_word_embeddings"] is not head


def test_a_description_of_one_level(tmp_path: Path) -> None:
    """That of Qwen2.5-VL is the language model's, with a `vision_config` in it, and its tensors have the language model's names."""
    config = json.loads((GOLDEN / "qwen2" / "config.json").read_text())
    image = {"architectures": [WHOLE["qwen2"]], "model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 4}}
    scaling = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    (tmp_path / "config.json").write_text(json.dumps(config | image | scaling))
    save(tmp_path, dict(read_safetensors(GOLDEN / "qwen2" / "model.safetensors").items()) | {"visual.patch_embed.proj.weight": ONES})
    check(tmp_path, "qwen2")


@pytest.mark.parametrize(("family", "architecture"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3moe", "qwen3vlmoe")])
def test_gguf_files_of_language_models_are_those_of_their_families(tmp_path: Path, family: str, architecture: str) -> None:
    """llama.cpp has the parts for images in a file of their own."""
    path = tmp_path / "model.gguf"
    write_gguf(GOLDEN / family, path, architecture)
    check(path, family)


def test_what_a_published_description_leaves_out_is_the_familys(tmp_path: Path) -> None:
    """That of Gemma 3 4B names six of its sizes."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = open_description(tmp_path).config
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"], config["vocab_size"]) == (8, 4, 256, 262_208)
    assert (config["hidden_size"], config["sliding_window"], config["eos_token_id"]) == (2560, 1024, [1, 106])
    assert config["architectures"] == ["Gemma3ForCausalLM"]


@pytest.mark.parametrize(
    ("whole", "expected"),
    [
        ({"text_config": None}, "text_config must be an object that describes the language model, got None"),
        ({"text_config": {"model_type": "llama"}}, "model_type 'llama' is not supported in this model; supported are mistral, ministral3"),
        ({"text_config": {"model_type": ["mistral"]}}, "is not supported in this model"),
    ],
)
def test_descriptions_that_cannot_be_read_are_named(tmp_path: Path, whole: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        open_checkpoint(written(tmp_path, "ministral3", 5, **whole))


def test_a_tensor_under_both_names_is_an_error(tmp_path: Path) -> None:
    written(tmp_path, "ministral3", 4)
    tensors = read_safetensors(tmp_path / "model.safetensors")
    tensors["model.language_model.norm.weight"] = tensors["language_model.model.norm.weight"]
    save(tmp_path, tensors)
    with pytest.raises(
        ModelError, match="'model.language_model.norm.weight' is there twice|'language_model.model.norm.weight' is there twice"
    ):
        open_checkpoint(tmp_path)
