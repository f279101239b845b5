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
from safetensors.numpy import load_file, save_file

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
ENDS = {"model.embed_tokens": (V, E), "lm_head": (V, E)}

NAMES = {"float32": "F32", "float16": "F16", "uint8": "U8", "int8": "I8", "uint32": "U32", "int32": "I32", "int64": "I64"}

Stored = dict[str, np.ndarray]
Quantize = Callable[[np.random.Generator, int, int], tuple[Stored, np.ndarray]]


def write(folder: Path, settings: dict[str, Any], quantize: Quantize, more: dict[str, Quantize] | None = None, seed: int = 1) -> Path:
    """A model in `folder`/quantized, and the same in float32 in `folder`/floats; config.json gets `settings`.

    `more` quantizes some modules in another way, the embedding or the head among them, which are floats else; by their last name.
    """
    rng = np.random.default_rng(seed)
    rest = _floats(rng)
    quantized: Stored = dict(rest)
    floats: Stored = {name: array.astype(np.float32) for name, array in rest.items()}
    ways = dict.fromkeys(MATRICES, quantize)
    ways |= {name: way for last, way in (more or {}).items() for name in (*MATRICES, *ENDS) if name.endswith(last)}
    for name, way in ways.items():
        tensors, dense = way(rng, *(MATRICES | ENDS)[name])
        quantized.pop(f"{name}.weight", None)
        quantized |= {f"{name}.{suffix}": np.asarray(array, order="C") for suffix, array in tensors.items()}
        floats[f"{name}.weight"] = dense.astype(np.float32)
    for name, tensors, config in (("quantized", quantized, CONFIG | settings), ("floats", floats, CONFIG)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        save(tensors, folder / name / "model.safetensors")
    return folder


def save(tensors: Stored, path: Path) -> None:
    """A safetensors file. A dtype that numpy lacks is a structure of one field of its name: [("F8_E4M3", "u1")]."""
    if not any(array.dtype.names for array in tensors.values()):
        return save_file(tensors, path)
    header, at = {}, 0
    for name, array in tensors.items():
        kind = array.dtype.names[0] if array.dtype.names else NAMES[array.dtype.name]
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [at, at := at + array.nbytes]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in tensors.values()))


def _floats(rng: np.random.Generator) -> Stored:
    """Embedding, head and norms in float16."""
    out = {"model.embed_tokens.weight": rng.standard_normal((V, E)) * 0.5, "lm_head.weight": rng.standard_normal((V, E)) / 16}
    norms = [f"model.layers.{i}.{name}.weight" for i in range(LAYERS) for name in ("input_layernorm", "post_attention_layernorm")]
    out |= {name: 1 + 0.2 * rng.standard_normal(E) for name in (*norms, "model.norm.weight")}
    return {name: array.astype(np.float16) for name, array in out.items()}


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """The tokens that the model in `folder`/floats finds most likely, computed here in float64."""
    weights = {name: array.astype(np.float64) for name, array in load_file(folder / "floats" / "model.safetensors").items()}
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(_logits(weights, ids).argmax()))
    return ids[len(prompt) :]


def _logits(weights: Stored, ids: list[int]) -> np.ndarray:
    """float64 [V] after the last token."""
    D, H, K, T = CONFIG["head_dim"], CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], len(ids)
    x, frequencies = weights["model.embed_tokens.weight"][ids], 10000.0 ** (-np.arange(0, D, 2) / D)
    angles = np.arange(T)[:, None, None] * frequencies

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"]) * weights[f"{name}.weight"]

    def turned(x: np.ndarray) -> np.ndarray:  # [T, heads, D]
        a, b = x[..., : D // 2], x[..., D // 2 :]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    for i in range(LAYERS):
        layer = {name: weights[f"model.layers.{i}.{name}.weight"].T for name in SHAPES}
        h = norm(f"model.layers.{i}.input_layernorm", x)
        q, k, v = (h @ layer[f"self_attn.{name}_proj"] for name in "qkv")
        q, k = turned(q.reshape(T, H, D)), turned(k.reshape(T, K, D)).repeat(H // K, 1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(D) + np.triu(np.full((T, T), -np.inf), 1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + np.einsum("hts,shd->thd", shares, v.reshape(T, K, D).repeat(H // K, 1)).reshape(T, -1) @ layer["self_attn.o_proj"]
        h = norm(f"model.layers.{i}.post_attention_layernorm", x)
        gate = h @ layer["mlp.gate_proj"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["mlp.up_proj"])) @ layer["mlp.down_proj"]
    return norm("model.norm", x[-1]) @ weights["lm_head.weight"].T


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


def shuffled(rng: np.random.Generator, I: int, size: int) -> np.ndarray:
    """The groups of columns that were quantized in an order by activations: the same for matrices of one width, which have one input."""
    return np.random.default_rng(I).permutation(np.arange(I) // size)


def shuffled_each(rng: np.random.Generator, I: int, size: int) -> np.ndarray:
    return rng.permutation(np.arange(I) // size)


def plain(rng: np.random.Generator, O: int, I: int) -> tuple[Stored, np.ndarray]:
    """A module that is not quantized."""
    weight = (rng.standard_normal((O, I)) * I**-0.5).astype(np.float16)
    return {"weight": weight}, weight.astype(np.float64)


def awq(group: int) -> Quantize:
    def quantize(rng: np.random.Generator, O: int, I: int) -> tuple[Stored, np.ndarray]:
        quants, zeros, scales = integers(rng, O, I, 4, I // group, False)

        def words(values: np.ndarray) -> np.ndarray:  # [C, O] -> [C, O / 8]: nibble i holds column (0, 2, 4, 6, 1, 3, 5, 7)[i]
            eights = values.reshape(len(values), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
            return (eights << 4 * np.arange(8)).sum(-1).astype(np.uint32).view(np.int32)

        groups = np.arange(I) // group
        dense = (quants - zeros[:, groups]) * scales.astype(np.float64)[:, groups]
        return {"qweight": words(quants.T), "qzeros": words(zeros.T), "scales": scales.T}, dense

    return quantize


def awq_settings(group: int, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"} | more}


def packed_ct(bits: int, group: int | None, symmetric: bool = True, index: Callable[..., np.ndarray] | None = None) -> Quantize:
    """pack-quantized of compressed-tensors; a group of -1 is one scale a row, None one for the matrix."""

    def quantize(rng: np.random.Generator, O: int, I: int) -> tuple[Stored, np.ndarray]:
        size = I if group in (-1, None) else group
        quants, zeros, scales = integers(rng, O, I, bits, -(-I // size), symmetric)
        if group is None:
            zeros[:], scales[:] = zeros[0, 0], scales[0, 0]
        groups = np.arange(I) // size if index is None else index(rng, I, size)
        dense = (quants - zeros[:, groups]) * scales.astype(np.float64)[:, groups]
        stored = {"weight_packed": bits_along(quants, bits).view(np.int32), "weight_shape": np.array([O, I]), "weight_scale": scales}
        if group is None:
            stored["weight_scale"] = scales[0]
        if not symmetric:
            stored["weight_zero_point"] = bits_along(zeros.T, bits).T.view(np.int32)
        if index is not None:
            stored["weight_g_idx"] = groups.astype(np.int32)
        return stored, dense

    return quantize


def int_ct(symmetric: bool = True) -> Quantize:
    """int-quantized of compressed-tensors, one scale a row."""

    def quantize(rng: np.random.Generator, O: int, I: int) -> tuple[Stored, np.ndarray]:
        quants, zeros, scales = integers(rng, O, I, 8, 1, symmetric)
        stored = {"weight": (quants - 128).astype(np.int8), "weight_scale": scales, "input_scale": np.ones(1, np.float16)}
        if not symmetric:
            stored["weight_zero_point"] = (zeros - 128).astype(np.int8)
        return stored, (quants - zeros) * scales.astype(np.float64)

    return quantize


def ct_settings(format: str, bits: int, strategy: str, group: int | None = None, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group, "dynamic": False} | more
    group_0 = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "ignore": ["lm_head", "re:.*norm"],
        "config_groups": {"group_0": group_0},
    }
    return {"quantization_config": config}


def mlx(bits: int, group: int) -> Quantize:
    def quantize(rng: np.random.Generator, O: int, I: int) -> tuple[Stored, np.ndarray]:
        quants, zeros, scales = integers(rng, O, I, bits, I // group, False)
        biases = (-scales * zeros + scales * rng.standard_normal(scales.shape)).astype(np.float16)
        groups = np.arange(I) // group
        dense = scales.astype(np.float64)[:, groups] * quants + biases.astype(np.float64)[:, groups]
        return {"weight": bits_along(quants, bits), "scales": scales, "biases": biases}, dense

    return quantize


def mlx_settings(bits: int, group: int, **more: Any) -> dict[str, Any]:
    settings = {"group_size": group, "bits": bits, "mode": "affine"} | more
    return {"quantization": settings, "quantization_config": settings}


def hqq(bits: int, group: int, axis: int = 1) -> Quantize:
    def quantize(rng: np.random.Generator, O: int, I: int) -> tuple[Stored, np.ndarray]:
        quants, zeros, scales = integers(rng, O, I, bits, I // group, False)
        fractions = (zeros + rng.uniform(-0.4, 0.4, zeros.shape)).astype(np.float16)
        flat = quants.reshape(-1, group) if axis == 1 else quants.reshape(group, -1)
        scale, zero = (array.reshape((-1, 1) if axis == 1 else (1, -1)) for array in (scales, fractions))
        dense = (flat - zero.astype(np.float64)) * scale.astype(np.float64)
        runs = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}[bits]
        padded = np.pad(flat, ((0, -len(flat) % runs), (0, 0))).reshape(runs, -1, flat.shape[1])
        words = sum(run << bits * (runs - 1 - i) for i, run in enumerate(padded))
        stored = {"W_q": np.asarray(words, np.int32 if bits == 3 else np.uint8), "scale": scale, "zero": zero}
        stored |= {name: np.array(value, np.int32) for name, value in (("nbits", bits), ("group_size", group), ("axis", axis))}
        packing = np.frombuffer(b"4bit_u8", np.uint8)
        return stored | {"shape": np.array([O, I]), "packing": packing, "quant_scale": np.array(0, np.uint8)}, dense.reshape(O, I)

    return quantize


def hqq_settings() -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "hqq", "skip_modules": ["lm_head"], "quant_config": {}}}
