"""Checkpoints with the experts of a layer in two tensors, as transformers computes with them: logits and tokens are those of the same model
with a tensor for each matrix.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.models.test_parity import GOLDEN, check
from tests.tiny.to_gguf import read_folder

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
_PARTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}
_RENAMED = {  # of transformers' modules
    "granitemoe": [
        ("moe.input_linear.weight", "moe.experts.gate_up_proj"),
        ("moe.output_linear.weight", "moe.experts.down_proj"),
        ("router.layer.", "router."),
    ],
    "mixtral": [(".block_sparse_moe.", ".mlp.")],
    "ernie4.5moe": [(".moe_statics.", ".gate.moe_statics.")],
}


def joined(name: str, transposed: bool = False) -> dict[str, np.ndarray]:
    """The tensors of the golden checkpoint `name`, those of experts as [X, 2 F, E] and [X, E, F], or transposed."""
    found: dict[str, np.ndarray] = {}
    layers: dict[str, dict[tuple[int, int], np.ndarray]] = {}
    for tensor, value in read_folder(GOLDEN / name).items():
        if match := _EXPERT.fullmatch(tensor):
            layers.setdefault(match[1], {})[int(match[2]), _PARTS[match[3]]] = value
        else:
            found[tensor] = value
    for experts, matrices in layers.items():
        numbers = sorted({expert for expert, _ in matrices})
        both = np.stack([np.concatenate([matrices[e, 0], matrices[e, 1]]) for e in numbers])
        down = np.stack([matrices[e, 2] for e in numbers])
        for part, stack in (("gate_up_proj", both), ("down_proj", down)):
            found[f"{experts}.{part}"] = np.ascontiguousarray(stack.swapaxes(1, 2) if transposed else stack)
    for old, new in _RENAMED.get(name, ()):
        found = {tensor.replace(old, new): value for tensor, value in found.items()}
    assert any(tensor.endswith("experts.gate_up_proj") for tensor in found)
    return found


def test_qwen3_vl_with_experts(tmp_path: Path) -> None:
    """Its matrices are transposed; 2 F is E, so gate and up alone do not tell. Its shares are always renormalized."""
    text = json.loads((GOLDEN / "qwen3moe" / "config.json").read_text()) | {"model_type": "qwen3_vl_moe_text"}
    del text["architectures"], text["norm_topk_prob"]
    whole = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"vision_config": {"depth": 1}}))
    tensors = {name.replace("model.", "model.language_model.", 1): value for name, value in joined("qwen3moe", transposed=True).items()}
    save_file(tensors | {"model.visual.patch_embed.proj.bias": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    check(tmp_path, "qwen3moe")


@pytest.mark.parametrize(
    "name", ["mixtral", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3moe", "granitemoe", "ernie4.5moe"))]
)
def test_experts_in_two_tensors(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((GOLDEN / name / "config.json").read_text())
    save_file(joined(name), tmp_path / "model.safetensors")
    check(tmp_path, name)
