"""Small random layers for drafts of Qwen3-Next and 3.5, and what they compute, in float64 numpy.

The oracle knows nothing of caches, batches or kernels, and its formulas are not the engine's code: norms with 1 + w, the rotated part of a
head, query and gate head by head, experts one after another.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.speculate.heads import Ends, Oracle, Tensors, silu, softmax
from tests.tiny.adapters import in_float32
from tests.tiny.to_gguf import read_folder

GOLDEN = Path(__file__).parents[1] / "tiny" / "golden"
FULL = "model.layers.1."  # the layer with attention of the recorded models, whose shapes the layer for drafts has


def config_of(name: str) -> dict[str, Any]:
    return dict(json.loads((GOLDEN / name / "config.json").read_text()))


def mtp_tensors(name: str, seed: int = 0, joined: bool = False) -> Tensors:
    """Random weights under their published names; `joined` has two tensors of all experts."""
    rng, config = np.random.default_rng(seed), config_of(name)
    E = config["hidden_size"]
    shapes = {"mtp.layers.0." + key.removeprefix(FULL): each.shape for key, each in read_folder(GOLDEN / name).items() if FULL in key}
    shapes |= {"mtp.fc.weight": (E, 2 * E)}
    shapes |= {f"mtp.{part}.weight": (E,) for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    out = {
        key: (rng.uniform(-0.5, 0.5, shape) if len(shape) == 1 else rng.normal(0, 1.5 * shape[-1] ** -0.5, shape)).astype(np.float32)
        for key, shape in shapes.items()
    }
    if joined:
        own, count = "mtp.layers.0.mlp.experts", config["num_experts"]
        gate, up, down = (np.stack([out.pop(f"{own}.{e}.{part}_proj.weight") for e in range(count)]) for part in ("gate", "up", "down"))
        out |= {f"{own}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{own}.down_proj": down}
    return out


def write_model(name: str, folder: Path, tensors: Tensors) -> Path:
    """The recorded model with a layer for drafts, in float32; the folder."""
    return in_float32(GOLDEN / name, folder, read_folder(GOLDEN / name) | tensors)


def ends_of(name: str) -> Ends:
    stored = read_folder(GOLDEN / name)
    table = stored["model.embed_tokens.weight"]
    return Ends(table, stored.get("lm_head.weight", table))


def fitted(name: str, texts: list[list[int]]) -> Tensors:
    """A layer that guesses most tokens of these texts right, by the one before alone: attention and MLP add little."""
    tensors, ends = mtp_tensors(name), ends_of(name)
    follows = {a: b for text in texts for a, b in zip(text, text[1:], strict=False)}
    x = normed(ends.table[[*follows]].astype(np.float64), np.zeros(1))
    (matrix, *_) = np.linalg.lstsq(x, ends.head[[*follows.values()]].astype(np.float64), rcond=None)
    for key in tensors:
        if "norm" in key and "layers" not in key:
            tensors[key] = np.zeros_like(tensors[key])
        elif key.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[key] = tensors[key] * np.float32(0.01)
    tensors["mtp.fc.weight"] = np.concatenate([matrix.T, np.zeros_like(matrix)], axis=1).astype(np.float32)
    return tensors


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The family's norm over the last dimension: weights are stored less 1."""
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + weight))


class GatedOracle(Oracle):
    """The layer, entry after entry."""

    def __init__(self, name: str, tensors: Tensors, ends: Ends):
        self.w = {key.removeprefix("mtp.").removesuffix(".weight"): array.astype(np.float64) for key, array in tensors.items()}
        self.c, self.table, self.head = config_of(name), ends.table.astype(np.float64), ends.head.astype(np.float64)
        self.targets = np.arange(len(self.table))
        self.keys, self.values = [], []

    def combine(self, x: np.ndarray) -> np.ndarray:
        return x

    def feed(self, state: np.ndarray) -> np.ndarray:
        return normed(state, self.w["norm"])

    def logits(self, state: np.ndarray) -> np.ndarray:
        return np.asarray(self.head @ self.feed(state))

    def layer(self, token: int, hidden: np.ndarray, position: int) -> np.ndarray:
        both = [normed(self.table[token], self.w["pre_fc_norm_embedding"]), normed(hidden, self.w["pre_fc_norm_hidden"])]
        x = self.w["fc"] @ np.concatenate(both)
        x = x + self.w["layers.0.self_attn.o_proj"] @ self.attend(normed(x, self.w["layers.0.input_layernorm"]), position)
        h = normed(x, self.w["layers.0.post_attention_layernorm"])
        return np.asarray(x + (self.mlp("layers.0.mlp", h) if "layers.0.mlp.gate" not in self.w else self.experts(h)))

    def mlp(self, name: str, h: np.ndarray) -> np.ndarray:
        gate, up = (self.w[f"{name}.{part}_proj"] @ h for part in ("gate", "up"))
        return np.asarray(self.w[f"{name}.down_proj"] @ (silu(gate) * up))

    def experts(self, h: np.ndarray) -> np.ndarray:
        own = "layers.0.mlp"
        shares = softmax(self.w[f"{own}.gate"] @ h)
        chosen = np.argsort(-shares)[: self.c["num_experts_per_tok"]]
        out = self.mlp(f"{own}.shared_expert", h) / (1 + np.exp(-(self.w[f"{own}.shared_expert_gate"] @ h)))
        return np.asarray(out + sum(shares[e] / shares[chosen].sum() * self.expert(e, h) for e in chosen))

    def expert(self, e: int, h: np.ndarray) -> np.ndarray:
        own = "layers.0.mlp.experts"
        if f"{own}.{e}.gate_proj" in self.w:
            return self.mlp(f"{own}.{e}", h)
        gate, up = np.split(self.w[f"{own}.gate_up_proj"][e] @ h, 2)
        return np.asarray(self.w[f"{own}.down_proj"][e] @ (silu(gate) * up))

    def attend(self, x: np.ndarray, position: int) -> np.ndarray:
        a, D, H = "layers.0.self_attn.", self.c["head_dim"], self.c["num_attention_heads"]
        q, gate = (self.w[a + "q_proj"] @ x).reshape(H, 2, D).swapaxes(0, 1)
        k, v = ((self.w[f"{a}{part}_proj"] @ x).reshape(-1, D) for part in "kv")
        q, k = normed(q, self.w[a + "q_norm"]), normed(k, self.w[a + "k_norm"])
        del self.keys[position:], self.values[position:]
        self.keys.append(self.rotated(k, position))
        self.values.append(v)
        q, out = self.rotated(q, position), []
        for head in range(H):
            keys, values = (np.stack(each)[:, head * len(k) // H] for each in (self.keys, self.values))
            out.append(softmax(keys @ q[head] * D**-0.5) @ values)
        return np.asarray(np.concatenate(out) / (1 + np.exp(-gate.reshape(-1))))

    def rotated(self, x: np.ndarray, position: int) -> np.ndarray:
        """x [heads, D] at a position: of the first features of a head i pairs with i + half."""
        rope = self.c["rope_parameters"]
        half = int(self.c["head_dim"] * rope["partial_rotary_factor"]) // 2
        angle = position / rope["rope_theta"] ** (np.arange(half) / half)
        a, b = x[:, :half], x[:, half : 2 * half]
        turned = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle), x[:, 2 * half :]]
        return np.concatenate(turned, axis=1)
