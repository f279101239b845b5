"""A family's small model with experts of 256 features in place of 32, which are too few to divide among ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.tiny.to_gguf import read_folder

GOLDEN = Path(__file__).parent / "golden"
TIMES = 8
_WIDTH = {"moe_intermediate_size": None, "intermediate_size": ("mixtral", "olmoe", "gpt-oss", "gpt-oss-clamped", "granitemoe")}


def with_wide_experts(name: str, folder: Path) -> Path:
    """The golden model `name` in `folder`, its wider matrices random numbers of the same deviation, in float32."""
    folder.mkdir()
    for path in (GOLDEN / name).iterdir():
        if path.suffix == ".json" and "index" not in path.name:
            shutil.copy(path, folder)
    config = json.loads((folder / "config.json").read_text())
    for key, families in _WIDTH.items():
        if key in config and (families is None or name in families):
            config[key] *= TIMES
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(5)
    tensors = {tensor: _wide(tensor, value, random, name.startswith("gpt-oss")) for tensor, value in read_folder(GOLDEN / name).items()}
    save_file({tensor: np.ascontiguousarray(value) for tensor, value in tensors.items()}, folder / "model.safetensors")
    return folder


def _wide(name: str, value: np.ndarray, random: np.random.Generator, inputs_first: bool) -> np.ndarray:
    axis = _wide_axis(name, value.ndim, inputs_first)
    if axis is None:
        return value
    shape = [size * TIMES if i == axis else size for i, size in enumerate(value.shape)]
    return (random.standard_normal(shape) * value.std()).astype(np.float32)


def _wide_axis(name: str, dimensions: int, inputs_first: bool) -> int | None:
    """Which dimension of a tensor has the experts' features, if any. Some families have all experts in one tensor, gpt-oss in [X, I, O]."""
    if "experts." not in name and "block_sparse_moe." not in name or ".gate.weight" in name or "router" in name:
        return None
    first = not any(part in name for part in ("down_proj", "w2", "output_linear"))
    if dimensions == 1 or name.endswith("_bias"):
        return dimensions - 1 if first else None
    if "gate_up_proj" in name or name.endswith("down_proj"):
        return 1 + (first == inputs_first)
    return dimensions - 2 if first else dimensions - 1
