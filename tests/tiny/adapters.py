"""Random adapters in PEFT's layout, and the checkpoint that they are merged into."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.tiny.to_gguf import read_folder

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
SHARED = tuple(name.replace("mlp.", "mlp.shared_expert.") for name in MLP)
IN_FRONT = "model.per_layer_model_projection"  # the module that is in no layer


def in_float32(model: Path, folder: Path, weights: Mapping[str, np.ndarray]) -> Path:
    """A copy of a model with these weights in one file; the folder."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        file.unlink()
    save_file({name: np.ascontiguousarray(array, np.float32) for name, array in weights.items()}, folder / "model.safetensors")
    return folder


def write_adapter(
    folder: Path,
    model: Path,
    modules: Sequence[str] | None = None,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    size: float = 0.5,
    settings: Mapping[str, Any] | None = None,
    infix: str = "",
    dtype: type = np.float32,
) -> Path:
    """An adapter of these modules of all layers of a safetensors model, or of all its matrices and IN_FRONT, that changes its tokens; the
    folder.
    """
    random, tensors, targets = np.random.default_rng(seed), {}, set()
    for name, weight in read_folder(model).items():
        module = name.removesuffix(".weight")
        part = module.split(".", 3)[3] if module.startswith("model.layers.") else module if module == IN_FRONT else ""
        if weight.ndim != 2 or not part or (modules is not None and part not in modules):
            continue
        targets.add(module.rpartition(".")[2])
        O, I = weight.shape
        tensors[f"base_model.model.{module}.lora_A.{infix}weight"] = (random.standard_normal((rank, I)) * I**-0.5).astype(dtype)
        tensors[f"base_model.model.{module}.lora_B.{infix}weight"] = (random.standard_normal((O, rank)) * size).astype(dtype)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": sorted(targets)}
    config |= {"task_type": "CAUSAL_LM", "lora_dropout": 0.05, "bias": "none", "use_dora": False, "inference_mode": True}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config | dict(settings or {})))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(model: Path, adapter: Path, folder: Path, scale: float) -> Path:
    """A copy of a safetensors model with scale * B A added to its weights, in float32; the folder."""
    weights, low = read_folder(model), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in low if ".lora_A." in name]:
        module = name.removeprefix("base_model.model.").partition(".lora_A.")[0]
        b, a = low[name.replace(".lora_A.", ".lora_B.")].astype(np.float64), low[name].astype(np.float64)
        weights[f"{module}.weight"] = (weights[f"{module}.weight"] + scale * b @ a).astype(np.float32)
    return in_float32(model, folder, weights)
