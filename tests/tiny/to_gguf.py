"""Writes a Hugging Face folder of `families.py` as a GGUF file, with the `gguf` package and numpy alone.

What goes where is llama.cpp's convention: its tensor names; q and k rows of architecture `llama` reordered from rotated halves to
interleaved pairs; experts stacked; Conv1D weights of GPT-2 transposed; Llama-3 RoPE scaling as the tensor `rope_freqs.weight` (a
divisor a frequency), Phi-3's factors as `rope_factors_short.weight` and `rope_factors_long.weight`, other scalings as metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_DTYPES = {"F32": np.float32, "F16": np.float16}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert{s}.{part}_proj": f"ffn_{part}_shexp" for s in ("", "s") for part in ("gate", "up", "down")},
    "shared_mlp.output_linear": "ffn_down_shexp",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_OTHER_NORMS = {  # by architecture: norms that the same names in Hugging Face's files do not mean elsewhere
    "olmo2": {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), {"post_attention_layernorm": "post_attention_norm"}),
    "glm4moe": {"post_attention_layernorm": "post_attention_norm"},
    "gemma4": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "router.proj": "ffn_gate_inp",
    },
    "glm4": {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
    "gemma": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
_WHOLE = {  # names without a kind of their own
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
}
_INTERLEAVED = (
    "llama",
    "smollm3",
    "granite",
    "granitemoe",
    "mistral3",
)  # whose rotary pairs are adjacent in GGUF, but not in Hugging Face's files
_NORMS_AT_0 = ("gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")
_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}
_CONV1D = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of the folder's safetensors files as float32; numpy has no bfloat16, so the files are read by hand."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                low, high = entry["data_offsets"]
                tensors[name] = _to_float32(data[start + low : start + high], entry["dtype"]).reshape(entry["shape"])
    return tensors


def _to_float32(raw: bytes, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, _DTYPES[dtype]).astype(np.float32)


def gguf_tensors(tensors: dict[str, np.ndarray], config: dict[str, Any], arch: str, split_kv_b: bool = True) -> dict[str, np.ndarray]:
    """The same weights, float32, under their GGUF names and in GGUF's layout; with `split_kv_b` as in files of 2025 and later."""
    out: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, value in tensors.items():
        if ".linear_attn." in name:
            out |= _delta(name, value, config, arch)
            continue
        if fused := _fused(name, value):
            out |= fused
            continue
        if (
            ".mlp.experts." in name or ".block_sparse_moe.experts." in name
        ):  # model.layers.N.mlp.experts.E.gate_proj.weight; of Mixtral block_sparse_moe, and w1
            _, _, layer, _, _, expert, part, _ = name.split(".")
            part = {"w1": "gate", "w2": "down", "w3": "up"}.get(part) or part.removesuffix("_proj")
            experts.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", {})[int(expert)] = value
            continue
        if arch in _INTERLEAVED and ".q_proj." in name:
            value = interleave(value, config["num_attention_heads"])
        if arch in _INTERLEAVED and ".k_proj." in name:
            value = interleave(value, config["num_key_value_heads"])
        if arch in _NORMS_AT_0 and name.endswith("norm.weight"):
            value = value + 1
        if ".kv_b_proj." in name and split_kv_b:
            out |= _split_kv_b(_gguf_name(name, arch), value, config)
            continue
        if name.endswith(_CONV1D):
            value = value.T
        if name.endswith(("shared_expert_gate.weight", "e_score_correction_bias")):
            value = value.reshape(-1)
        out[_gguf_name(name, arch)] = np.ascontiguousarray(value)
    for name, parts in experts.items():
        out[name] = np.stack([parts[e] for e in range(len(parts))])
    return out | _rope_tensors(config)


def _fused(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """The experts of a layer that are in one tensor already, or gate and up that are; nothing for other tensors.

    gpt-oss: [X, E, 2 F], the columns of gate and up alternating, and their biases; Granite: [X, 2 F, E], gate's rows first.
    """
    blk, part = f"blk.{(name.split('.') + ['', '', ''])[2]}", name.split(".", 3)[-1]
    if part in ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"):
        kind, rows = ("bias", value) if part.endswith("bias") else ("weight", value.swapaxes(1, 2))
        return {f"{blk}.ffn_{half}_exps.{kind}": np.ascontiguousarray(rows[:, i::2]) for i, half in enumerate(("gate", "up"))}
    if part in ("mlp.experts.down_proj", "mlp.experts.down_proj_bias"):
        kind, rows = ("bias", value) if part.endswith("bias") else ("weight", value.swapaxes(1, 2))
        return {f"{blk}.ffn_down_exps.{kind}": np.ascontiguousarray(rows)}
    if part == "block_sparse_moe.output_linear.weight":
        return {f"{blk}.ffn_down_exps.weight": value}
    place = {"block_sparse_moe.input_linear.weight": "exps", "shared_mlp.input_linear.weight": "shexp"}.get(part)
    if place is None:
        return {}
    gate, up = (np.ascontiguousarray(half) for half in np.split(value, 2, axis=-2))
    return {f"{blk}.ffn_gate_{place}.weight": gate, f"{blk}.ffn_up_{place}.weight": up}


def _delta(name: str, value: np.ndarray, config: dict[str, Any], arch: str) -> dict[str, np.ndarray]:
    """A tensor of a layer with the gated delta rule. For `qwen3next` rows of all key heads' q, k, v; of z; b and a as they are; for the
    others value heads that share a key head are apart: first of all key heads one, then of all the next.
    """
    blk, part = f"blk.{name.split('.')[2]}", name.split(".linear_attn.")[1]
    KH, VH, DK, DV = (config[f"linear_{key}"] for key in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
    group, keys = VH // KH, KH * DK

    def ordered(rows: np.ndarray, width: int) -> np.ndarray:
        if arch == "qwen3next":
            return rows
        return rows.reshape(KH, group, width, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    if part == "in_proj_qkvz.weight":
        heads = value.reshape(KH, -1, value.shape[1])
        parts = np.split(heads, np.cumsum([DK, DK, group * DV]).tolist(), axis=1)
        q, k, v, z = (np.ascontiguousarray(one).reshape(-1, value.shape[1]) for one in parts)
        return {f"{blk}.attn_qkv.weight": np.concatenate([q, k, v]), f"{blk}.attn_gate.weight": z}
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        rows = value.reshape(value.shape[0], -1)
        name = "attn_qkv" if part.startswith("in") else "ssm_conv1d"
        return {f"{blk}.{name}.weight": np.concatenate([rows[: 2 * keys], ordered(rows[2 * keys :], DV)])}
    if part == "out_proj.weight":
        return {f"{blk}.ssm_out.weight": np.ascontiguousarray(ordered(value.T, DV).T)}
    plain = {"in_proj_ba.weight": "ssm_ba.weight", "norm.weight": "ssm_norm.weight"}
    if part in plain:
        return {f"{blk}.{plain[part]}": value}
    own = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "in_proj_z.weight": "attn_gate.weight", "in_proj_b.weight": "ssm_beta.weight",
           "in_proj_a.weight": "ssm_alpha.weight"}[part]  # fmt: skip
    value = -np.exp(value) if part == "A_log" else value
    return {f"{blk}.{own}": np.ascontiguousarray(ordered(value, DV if part == "in_proj_z.weight" else 1))}


def _split_kv_b(name: str, value: np.ndarray, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The matrices of every head: for keys transposed [H, rank, plain], for values [H, value, rank]."""
    heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
    rows = value.reshape(heads, -1, config["kv_lora_rank"])
    parts = {"attn_k_b": rows[:, :plain].swapaxes(1, 2), "attn_v_b": rows[:, plain:]}
    return {name.replace("attn_kv_b", part): np.ascontiguousarray(matrices) for part, matrices in parts.items()}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row order of one head from (all first halves, all second halves) to pairs. rows: [heads * D, ...]."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _gguf_name(name: str, arch: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    if (whole := name.split(".", 3)[-1]) in _WHOLE:
        return f"blk.{name.split('.')[2]}.{_WHOLE[whole]}"
    _, _, layer, part = stem.split(".", 3)
    part = _OTHER_NORMS.get("gemma" if arch in ("gemma2", "gemma3") else arch, {}).get(part) or _LAYER[part]
    return f"blk.{layer}.{part}.{kind}"


def _head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _of_full_layers(config: dict[str, Any], key: str) -> int:
    """A number of Gemma 4's layers without a window."""
    last = config["per_layer_config"][max(config["per_layer_config"])]
    return int(last.get(key, config.get(key)))


def _full_head_dim(config: dict[str, Any]) -> int:
    return _of_full_layers(config, "head_dim")


def _rope_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    rope = config.get("rope_parameters") or {}
    if config["model_type"] == "gemma4_text":  # what is not rotated is rotated by no angle
        pairs, share = _full_head_dim(config) // 2, rope["full_attention"]["partial_rotary_factor"]
        return {"rope_freqs.weight": np.where(np.arange(pairs) < int(share * pairs), 1, 1e30).astype(np.float32)}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in ("short", "long")}
    if rope.get("rope_type") == "llama3":
        return {"rope_freqs.weight": _llama3_divisors(rope, _head_dim(config))}
    return {}


def _llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """What each frequency is divided by, [D/2]: 1 for short wavelengths, `factor` for long ones, blended between."""
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    wavelength = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    share = np.clip((rope["original_max_position_embeddings"] / wavelength - low) / (high - low), 0, 1)
    return (1 / ((1 - share) / factor + share)).astype(np.float32)


def write_gguf(
    folder: Path,
    path: Path,
    arch: str,
    kind: str = "F32",
    tensors: dict[str, np.ndarray] | None = None,
    stored: dict[str, tuple[str, np.ndarray]] | None = None,
) -> None:
    """Writes `folder` as architecture `arch` with its matrices stored as `kind`, vectors and rope tensors as F32.

    `tensors`, as `gguf_tensors` returns them, replaces the folder's own weights. `stored` adds matrices by their format and the bytes of
    their rows, uint8 [O, bytes of a row].
    """
    import gguf

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    _write_parameters(writer, config)
    _write_vocabulary(writer, config["vocab_size"])
    qtype = gguf.GGMLQuantizationType[kind]
    for name, value in (tensors or gguf_tensors(read_folder(folder), config, arch)).items():
        if kind == "F32" or _stays_f32(name, value):
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, qtype), raw_dtype=qtype)
    for name, (format, rows) in (stored or {}).items():
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[format])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stays_f32(name: str, value: np.ndarray) -> bool:
    return value.ndim == 1 or "ffn_gate_inp" in name or "position_embd" in name


def dequantized(tensors: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """`tensors` with the matrices that `write_gguf` stores as `kind` rounded through it, by the gguf package's own arithmetic."""
    import gguf

    qtype = gguf.GGMLQuantizationType[kind]
    return {
        name: v if _stays_f32(name, v) else gguf.quants.dequantize(gguf.quants.quantize(v, qtype), qtype) for name, v in tensors.items()
    }


def _write_parameters(writer: Any, config: dict[str, Any]) -> None:
    if config["model_type"] == "gpt2":
        writer.add_block_count(config["n_layer"])
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_feed_forward_length(4 * config["n_embd"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    optional: list[tuple[str, Callable[[Any], None]]] = [
        ("num_local_experts", writer.add_expert_count),
        ("num_experts", writer.add_expert_count),
        ("n_routed_experts", writer.add_expert_count),
        ("moe_num_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("top_k_experts", writer.add_expert_used_count),
        ("moe_k", writer.add_expert_used_count),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("shared_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("n_shared_experts", writer.add_expert_shared_count),
        ("moe_num_shared_experts", writer.add_expert_shared_count),
        ("routed_scaling_factor", writer.add_expert_weights_scale),
        ("n_group", writer.add_expert_group_count),
        ("topk_group", writer.add_expert_group_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        *([] if "kv_lora_rank" in config else [("head_dim", writer.add_key_length), ("head_dim", writer.add_value_length)]),
        ("vocab_size", writer.add_vocab_size),
    ]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1 if "kv_lora_rank" in config else config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for key, add in optional:
        if config.get(key) is not None:
            add(config[key])
    if config["model_type"] == "phi3" or (config["model_type"] == "mistral" and config["sliding_window"]):
        writer.add_sliding_window(config["sliding_window"] or 0)
    _write_policies(writer, config)
    if config["model_type"] == "gemma4_text":
        _write_gemma4(writer, config)
    if "linear_num_key_heads" in config:
        _write_delta(writer, config)
    if "kv_lora_rank" in config:
        _write_latent(writer, config)
    _write_rope(writer, config)


def _write_policies(writer: Any, config: dict[str, Any]) -> None:
    """What OLMo 3, Granite, Gemma and models with experts differ in."""
    import gguf

    keys: dict[str, Callable[[Any], None]] = {
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "attention_multiplier": writer.add_attention_scale,
        "logits_scaling": writer.add_logit_scale,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
    }
    for key, add in keys.items():
        if config.get(key) is not None:
            add(config[key])
    if config["model_type"] == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if config["model_type"] == "deepseek_v2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    elif "n_group" in config:
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config["model_type"] in ("olmo3", "gemma2", "gemma3_text"):
        writer.add_sliding_window(config["sliding_window"])
        if config["model_type"] != "gemma2":
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _write_gemma4(writer: Any, config: dict[str, Any]) -> None:
    kinds, full, width = config["layer_types"], _full_head_dim(config), config["head_dim"]
    windowed, shared = [kind == "sliding_attention" for kind in kinds], config["num_kv_shared_layers"]
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(width)
    writer.add_value_length_swa(width)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(width)
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    heads = config["num_key_value_heads"], _of_full_layers(config, "num_key_value_heads")
    if heads[0] != heads[1]:
        writer.add_head_count_kv([heads[0] if window else heads[1] for window in windowed])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(windowed)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    if config["use_double_wide_mlp"]:
        own = config["intermediate_size"]
        writer.add_feed_forward_length([own * (1 + (layer >= len(kinds) - shared)) for layer in range(len(kinds))])


def _write_delta(writer: Any, config: dict[str, Any]) -> None:
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_inner_size(values)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_rope_dimension_count(int(_head_dim(config) * config["rope_parameters"]["partial_rotary_factor"]))


def _write_latent(writer: Any, config: dict[str, Any]) -> None:
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope)
    writer.add_leading_dense_block_count(1)
    if (all_dim := config["rope_parameters"].get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * all_dim)


def _write_rope(writer: Any, config: dict[str, Any]) -> None:
    import gguf

    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if "llama_4_scaling_beta" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if config["model_type"] in ("llama", "mistral", "phi3", "glm4", "glm4_moe"):
        writer.add_rope_dimension_count(int(_head_dim(config) * rope.get("partial_rotary_factor", 1.0)))
    if config["model_type"] == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        scale = config["max_position_embeddings"] / rope["original_max_position_embeddings"]
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(rope["original_max_position_embeddings"])))


def _write_vocabulary(writer: Any, vocab_size: int) -> None:
    """A byte-level BPE vocabulary: three control tokens, the printable bytes as themselves, and pairs merged from letters."""
    import gguf

    letters = [chr(c) for c in range(33, 127)]
    pairs = [a + b for a in "etaoinshrdlu" for b in "etaoinshrdlu"]
    tokens = (["<unk>", "<s>", "</s>"] + letters + ["\u0120"] + pairs)[:vocab_size]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), vocab_size)]
    types = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    types = [gguf.TokenType.UNUSED if token.startswith("[PAD") else kind for token, kind in zip(tokens, types, strict=True)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{pair[0]} {pair[1]}" for pair in pairs if pair in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
