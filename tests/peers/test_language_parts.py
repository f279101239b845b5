"""Checkpoints of models that read images too, whole as transformers writes them: their text's logits are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")
transformers = pytest.importorskip("transformers", reason="transformers is installed by `make test-peers` only")

from tinyvllm import LLM  # noqa: E402

TOLERANCE = 2e-3
TOKENS = 70  # more than a window
_TEXT: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_WINDOWS = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 32}
_GEMMA4 = _TEXT | _WINDOWS | {"global_head_dim": 32, "final_logit_softcapping": 30.0}
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
WHOLES: dict[str, dict[str, Any]] = {
    "Gemma3": _TEXT | _WINDOWS | {"query_pre_attn_scalar": 16},
    "Gemma4": _GEMMA4 | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 256, "num_kv_shared_layers": 0},
    "Gemma4Unified": _GEMMA4,
    "Qwen2_5_VL": _TEXT | {"head_dim": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
    "Qwen3VL": _TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2]}},
    "Qwen3VLMoe": _TEXT
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2]}}
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Mistral3": _TEXT | {"model_type": "ministral3"},
    "Qwen3_5": _TEXT | _LINEAR,
    "Qwen3_5Moe": _TEXT | _LINEAR | _EXPERTS,
}
# Of the parts that are left out, whatever they call it.
_SMALL = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2, "num_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "out_hidden_size": 64, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0],
}  # fmt: skip


def write(name: str, folder: Path) -> Any:
    """A random checkpoint in bfloat16, as transformers reads it in float32."""
    config = getattr(transformers, f"{name}Config")(text_config={key: value for key, value in WHOLES[name].items() if value is not None})
    if (vision := getattr(config, "vision_config", None)) is not None:
        for key, size in _SMALL.items():
            if hasattr(vision, key):
                setattr(vision, key, size)
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    torch.manual_seed(5)
    whole = kind(config)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1 if parameter.dim() > 1 else 0.05)
    whole.to(torch.bfloat16).save_pretrained(folder)
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", WHOLES)
def test_the_language_model_of_a_whole(name: str, tmp_path: Path) -> None:
    whole = write(name, tmp_path)
    ids = np.random.default_rng(3).integers(3, 250, TOKENS).tolist()
    with torch.no_grad():
        expected = whole(input_ids=torch.tensor([ids])).logits[0].numpy()
    with LLM(str(tmp_path), dtype="float32", max_model_len=96, max_num_seqs=2, skip_tokenizer_init=True) as llm:
        np.testing.assert_allclose(llm.prompt_logits(ids), expected, rtol=0, atol=TOLERANCE)
