"""Keys of a model's description that change what it computes: one that its family has not read is an error unless it changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tinyvllm.errors import ModelError
from tinyvllm.foreign import quoted

_OFF: tuple[Any, ...] = (None, False, 0, [], {})
_ONE: tuple[Any, ...] = (None, 1)

# Each key with the values that change nothing.
_HF: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "rope_ratio", "attn_scale"), _ONE),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"), _OFF),
    **dict.fromkeys(("no_rope_layers", "rope_local_base_freq", "clip_qkv", "attention_sinks", "logits_soft_cap"), _OFF),
    **dict.fromkeys(("sliding_window", "sliding_window_pattern", "global_attn_every_n_layers", "attention_chunk_size"), _OFF),
    **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm", "use_bidirectional_attention", "attn_output_gate", "parallel_attn"), _OFF),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank", "num_kv_shared_layers"), _OFF),
    **dict.fromkeys(("n_shared_experts", "moe_num_experts", "shared_expert_intermediate_size", "swiglu_alpha"), _OFF),
    **dict.fromkeys(("routed_scaling_factor", "n_group", "topk_group"), (*_ONE, 0)),
    "scoring_func": (None, "softmax"),
    **dict.fromkeys(("hidden_size_per_layer_input", "alibi", "attn_temperature_tuning", "swiglu_limit", "lm_head_bias"), _OFF),
    **dict.fromkeys(("attention_k_eq_v", "use_double_wide_mlp", "enable_moe_block", "per_layer_config"), _OFF),
    **dict.fromkeys(("multi_query", "use_parallel_residual", "position_embedding_type"), (*_OFF, "rope", "absolute")),
}
_GGUF: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale", "rope.scaling.yarn_attn_factor"), (*_ONE, 0)),
    **dict.fromkeys(("attention.scale", "attn_logit_softcapping", "final_logit_softcapping", "attention.temperature_scale"), _OFF),
    **dict.fromkeys(("attention.sliding_window", "attention.clamp_kqv", "attention.max_alibi_bias", "rope.freq_base_swa"), _OFF),
    **dict.fromkeys(("expert_count", "attention.kv_lora_rank", "attention.shared_kv_layers", "use_parallel_residual"), _OFF),
    **dict.fromkeys(("expert_shared_count", "expert_shared_feed_forward_length"), _OFF),
    **dict.fromkeys(("embedding_length_per_layer_input", "attention.key_length_swa"), _OFF),
    **dict.fromkeys(("expert_gating_func", "expert_weights_scale", "expert_group_count", "expert_group_used_count"), (*_ONE, 0)),
    "attention.causal": (None, True, 1),
}


class Recorded(Mapping[str, Any]):
    """A description that remembers which of its keys were read."""

    def __init__(self, values: Mapping[str, Any]):
        self._values, self.read = values, set[str]()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values


def refuse_unread(config: Recorded, kind: str, names: tuple[str, ...]) -> None:
    """ModelError for a key that changes the computation and was not read, `names` being the family's."""
    prefix, where, keys = ("", "config.json", _HF) if kind != "gguf" else (f"{config['general.architecture']}.", "GGUF metadata", _GGUF)
    for key, harmless in keys.items():
        name = prefix + key
        if name in config and name not in config.read and not any(_same(config[name], value) for value in harmless):
            known = f"it is supported where its family has it, and {', '.join(names)} has not"
            raise ModelError(f"{where}: {name} = {quoted(config[name])} changes what the model computes, and is not understood: {known}")


def _same(value: Any, harmless: Any) -> bool:
    """Equal, and of one kind: 1 is not True."""
    return bool(value == harmless) and isinstance(value, bool) == isinstance(harmless, bool)
