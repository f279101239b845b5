"""The families that parity is shown for, as rows of configuration: data only, no tensors, nothing of ours, no PyTorch.

`make_golden.py` turns each row into a small random checkpoint written by transformers, `tests/models/test_parity.py` reads those,
and `tests/peers/test_transformers.py` makes fresh ones. All share one set of dimensions as far as the family allows, so that the
kernels that tinygrad compiles for one serve the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STEPS = 64  # greedy tokens after each prompt
PROMPT_LENGTHS = (21, 70)
MAX_MODEL_LEN = 160


@dataclass(frozen=True)
class Family:
    """One variant: the class and configuration in transformers, and how the file is stored.

    `shard_bytes` splits the weights into several files with an index. `prompt_lengths` are in tokens, and `contexts` is the
    max_model_len that each prompt needs. `gguf` is the architecture's name in GGUF where the same weights are also tried from a
    GGUF file, None where not.
    """

    model_class: str
    config_class: str
    config: dict[str, Any]
    store: str = "bfloat16"
    shard_bytes: int | None = None
    prompt_lengths: tuple[int, ...] = PROMPT_LENGTHS
    contexts: tuple[int, ...] = (MAX_MODEL_LEN, MAX_MODEL_LEN)
    gguf: str | None = None


_BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LONGROPE: dict[str, Any] = {  # head_dim 16: eight frequencies
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 90,
    "short_factor": [1.0, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7],
    "long_factor": [1.0, 1.2, 1.7, 2.5, 4.0, 6.0, 9.0, 12.0],
}


def _llama(**changes: Any) -> dict[str, Any]:
    return _BASE | changes


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta} | more


def _family(kind: str, config: dict[str, Any], **how: Any) -> Family:
    return Family(
        _CLASSES[kind], kind + ("TextConfig" if kind in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe") else "Config"), config, **how
    )


_CLASSES = {
    "Llama": "LlamaForCausalLM",
    "Mistral": "MistralForCausalLM",
    "Qwen2": "Qwen2ForCausalLM",
    "Qwen3": "Qwen3ForCausalLM",
    "Qwen3Moe": "Qwen3MoeForCausalLM",
    "Qwen2Moe": "Qwen2MoeForCausalLM",
    "Qwen3Next": "Qwen3NextForCausalLM",
    "Qwen3_5": "Qwen3_5ForCausalLM",
    "Qwen3_5Moe": "Qwen3_5MoeForCausalLM",
    "GptOss": "GptOssForCausalLM",
    "GraniteMoe": "GraniteMoeForCausalLM",
    "GraniteMoeShared": "GraniteMoeSharedForCausalLM",
    "Glm4Moe": "Glm4MoeForCausalLM",
    "Dots1": "Dots1ForCausalLM",
    "Ernie4_5_Moe": "Ernie4_5_MoeForCausalLM",
    "Mixtral": "MixtralForCausalLM",
    "Olmoe": "OlmoeForCausalLM",
    "Phi3": "Phi3ForCausalLM",
    "SmolLM3": "SmolLM3ForCausalLM",
    "Olmo2": "Olmo2ForCausalLM",
    "Olmo3": "Olmo3ForCausalLM",
    "Granite": "GraniteForCausalLM",
    "GraniteMoeHybrid": "GraniteMoeHybridForCausalLM",
    "Ministral3": "Ministral3ForCausalLM",
    "Glm4": "Glm4ForCausalLM",
    "Gemma2": "Gemma2ForCausalLM",
    "Gemma3": "Gemma3ForCausalLM",
    "Gemma4": "Gemma4ForCausalLM",
    "GPT2": "GPT2LMHeadModel",
    "DeepseekV2": "DeepseekV2ForCausalLM",
    "DeepseekV3": "DeepseekV3ForCausalLM",
    "Glm4MoeLite": "Glm4MoeLiteForCausalLM",
    "Ernie4_5": "Ernie4_5ForCausalLM",
}

_GPT2 = {"vocab_size": 256, "n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
_MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_DEEPSEEK: dict[str, Any] = _MOE | {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 48,
    "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "head_dim": 32, "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 48,
}  # fmt: skip
_GPT_OSS = _llama(
    head_dim=32,
    intermediate_size=32,
    num_local_experts=6,
    num_experts_per_tok=3,
    sliding_window=16,
    rope_parameters=_YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
)

_GEMMA4 = _llama(
    head_dim=32,
    global_head_dim=64,
    sliding_window=16,
    final_logit_softcapping=6.0,
    tie_word_embeddings=True,
    rope_parameters={
        "full_attention": _rope(1000000.0, rope_type="proportional", partial_rotary_factor=0.25),
        "sliding_attention": _rope(10000.0),
    },
)

FAMILIES: dict[str, Family] = {
    "llama1": _family("Llama", _llama(num_key_value_heads=4, rms_norm_eps=1e-6), store="float16"),
    "llama2": _family("Llama", _llama(rms_norm_eps=1e-5), store="float32", gguf="llama"),
    "llama3": _family("Llama", _llama(rms_norm_eps=1e-5, rope_parameters=_rope(500000.0)), shard_bytes=70_000),
    "llama3.1": _family("Llama", _llama(rms_norm_eps=1e-5, rope_parameters=_LLAMA3_ROPE), gguf="llama"),
    "llama3.2": _family(
        "Llama", _llama(rms_norm_eps=1e-5, rope_parameters=_LLAMA3_ROPE | {"factor": 32.0}, tie_word_embeddings=True), gguf="llama"
    ),
    "llama-linear": _family("Llama", _llama(rope_parameters=_rope(10000.0, rope_type="linear", factor=4.0)), gguf="llama"),
    "llama-yarn": _family(
        "Llama", _llama(rope_parameters=_rope(10000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=64)), gguf="llama"
    ),
    "llama-bias": _family("Llama", _llama(attention_bias=True, mlp_bias=True)),
    "tinyllama": _family("Llama", _llama(num_attention_heads=8, rms_norm_eps=1e-5)),
    "mistral": _family("Mistral", _llama(sliding_window=16, rms_norm_eps=1e-5), gguf="llama"),
    "qwen2": _family(
        "Qwen2", _llama(rope_parameters=_rope(1000000.0), use_sliding_window=False, sliding_window=16), store="float32", gguf="qwen2"
    ),
    "qwen2-window": _family("Qwen2", _llama(use_sliding_window=True, sliding_window=16, max_window_layers=1)),
    "qwen2.5": _family("Qwen2", _llama(rope_parameters=_rope(1000000.0), tie_word_embeddings=True, use_sliding_window=False)),
    "qwen3": _family("Qwen3", _llama(head_dim=32, rope_parameters=_rope(1000000.0)), gguf="qwen3"),
    "phi3": _family("Phi3", _llama(num_key_value_heads=4), gguf="phi3"),
    "phi3-partial": _family(
        "Phi3", _llama(sliding_window=24, rope_parameters=_rope(10000.0, partial_rotary_factor=0.5), tie_word_embeddings=True)
    ),
    # transformers chooses the factors by the length of the sequence so far, tinyvllm by max_model_len. They agree where a sequence
    # ends within the original 90 positions in an engine of that length, and where it starts beyond them in a longer one.
    "phi3-longrope": _family(
        "Phi3",
        _llama(original_max_position_embeddings=90, rope_parameters=_LONGROPE),
        prompt_lengths=(21, 93),
        contexts=(90, MAX_MODEL_LEN),
        gguf="phi3",
    ),
    # Phi-4 is a Phi-3 with fewer heads of keys; Phi-4-mini also rotates three quarters of a head
    "phi4-mini": _family(
        "Phi3",
        _llama(
            original_max_position_embeddings=90,
            tie_word_embeddings=True,
            rope_parameters=_LONGROPE
            | {"partial_rotary_factor": 0.75, "short_factor": _LONGROPE["short_factor"][:6], "long_factor": _LONGROPE["long_factor"][:6]},
        ),
        prompt_lengths=(21, 93),
        contexts=(90, MAX_MODEL_LEN),
        gguf="phi3",
    ),
    "smollm3": _family("SmolLM3", _llama(num_hidden_layers=4, rope_parameters=_rope(2000000.0), tie_word_embeddings=True), gguf="smollm3"),
    "olmo2": _family("Olmo2", _llama(rope_parameters=_rope(500000.0)), gguf="olmo2"),
    "olmo3": _family(
        "Olmo3",
        _llama(num_hidden_layers=4, sliding_window=16, rope_parameters={"full_attention": _YARN, "sliding_attention": _rope(10000.0)}),
        gguf="olmo2",
    ),
    "granite": _family(
        "Granite",
        _llama(embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.3, logits_scaling=0.5),
        gguf="granite",
    ),
    "granite4": _family(
        "GraniteMoeHybrid",
        _llama(
            embedding_multiplier=3.0,
            residual_multiplier=0.5,
            attention_multiplier=0.3,
            logits_scaling=0.5,
            num_local_experts=0,
            shared_intermediate_size=96,
            layer_types=["full_attention"] * 2,
            position_embedding_type="rope",
            mamba_n_heads=4,
        ),
    ),
    "ministral3": _family(
        "Ministral3",
        _llama(head_dim=32, rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}),
        gguf="mistral3",
    ),
    "glm4": _family("Glm4", _llama(head_dim=32, rope_parameters=_rope(10000.0, partial_rotary_factor=0.5)), gguf="glm4"),
    "gemma2": _family(
        "Gemma2",
        _llama(
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=16,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=6.0,
        ),
        gguf="gemma2",
    ),
    "gemma3": _family(
        "Gemma3",
        _llama(
            num_hidden_layers=3,
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=16,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": _rope(1000000.0, rope_type="linear", factor=8.0),
                "sliding_attention": _rope(10000.0),
            },
        ),
        gguf="gemma3",
    ),
    # E2B: inputs of layers, last layers that read the keys and values of others
    "gemma4": _family(
        "Gemma4",
        _GEMMA4
        | {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 256,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
        gguf="gemma4",
    ),
    # 26B A4B: values that are keys, experts next to the MLP
    "gemma4moe": _family(
        "Gemma4",
        _GEMMA4
        | {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "num_key_value_heads": 4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        gguf="gemma4",
    ),
    "gpt2": _family("GPT2", _GPT2, store="float32", gguf="gpt2"),
    "ernie4.5": _family("Ernie4_5", _llama(head_dim=16, rope_parameters=_rope(500000.0), tie_word_embeddings=True), gguf="ernie4_5"),
    "ernie4.5-bias": _family("Ernie4_5", _llama(head_dim=32, rope_parameters=_rope(500000.0), use_bias=True)),
    "qwen3moe": _family("Qwen3Moe", _llama(head_dim=16, num_experts=8, norm_topk_prob=True, **_MOE), gguf="qwen3moe"),
    "mixtral": _family(
        "Mixtral", _llama(intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=None), gguf="llama"
    ),
    "olmoe": _family("Olmoe", _llama(intermediate_size=32, num_experts=8, num_experts_per_tok=3, norm_topk_prob=False), gguf="olmoe"),
    "qwen2moe": _family(
        "Qwen2Moe", _llama(num_experts=6, shared_expert_intermediate_size=64, decoder_sparse_step=2, **_MOE), gguf="qwen2moe"
    ),
    "gpt-oss": _family("GptOss", _GPT_OSS, gguf="gpt-oss"),
    "gpt-oss-clamped": _family("GptOss", _GPT_OSS | {"swiglu_limit": 0.4, "swiglu_alpha": 1.2}),
    "granitemoe": _family(
        "GraniteMoeShared",
        _llama(
            intermediate_size=32,
            num_local_experts=6,
            num_experts_per_tok=2,
            shared_intermediate_size=64,
            embedding_multiplier=3.0,
            residual_multiplier=0.5,
            attention_multiplier=0.3,
            logits_scaling=0.5,
        ),
        gguf="granitemoe",
    ),
    "glm4moe": _family(
        "Glm4Moe",
        _llama(
            head_dim=32,
            n_routed_experts=8,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.5,
            first_k_dense_replace=1,
            use_qk_norm=True,
            attention_bias=True,
            rope_parameters=_rope(10000.0, partial_rotary_factor=0.5),
            **_MOE,
        ),
        gguf="glm4moe",
    ),
    "dots1": _family(
        "Dots1", _llama(head_dim=32, n_routed_experts=8, n_shared_experts=1, sliding_window=None, norm_topk_prob=True, **_MOE), gguf="dots1"
    ),
    "ernie4.5moe": _family(
        "Ernie4_5_Moe",
        _llama(head_dim=16, moe_num_experts=8, moe_k=2, moe_intermediate_size=32, moe_num_shared_experts=2),
        gguf="ernie4_5-moe",
    ),
    "deepseek2": _family("DeepseekV2", _llama(**_DEEPSEEK | {"q_lora_rank": None, "routed_scaling_factor": 0.8}), gguf="deepseek2"),
    "deepseek2-groups": _family(
        "DeepseekV2", _llama(**_DEEPSEEK | {"q_lora_rank": 32, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2})
    ),
    "deepseek3": _family("DeepseekV3", _llama(**_DEEPSEEK | {"q_lora_rank": 32, "n_group": 4, "topk_group": 2}), gguf="deepseek2"),
    "glm4moelite": _family(
        "Glm4MoeLite",
        _llama(**_DEEPSEEK | {"q_lora_rank": 32, "routed_scaling_factor": 1.8, "rope_parameters": _rope(1000000.0)}),
        gguf="deepseek2",
    ),
    "qwen3next": _family(
        "Qwen3Next", _llama(**_DELTA | _MOE | {"num_experts": 8, "shared_expert_intermediate_size": 64}), gguf="qwen3next"
    ),
    "qwen3.5": _family("Qwen3_5", _llama(**_DELTA | {"rope_parameters": _rope(1000000.0, partial_rotary_factor=0.5)}), gguf="qwen35"),
    "qwen3.5moe": _family(
        "Qwen3_5Moe",
        _llama(**_DELTA | _MOE | {"num_experts": 8, "shared_expert_intermediate_size": 64, "tie_word_embeddings": True}),
        gguf="qwen35moe",
    ),
    "qwen3moe-mixed": _family("Qwen3Moe", _llama(head_dim=16, num_experts=4, norm_topk_prob=False, mlp_only_layers=[0], **_MOE)),
}

# Those of them that another one has with other angles or limits: ranks and stages divide both in the same way.
SAME_DIVISION = frozenset(("llama3", "llama3.1", "llama-linear", "llama-yarn", "gpt-oss-clamped"))
