"""A random model with recurrent states whose heads are those of published models in kind: sixteen of values."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.tiny.adapters import in_float32
from tests.tiny.to_gguf import read_folder

GOLDEN = Path(__file__).parent / "golden" / "qwen3.5"
HEADS, DIM = 16, 16  # projections in sixteens, as kernels of adapters take them


def write_delta_model(folder: Path) -> Path:
    """The recorded Qwen3.5 with other layers that have states; the folder."""
    random, weights, config = np.random.default_rng(0), read_folder(GOLDEN), json.loads((GOLDEN / "config.json").read_text())
    keys, values, E = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"], HEADS * DIM, config["hidden_size"]
    shapes = {
        "in_proj_qkv.weight": (keys + values, E),
        "in_proj_z.weight": (values, E),
        "in_proj_a.weight": (HEADS, E),
        "in_proj_b.weight": (HEADS, E),
        "out_proj.weight": (E, values),
        "conv1d.weight": (keys + values, 1, 4),
        "A_log": (HEADS,),
        "dt_bias": (HEADS,),
        "norm.weight": (DIM,),
    }
    for name in weights:
        if part := name.partition(".linear_attn.")[2]:
            weights[name] = random.standard_normal(shapes[part]) * shapes[part][-1] ** -0.5
    in_float32(GOLDEN, folder, weights)
    changed = {"linear_num_value_heads": HEADS, "linear_value_head_dim": DIM}
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder
