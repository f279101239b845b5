"""Descriptions that cannot be meant: every one is refused when the model is opened, before it is built, by a line that names the key."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.tiny import to_gguf
from tinyvllm import LLM
from tinyvllm.errors import ModelError, TinyvllmError, TokenizerError

GOLDEN = Path(__file__).parents[1] / "tiny" / "golden"
PAIRS = 8  # rotated pairs of the tiny LongRoPE model


def refusal(path: Path, kind: type[TinyvllmError] = ModelError, **options: Any) -> str:
    """The one line with which opening `path` is refused."""
    with pytest.raises(kind) as caught:
        LLM(str(path), **{"num_blocks": 8, "max_num_seqs": 1, "skip_tokenizer_init": True, **options})
    message = str(caught.value)
    assert message and "\n" not in message and len(message) < 300
    return message


def edit(path: Path, changes: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


def longrope(short: Any, long: Any, **values: Any) -> dict[str, Any]:
    return rope("longrope", short_factor=short, long_factor=long, **values)


ONES = [1.0] * PAIRS
CASES: list[tuple[str, dict[str, Any], str, str]] = [  # golden checkpoint, changes of config.json, the key, how the value is shown
    ("llama2", {"num_hidden_layers": 100_000}, "num_hidden_layers", "100000"),
    ("llama2", {"num_hidden_layers": 10**12}, "num_hidden_layers", "1000000000000"),
    ("llama2", {"quantization_config": {"quant_method": "squeezellm"}}, "quantization_config", "squeezellm"),
    ("llama2", {"num_hidden_layers": 900}, "num_hidden_layers", "900"),
    ("llama2", {"num_hidden_layers": 0}, "num_hidden_layers", "0"),
    ("llama2", {"num_attention_heads": 0}, "num_attention_heads", "0"),
    ("llama2", {"num_attention_heads": "4"}, "num_attention_heads", "'4'"),
    ("llama2", {"num_key_value_heads": 0}, "num_key_value_heads", "0"),
    ("llama2", {"hidden_size": -8}, "hidden_size", "-8"),
    ("llama2", {"hidden_size": 0}, "hidden_size", "0"),
    ("llama2", {"intermediate_size": 0}, "intermediate_size", "0"),
    ("llama2", {"vocab_size": 0}, "vocab_size", "0"),
    ("llama2", {"head_dim": 3}, "head_dim", "3"),
    ("llama2", {"max_position_embeddings": 0}, "max_position_embeddings", "0"),
    ("llama2", {"max_position_embeddings": 1}, "max_position_embeddings", "1"),
    ("llama2", {"rms_norm_eps": float("nan")}, "rms_norm_eps", "nan"),
    ("llama2", {"rms_norm_eps": 10**400}, "rms_norm_eps", "1000"),
    ("llama2", {"hidden_act": ["x"]}, "hidden_act", "['x']"),
    ("qwen3.5", {"linear_num_value_heads": 3}, "value heads", "3"),
    ("qwen3.5", {"linear_conv_kernel_dim": 1 << 40}, "linear_conv_kernel_dim", "1099511627776"),
    ("qwen3.5", {"layer_types": ["full_attention"] * 3}, "linear attention", "0 of 3"),
    ("qwen3.5", {"layer_types": ["sliding_attention"] * 3}, "layer_types", "sliding_attention"),
    ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate", "False"),
    ("llama2", {"architectures": "LlamaForCausalLM"}, "architectures", "'LlamaForCausalLM'"),
    ("llama2", {"eos_token_id": "x"}, "eos_token_id", "'x'"),
    ("llama2", {"eos_token_id": [2, None]}, "eos_token_id", "[2, None]"),
    ("llama2", {"eos_token_id": True}, "eos_token_id", "True"),
    ("llama2", {"rope_parameters": 5}, "rope_parameters", "5"),
    ("llama2", {"rope_parameters": []}, "rope_parameters", "[]"),
    ("llama2", rope("default", rope_theta=0), "rope_theta", "0"),
    ("llama2", rope("default", rope_theta=1.0), "rope_theta", "1.0"),
    ("llama2", rope("default", partial_rotary_factor=-0.5), "partial_rotary_factor", "-0.5"),
    ("llama2", rope("linear", factor=0), "factor", "0"),
    ("llama2", rope("linear", factor=-2.0), "factor", "-2.0"),
    ("llama2", rope("yarn", factor=4.0, rope_theta=1.0, original_max_position_embeddings=64), "rope_theta", "1.0"),
    ("llama2", rope("yarn", factor=4.0, original_max_position_embeddings=0), "original_max_position_embeddings", "0"),
    ("llama2", rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=0), "beta_fast", "0"),
    ("llama3.1", rope("llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0), "high_freq_factor", "4.0"),
    ("llama3.1", rope("llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0), "high_freq_factor", "1.0"),
    ("phi3-longrope", longrope(5, [1]), "short_factor", "5"),
    ("phi3-longrope", longrope(["a"] * PAIRS, ONES), "short_factor", "'a'"),
    ("phi3-longrope", longrope(ONES, "12345678"), "long_factor", "'12345678'"),
    ("phi3-longrope", longrope(ONES, [0.0] + ONES[1:]), "long_factor", "0.0"),
    ("phi3-longrope", longrope(ONES, ONES, original_max_position_embeddings=1), "original_max_position_embeddings", "1"),
    ("qwen2-window", {"layer_types": 5}, "layer_types", "5"),
    ("qwen2-window", {"layer_types": ["full_attention", 3]}, "layer_types", "3"),
    ("qwen2-window", {"layer_types": ["full_attention"]}, "layer_types", "['full_attention']"),
    ("qwen2-window", {"sliding_window": "x"}, "sliding_window", "'x'"),
    ("qwen3", {"num_attention_heads": 0, "head_dim": None}, "num_attention_heads", "0"),
    ("qwen3moe", {"num_hidden_layers": 10**12}, "num_hidden_layers", "1000000000000"),
    ("qwen3moe", {"num_experts": "x"}, "num_experts", "'x'"),
    ("qwen3moe", {"num_experts": None, "num_local_experts": 2.5}, "num_local_experts", "2.5"),
    ("qwen3moe", {"num_experts": 10**9}, "num_experts", "1000000000"),
    ("qwen3moe", {"decoder_sparse_step": 0}, "decoder_sparse_step", "0"),
    ("qwen3moe", {"mlp_only_layers": 3}, "mlp_only_layers", "3"),
    ("qwen3moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers", "['0']"),
    ("qwen3moe", {"num_experts_per_tok": 0}, "num_experts_per_tok", "0"),
    ("qwen3moe", {"num_experts_per_tok": 999}, "num_experts_per_tok", "999"),
    ("llama2", {"attention_multiplier": 0.5}, "attention_multiplier", "0.5"),
    ("llama2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping", "30.0"),
    ("llama2", {"no_rope_layers": [1, 0]}, "no_rope_layers", "[1, 0]"),
    ("llama2", {"sliding_window": 16}, "sliding_window", "16"),
    ("llama2", rope("default", mrope_section=[4, 2, 2]), "mrope_section", "mrope_section"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers", "[1, 0]"),
    ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers", "[1, 0, 2, 1]"),
    ("granite", {"logits_scaling": 0}, "logits_scaling", "0"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation", "'gelu'"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention", "True"),
    ("gemma3", {"layer_types": ["full_attention"]}, "layer_types", "['full_attention']"),
    ("gemma3", {"rope_parameters": {"sliding_attention": 3}}, "rope_parameters", "3"),
    ("deepseek2", {"attention_bias": True}, "attention_bias", "True"),
    ("deepseek2", {"norm_topk_prob": True}, "norm_topk_prob", "True"),
    ("deepseek2", {"topk_method": "noaux_tc"}, "topk_method", "'noaux_tc'"),
    ("deepseek2", {"moe_layer_freq": 2}, "moe_layer_freq", "2"),
    ("deepseek2", {"kv_lora_rank": 0}, "kv_lora_rank", "0"),
    ("deepseek3", {"scoring_func": "softmax"}, "scoring_func", "'softmax'"),
    ("deepseek3", {"qk_rope_head_dim": 7}, "rotary dimension", "7"),
    ("glm4moelite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types", "['dense']"),
    ("gpt2", {"n_head": 0}, "n_head", "0"),
    ("gpt2", {"n_head": 3}, "n_head", "3"),
    ("gpt2", {"n_layer": 100_000}, "n_layer", "100000"),
    ("gpt2", {"n_layer": 900}, "n_layer", "900"),
    ("gpt2", {"n_positions": 0}, "n_positions", "0"),
    ("ernie4.5", {"num_hidden_layers": 10**12}, "num_hidden_layers", "1000000000000"),
    ("mistral", {"num_hidden_layers": 900}, "num_hidden_layers", "900"),
]


@pytest.mark.parametrize(("name", "changes", "key", "shown"), CASES, ids=[f"{case[0]}-{case[2]}-{case[3]}" for case in CASES])
def test_values_of_config_json(tmp_path: Path, name: str, changes: dict[str, Any], key: str, shown: str) -> None:
    folder = Path(shutil.copytree(GOLDEN / name, tmp_path / name))
    edit(folder / "config.json", changes)
    message = refusal(folder)
    assert key in message and shown in message


def test_so_many_layers_are_refused_without_weights_too(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "llama2", tmp_path / "llama2"))
    edit(folder / "config.json", {"num_hidden_layers": 100_000})
    assert "num_hidden_layers" in refusal(folder, load_format="dummy")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(("key", "value"), [("eos_token_id", "x"), ("eos_token_id", [257, "x"]), ("bos_token_id", 1.5)], ids=str)
def test_token_ids_of_a_model_with_its_tokenizer(tiny_model: Path, tmp_path: Path, file: str, key: str, value: object) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    edit(folder / file, {key: value})
    message = refusal(folder, TokenizerError, skip_tokenizer_init=False)
    assert key in message and file in message and repr(value) in message


GGUF_CASES: list[tuple[str, str, dict[str, Any], str]] = [  # golden checkpoint, architecture, changed metadata, the key
    ("llama2", "llama", {"block_count": 100_000}, "llama.block_count"),
    ("llama2", "llama", {"block_count": 900}, "block_count"),
    ("llama2", "llama", {"attention.head_count": 0}, "llama.attention.head_count"),
    ("llama2", "llama", {"rope.freq_base": 1.0}, "llama.rope.freq_base"),
    ("llama2", "llama", {"context_length": 0}, "llama.context_length"),
    ("llama2", "llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, "llama.rope.scaling.factor"),
    ("qwen3.5", "qwen35", {"ssm.inner_size": 190}, "ssm.inner_size"),
    ("qwen3.5", "qwen35", {"nextn_predict_layers": 3}, "nextn_predict_layers"),
    ("qwen3moe", "qwen3moe", {"block_count": None}, "qwen3moe.block_count"),
    ("qwen3moe", "qwen3moe", {"expert_used_count": 0}, "qwen3moe.expert_used_count"),
    ("qwen3moe", "qwen3moe", {"expert_used_count": 999}, "qwen3moe.expert_used_count"),
    ("llama2", "llama", {"embedding_scale": 12.0}, "llama.embedding_scale"),
    ("qwen2", "qwen2", {"attention.causal": 0}, "qwen2.attention.causal"),
    ("gpt2", "gpt2", {"attention.head_count": 3}, "attention.head_count"),
    ("gpt2", "gpt2", {"block_count": 900}, "block_count"),
]


@pytest.mark.parametrize(("name", "arch", "changes", "key"), GGUF_CASES, ids=[f"{case[1]}-{case[3]}-{case[2]}" for case in GGUF_CASES])
def test_values_of_gguf_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, arch: str, changes: dict[str, Any], key: str
) -> None:
    write_parameters = to_gguf._write_parameters

    def write(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
        write_parameters(writer, config)
        for changed, value in changes.items():
            writer.kv_data[0].pop(f"{arch}.{changed}", None)
            if value is not None:
                {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](f"{arch}.{changed}", value)

    monkeypatch.setattr(to_gguf, "_write_parameters", write)
    to_gguf.write_gguf(GOLDEN / name, tmp_path / "model.gguf", arch)
    assert key in refusal(tmp_path / "model.gguf")
