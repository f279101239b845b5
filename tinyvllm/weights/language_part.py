"""Checkpoints of models that read images too: their language model, as the text-only checkpoint of its family would be.

The description of the language model is `text_config`; its tensors are in modules of other names, by the version of transformers that wrote
the file: 4.51 and before `language_model.model.*` and `language_model.lm_head.*`, of Qwen2-VL `model.*` and `lm_head.*`; later ones
`model.language_model.*` and `lm_head.*`. The tensors of the other modules are left out, and the number of them is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from tinyvllm.errors import ModelError
from tinyvllm.foreign import quoted
from tinyvllm.weights.mapping import Record

# Class of the whole -> model_type of text_config (None: where it is missing) -> class of the language model.
_CLASSES: dict[str, dict[str | None, str]] = {
    "Gemma3ForConditionalGeneration": dict.fromkeys(("gemma3_text", None), "Gemma3ForCausalLM"),
    "Gemma4ForConditionalGeneration": dict.fromkeys(("gemma4_text", None), "Gemma4ForCausalLM"),
    "Gemma4UnifiedForConditionalGeneration": dict.fromkeys(("gemma4_unified_text", None), "Gemma4UnifiedForCausalLM"),
    "Qwen2VLForConditionalGeneration": dict.fromkeys(("qwen2_vl_text", "qwen2_vl", None), "Qwen2ForCausalLM"),
    "Qwen2_5_VLForConditionalGeneration": dict.fromkeys(("qwen2_5_vl_text", "qwen2_5_vl", None), "Qwen2ForCausalLM"),
    "Qwen3VLForConditionalGeneration": dict.fromkeys(("qwen3_vl_text", None), "Qwen3ForCausalLM"),
    "Qwen3VLMoeForConditionalGeneration": dict.fromkeys(("qwen3_vl_moe_text", None), "Qwen3MoeForCausalLM"),
    "Qwen3_5ForConditionalGeneration": dict.fromkeys(("qwen3_5_text", None), "Qwen3_5ForCausalLM"),
    "Qwen3_5MoeForConditionalGeneration": dict.fromkeys(("qwen3_5_moe_text", None), "Qwen3_5MoeForCausalLM"),
    "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
}
# What Gemma3TextConfig and Gemma4TextConfig fill in: published descriptions have only what differs.
_GEMMA3 = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072, "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
_GEMMA4: dict[str, Any] = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
}  # fmt: skip
_UNIFIED = _GEMMA4 | {"max_position_embeddings": 262_144, "sliding_window": 1024, "model_type": "gemma4_unified_text"}
_DEFAULTS = {"Gemma3ForCausalLM": _GEMMA3, "Gemma4ForCausalLM": _GEMMA4, "Gemma4UnifiedForCausalLM": _UNIFIED}
# What transformers does in a language model whatever its description says, and its text-only sibling does not by default.
_OF_KINDS: dict[str | None, dict[str, Any]] = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
_RENAMED = (
    ("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."), ("model.language_model.", "model."),
    *((f"model.{module}.",) * 2 for module in ("embed_tokens", "layers", "norm")),  # Qwen2-VL's
    ("mtp.", "mtp."),  # the layer for drafts of Qwen3.5
)  # fmt: skip
_KEPT, _TIED = "lm_head.", "tie_word_embeddings"
# Keys of the whole that hold for the language model too; those of text_config come first.
_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", _TIED, "dtype", "torch_dtype", "transformers_version")


def language_description(config: dict[str, Any], tensors: Mapping[str, Record] | None = None) -> dict[str, Any]:
    """The description of the language model, or `config` itself where it describes nothing else. ModelError for one not supported.

    `tensors` are the language model's, by their own names. Where the whole and its text_config contradict each other about a tied head, as
    in files of transformers 5, which ties by the whole's key, they decide.
    """
    kinds = _kinds(config)
    if kinds is None:
        return config
    text = config if "hidden_size" in config and "text_config" not in config else config.get("text_config")  # Qwen2-VL has one level
    if not isinstance(text, Mapping):
        raise ModelError(f"config.json: text_config must be an object that describes the language model, got {quoted(text)}")
    kind = text.get("model_type")
    if not isinstance(kind, str | None) or kind not in kinds:
        known = ", ".join(name for name in kinds if name is not None)
        raise ModelError(f"config.json, text_config: model_type {quoted(kind)} is not supported in this model; supported are {known}")
    shared = {key: config[key] for key in _SHARED if key in config}
    if tensors is not None and {text.get(_TIED), config.get(_TIED)} == {True, False}:
        text = {**text, _TIED: not any(name.startswith(_KEPT) for name in tensors)}
    return {**_DEFAULTS.get(kinds[kind], {}), **_OF_KINDS.get(kind, {}), **shared, **text, "architectures": [kinds[kind]]}


def language_tensors(config: Mapping[str, Any], tensors: Mapping[str, Record]) -> tuple[Mapping[str, Record], str | None]:
    """The language model's tensors under its family's names, and a line about those left out; all of them for other models."""
    if _kinds(config) is None:
        return tensors, None
    kept, others = dict[str, Record](), Counter[str]()
    for name, record in tensors.items():
        if (own := _own_name(name)) is None:
            others[name.removeprefix("model.").split(".", 1)[0]] += 1
        elif own in kept:
            raise ModelError(f"checkpoint: {quoted(name)} is there twice, also under another name: of which version is the file?")
        else:
            kept[own] = record
    listed = ", ".join(f"{quoted(module)} ({count} tensors)" for module, count in others.most_common(5))
    return kept, f"the language model alone is loaded, it reads text; left out: {listed}" if others else None


def _kinds(config: Mapping[str, Any]) -> dict[str | None, str] | None:
    names = config.get("architectures")
    found = [_CLASSES[name] for name in names if isinstance(name, str) and name in _CLASSES] if isinstance(names, list) else []
    return found[0] if found else None


def _own_name(name: str) -> str | None:
    """The name of a tensor in its family's checkpoints; None for a tensor of another part."""
    for prefix, own in _RENAMED:
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name if name.startswith(_KEPT) else None
