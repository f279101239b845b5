"""Small LLaMA checkpoints whose matrices are quantized, written from the layouts of their kinds, and the same model in float32.

A kind is a function of a generator and a shape: it returns the tensors that are stored for the matrix, by their suffix, and its exact
numbers, float64. Nothing here comes from the readers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

E, F, V, LAYERS = 256, 512, 256, 2
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": E, "intermediate_size": F, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "vocab_size": V, "tie_word_embeddings": False, "hidden_act": "silu",
    "eos_token_id": 2,
}  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (E, E), "self_attn.k_proj": (128, E), "self_attn.v_proj": (128, E), "self_attn.o_proj": (E, E),
    "mlp.gate_proj": (F, E), "mlp.up_proj": (F, E), "mlp.down_proj": (E, F),
}  # fmt: skip
MATRICES = {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in SHAPES.items()}

Stored = dict[str, np.ndarray]
Quantize = Callable[[np.random.Generator, int, int], tuple[Stored, np.ndarray]]


def write(folder: Path, settings: dict[str, Any], quantize: Quantize, seed: int = 1, head: bool = False) -> Path:
    """A model in `folder`/quantized, and the same in float32 in `folder`/floats; config.json gets `settings`. With `head` the head is
    quantized, too."""
    rng = np.random.default_rng(seed)
    rest = _floats(rng)
    quantized: Stored = dict(rest)
    floats: Stored = {name: array.astype(np.float32) for name, array in rest.items()}
    for name, (O, I) in (MATRICES | ({"lm_head": (V, E)} if head else {})).items():
        tensors, dense = quantize(rng, O, I)
        quantized.pop(f"{name}.weight", None)
        quantized |= {f"{name}.{suffix}": np.ascontiguousarray(array) for suffix, array in tensors.items()}
        floats[f"{name}.weight"] = dense.astype(np.float32)
    for name, tensors, config in (("quantized", quantized, CONFIG | settings), ("floats", floats, CONFIG)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / name / "model.safetensors")
    return folder


def _floats(rng: np.random.Generator) -> Stored:
    """Embedding, head and norms in float16."""
    out = {"model.embed_tokens.weight": rng.standard_normal((V, E)) * 0.5, "lm_head.weight": rng.standard_normal((V, E)) / 16}
    norms = [f"model.layers.{i}.{name}.weight" for i in range(LAYERS) for name in ("input_layernorm", "post_attention_layernorm")]
    out |= {name: 1 + 0.2 * rng.standard_normal(E) for name in (*norms, "model.norm.weight")}
    return {name: array.astype(np.float16) for name, array in out.items()}


def bits_along(values: np.ndarray, bits: int) -> np.ndarray:
    """Integers [R, C] packed along the columns, the lowest bits first: uint32 [R, ceil(C * bits / 32)], by single bits."""
    single = (values[:, :, None].astype(np.int64) >> np.arange(bits)) & 1
    stream = single.reshape(len(values), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return (stream.reshape(len(values), -1, 32) << np.arange(32)).sum(-1).astype(np.uint32)


def integers(
    rng: np.random.Generator, O: int, I: int, bits: int, groups: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quants [O, I], zero points and float16 scales [O, groups] of a matrix whose products with normal numbers are about 1."""
    middle, top = 1 << (bits - 1), 1 << bits
    quants = np.clip(np.rint(rng.standard_normal((O, I)) * top / 6 + middle - 0.5), 0, top - 1).astype(np.int64)
    zeros = np.full((O, groups), middle) if symmetric else rng.integers(max(1, middle - middle // 2), middle + middle // 2 + 1, (O, groups))
    scales = (rng.uniform(0.7, 1.3, (O, groups)) * 6 / top * I**-0.5).astype(np.float16)
    return quants, zeros, scales


def gptq(bits: int, group: int, symmetric: bool = True, version: int = 1, index: Callable[..., np.ndarray] | None = None) -> Quantize:
    """`index` makes g_idx from a generator, the columns and the columns of a group; without it they are in order."""

    def quantize(rng: np.random.Generator, O: int, I: int) -> tuple[Stored, np.ndarray]:
        size = I if group == -1 else group
        quants, zeros, scales = integers(rng, O, I, bits, -(-I // size), symmetric)
        groups = np.arange(I) // size if index is None else index(rng, I, size)
        dense = (quants - zeros[:, groups]) * scales.astype(np.float64)[:, groups]
        stored = {
            "qweight": bits_along(quants, bits).T.view(np.int32),
            "qzeros": bits_along(zeros.T - (version == 1), bits).view(np.int32),
            "scales": scales.T,
            "g_idx": groups.astype(np.int32),
        }
        return stored, dense

    return quantize


def gptq_settings(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True} | more}
