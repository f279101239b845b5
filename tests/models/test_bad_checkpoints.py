"""Checkpoints that cannot be run are refused when the model is opened, in one line that says what is wrong with which file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.tiny.to_gguf import gguf_tensors, read_folder, write_gguf
from tinyvllm import LLM
from tinyvllm.errors import ArgumentError, FormatError, ModelError

GOLDEN = Path(__file__).parents[1] / "tiny" / "golden"
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the smallest whole checkpoint, float32 and in one file, for a test to damage."""
    return Path(shutil.copytree(GOLDEN / "llama2", tmp_path / "llama2"))


def refusal(path: Path, kind: type[ModelError] = ModelError) -> str:
    """The message with which opening `path` is refused; it must be one line and of class `kind`."""
    with pytest.raises(kind) as caught:
        LLM(str(path), dtype="float32", max_model_len=64, max_num_seqs=1, skip_tokenizer_init=True)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def change_config(folder: Path, **changes: Any) -> None:
    """Sets keys of config.json; a value of ... takes the key away."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_unsupported_architecture_is_named_with_the_supported_ones(folder: Path) -> None:
    change_config(folder, architectures=["MambaForCausalLM"], model_type="mamba")
    message = refusal(folder)
    names = (
        "Llama, ",
        "Qwen3, ",
        "Ernie4_5_Moe, ",
        "GptOss, ",
        "DeepseekV3",
        "Glm4MoeLite",
        "(each followed by ForCausalLM)",
        "GPT2LMHeadModel",
    )
    for name in ("'MambaForCausalLM' is not supported", *names):
        assert name in message


def test_unsupported_gguf_architecture_is_named(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    write_gguf(folder, tmp_path / "model.gguf", "rwkv7", tensors=gguf_tensors(read_folder(folder), config, "llama"))
    message = refusal(tmp_path / "model.gguf")
    assert "rwkv7" in message and "llama" in message and "qwen3moe" in message


def test_unknown_rope_scaling_is_named(folder: Path) -> None:
    change_config(folder, rope_parameters={"rope_type": "spiral", "rope_theta": 10000.0, "factor": 2.0})
    assert "spiral" in refusal(folder)


def test_unknown_activation_is_named(folder: Path) -> None:
    change_config(folder, hidden_act="relu6")
    assert "relu6" in refusal(folder)


def test_missing_tensor_is_named(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop(QUERY))
    message = refusal(folder)
    assert QUERY in message or "blk.1.attn_q.weight" in message


def test_missing_output_head_is_named_unless_tied(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight" in refusal(folder)


def test_missing_gguf_tensor_is_named(folder: Path, tmp_path: Path) -> None:
    tensors = gguf_tensors(read_folder(folder), json.loads((folder / "config.json").read_text()), "llama")
    del tensors["blk.0.ffn_up.weight"]
    write_gguf(folder, tmp_path / "model.gguf", "llama", tensors=tensors)
    assert "blk.0.ffn_up.weight" in refusal(tmp_path / "model.gguf")


def test_shape_that_contradicts_the_config_is_named_with_both_shapes(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({QUERY: np.zeros((64, 48), np.float32)}))
    message = refusal(folder)
    assert QUERY in message or "blk.1.attn_q.weight" in message
    assert "64, 48" in message and "64, 64" in message


def test_config_that_contradicts_the_tensors_is_refused(folder: Path) -> None:
    change_config(folder, vocab_size=300)
    message = refusal(folder)
    assert "300" in message and "256" in message


def test_more_layers_than_tensors(folder: Path) -> None:
    change_config(folder, num_hidden_layers=3)
    message = refusal(folder)
    assert "layers.2." in message or "blk.2." in message


def test_fewer_layers_than_tensors(folder: Path) -> None:
    change_config(folder, num_hidden_layers=1)
    message = refusal(folder)
    assert "layers.1." in message or "blk.1." in message


def test_bias_that_the_config_denies(folder: Path) -> None:
    bias = {"model.layers.0.self_attn.o_proj.bias": np.ones(64, np.float32)}
    change_tensors(folder, lambda tensors: tensors.update(bias))
    message = refusal(folder)
    assert "model.layers.0.self_attn.o_proj.bias" in message or "blk.0.attn_output.bias" in message


@pytest.mark.parametrize("keep", [0, 5, 300, 200_000], ids=["empty", "in the length", "in the header", "in the data"])
def test_truncated_safetensors(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors" in refusal(folder, FormatError)


def test_truncated_gguf(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(folder, path, "llama")
    for keep in (0, 6, 300, path.stat().st_size // 2):
        cut = tmp_path / f"cut{keep}.gguf"
        cut.write_bytes(path.read_bytes()[:keep])
        assert cut.name in refusal(cut, FormatError)


def test_shard_of_the_index_is_absent(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "llama3", tmp_path / "llama3"))
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refusal(folder)


def test_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    message = refusal(folder)
    assert str(folder) in message and "safetensors" in message


def test_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))


def test_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "config.json" in refusal(folder)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "\x00\x01"], ids=["empty", "cut", "no object", "binary"])
def test_config_that_is_not_a_json_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert "config.json" in refusal(folder, FormatError)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "architectures"])
def test_config_that_lacks_a_needed_key(folder: Path, key: str) -> None:
    change_config(folder, **{key: ...})
    assert key in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_attention_heads": 0}, "head"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_config_value_that_cannot_be_meant(folder: Path, changes: dict[str, Any], words: str) -> None:
    change_config(folder, **changes)
    assert words in refusal(folder)
