"""Small random heads in every published layout, and what they compute, in float64 numpy: the oracle of tests/speculate/test_heads.py.

The oracle knows nothing of caches, batches or kernels: it runs a text from its first token with whole matrices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tinygrad import Tensor

from tests.conftest import HIDDEN, LAYERS, VOCAB
from tinyvllm.models.config import ModelConfig
from tinyvllm.ops.linear import TensorWeight
from tinyvllm.placement import Placement
from tinyvllm.runner.runner import Runner

E, V, BLOCK, BLOCKS = HIDDEN, VOCAB, 8, 64  # width and vocabulary of the fixture tiny_model; the cache
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Layout:
    """A head in one of the published forms: its config.json and which tensors it has."""

    name: str
    width: int = E  # of the head
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    ffn: int = 96
    draft_vocab: int = V
    config: Mapping[str, Any] = field(default_factory=dict)
    eagle3: bool = True
    bias: bool = False  # of fc (EAGLE-1)
    qkv_bias: bool = False
    first_norm: bool = True
    own_table: bool = False
    qk_norm: bool = False
    prefix: str = "midlayer."
    wrapped: bool = False  # in the speculators' config.json
    mtp: bool = False  # MiMo's own layer: names in the file are MTP_NAMES

    @property
    def aux_layers(self) -> tuple[int, ...]:
        listed = self.config.get("eagle_aux_hidden_state_layer_ids") or self.config.get("eagle_config", {}).get(
            "eagle_aux_hidden_state_layer_ids"
        )
        return tuple(listed) if self.eagle3 else ()


LAYOUTS = (
    Layout("eagle1", eagle3=False, bias=True, first_norm=False, own_table=True, prefix="layers.0."),
    Layout("eagle1_first_norm", eagle3=False, prefix="layers.0."),
    Layout("eagle3", draft_vocab=40, own_table=True, config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 0, 1]}}),
    Layout(
        "speculators",
        width=32,
        own_table=True,
        prefix="layers.0.",
        draft_vocab=40,
        wrapped=True,
        config={"norm_before_residual": True, "target_hidden_size": E, "fc_norm": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    ),
    Layout("eagle3_norms", qk_norm=True, config={"norm_before_fc": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": [1, 2]}),
)


MTP = Layout("mtp", eagle3=False, prefix="layers.0.", qkv_bias=True, mtp=True)
MTP_NAMES = {
    "fc": "input_proj",
    "norm": "final_layernorm",
    "layers.0.hidden_norm": "hidden_layernorm",
    "layers.0.token_norm": "token_layernorm",
}


def layer_config(layout: Layout) -> dict[str, Any]:
    return {
        "hidden_size": layout.width, "intermediate_size": layout.ffn,
        "num_attention_heads": layout.heads, "num_key_value_heads": layout.kv_heads,
        "head_dim": layout.head_dim, "num_hidden_layers": 1, "vocab_size": V, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 128, "hidden_act": "silu", "model_type": "llama", "attention_bias": False,
    }  # fmt: skip


def config_of(layout: Layout) -> dict[str, Any]:
    """config.json as it is published."""
    config = {"architectures": ["LlamaForCausalLMEagle3" if layout.eagle3 else "LlamaForCausalLM"], "torch_dtype": "float32"}
    if layout.eagle3:
        config |= {"draft_vocab_size": layout.draft_vocab, **layout.config}
    if not layout.wrapped:
        return config | layer_config(layout)
    wrapper = {"speculators_model_type": "eagle3", "speculators_config": {"algorithm": "eagle3"}}
    return config | wrapper | {"transformer_layer_config": layer_config(layout)}


def tensors_of(layout: Layout, seed: int = 0) -> Tensors:
    """Random weights under their published names."""
    rng, W, H, K, D = np.random.default_rng(seed), layout.width, layout.heads, layout.kv_heads, layout.head_dim
    wide, fan_in = (2 * W, len(layout.aux_layers) * E) if layout.eagle3 else (W, 2 * W)
    a, m = layout.prefix + "self_attn.", layout.prefix + "mlp."
    shapes = {
        "fc": (W, fan_in), a + "q_proj": (H * D, wide), a + "k_proj": (K * D, wide), a + "v_proj": (K * D, wide), a + "o_proj": (W, H * D),
        m + "gate_proj": (layout.ffn, W), m + "up_proj": (layout.ffn, W), m + "down_proj": (W, layout.ffn),
    }  # fmt: skip
    norms = {layout.prefix + "post_attention_layernorm": W}
    norms |= {layout.prefix + "input_layernorm": W} if layout.first_norm else {}
    norms |= {layout.prefix + "hidden_norm": W, "norm": W} if layout.eagle3 else {}
    norms |= {layout.prefix + "hidden_norm": W, layout.prefix + "token_norm": W, "norm": W} if layout.mtp else {}
    norms |= {"input_norm": fan_in} if layout.config.get("norm_before_fc") else {}
    norms |= {f"fc_norm.{i}": E for i in range(3)} if layout.config.get("fc_norm") else {}
    norms |= {a + "q_norm": D, a + "k_norm": D} if layout.qk_norm else {}
    shapes |= {"lm_head": (layout.draft_vocab, W)} if layout.eagle3 else {}
    shapes |= {"embed_tokens": (V, W)} if layout.own_table else {}
    out = {f"{name}.weight": rng.normal(0, 1.5 * size[1] ** -0.5, size) for name, size in shapes.items()}
    out |= {f"{name}.weight": rng.uniform(0.5, 1.5, size) for name, size in norms.items()}
    out |= {"fc.bias": rng.normal(0, 0.1, W)} if layout.bias else {}
    out |= {f"{a}{n}_proj.bias": rng.normal(0, 0.3, size * D) for n, size in (("q", H), ("k", K), ("v", K))} if layout.qkv_bias else {}
    out = {name: array.astype(np.float32) for name, array in out.items()}
    if layout.draft_vocab != V:
        targets = np.sort(rng.choice(V, layout.draft_vocab, replace=False))
        out |= {"d2t": targets - np.arange(layout.draft_vocab), "t2d": np.isin(np.arange(V), targets)}
    return out


def write_heads(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_mimo(folder: Path, base: Path, seed: int = 0) -> Path:
    """A MiMo checkpoint of the fixture tiny_model's tensors, with biases and a random layer for drafts."""
    folder.mkdir(exist_ok=True)
    for file in base.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((base / "config.json").read_text())
    more = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1, "attention_bias": True}
    (folder / "config.json").write_text(json.dumps(config | more))
    rng, tensors = np.random.default_rng(seed), load_file(base / "model.safetensors")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layout = replace(MTP, heads=heads, kv_heads=kv_heads, head_dim=E // heads, ffn=config["intermediate_size"])
    for i in range(LAYERS):
        sizes = {"q": E, "k": kv_heads * layout.head_dim, "v": kv_heads * layout.head_dim}
        biases = {f"model.layers.{i}.self_attn.{n}_proj.bias": rng.normal(0, 0.1, size) for n, size in sizes.items()}
        tensors |= {name: array.astype(np.float32) for name, array in biases.items()}
    tensors |= published_mtp(tensors_of(layout, seed))
    save_file(tensors, folder / "model.safetensors")
    return folder


def published_mtp(tensors: Tensors) -> Tensors:
    """The tensors of `MTP` under the names of a MiMo checkpoint."""
    out = {}
    for name, array in tensors.items():
        module, _, kind = name.rpartition(".")
        out[f"model.mtp_layers.0.{MTP_NAMES.get(module, module.removeprefix('layers.0.'))}.{kind}"] = array
    return out


def medusa_tensors(heads: int, layers: int, seed: int = 0) -> Tensors:
    rng, out = np.random.default_rng(seed), {}
    for i in range(heads):
        for j in range(layers):
            out[f"{i}.{j}.linear.weight"] = rng.normal(0, E**-0.5, (E, E))
            out[f"{i}.{j}.linear.bias"] = rng.normal(0, 0.1, E)
        out[f"{i}.{layers}.weight"] = rng.normal(0, 1.0, (V, E))
    return {name: array.astype(np.float32) for name, array in out.items()}


@dataclass(frozen=True)
class Ends:
    """The target's own embedding and head, float32 [V, E]."""

    table: np.ndarray
    head: np.ndarray

    @classmethod
    def random(cls, seed: int = 9) -> Ends:
        rng = np.random.default_rng(seed)
        return cls(*(rng.normal(0, 1.0, (V, E)).astype(np.float32) for _ in range(2)))


def runner_of(ends: Ends, max_model_len: int = 120) -> Runner:
    """What heads read of a runner: the target's shape, ends and cache, without a target."""
    config = ModelConfig(
        num_blocks=LAYERS, dim=E, hidden_dim=96, n_heads=2, n_kv_heads=2, norm_eps=1e-5, vocab_size=V, head_dim=32, rope_theta=1e4,
        rope_dim=32, max_context=128, v_head_dim=32,
    )  # fmt: skip
    weights = SimpleNamespace(table=Tensor(ends.table).realize(), head=TensorWeight((Tensor(ends.head).realize(),)))
    found: Any = SimpleNamespace(
        config=config,
        placement=Placement("CPU"),
        device="CPU",
        model=SimpleNamespace(weights=weights),
        pool=SimpleNamespace(block_size=BLOCK, num_blocks=BLOCKS),
        max_model_len=max_model_len,
        max_num_seqs=4,
    )
    return found


# ---- the oracle


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rotate(x: np.ndarray, position: int) -> np.ndarray:
    """x [heads, D] at a position: feature i pairs with i + D/2."""
    half = x.shape[1] // 2
    angle = position / 10000.0 ** (np.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], 1)


class Oracle:
    """EAGLE heads, entry after entry."""

    def __init__(self, layout: Layout, tensors: Tensors, ends: Ends):
        self.layout, self.w = layout, {name: array.astype(np.float64) for name, array in tensors.items() if name not in ("d2t", "t2d")}
        self.table = self.w.get("embed_tokens.weight", ends.table.astype(np.float64))
        self.head = self.w.get("lm_head.weight", ends.head.astype(np.float64))
        d2t = tensors.get("d2t")
        self.targets = np.arange(V) if d2t is None else d2t + np.arange(len(d2t))
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def guesses(self, tokens: list[int], states: np.ndarray, count: int) -> tuple[list[int], list[np.ndarray]]:
        """Greedy tokens, and the logits over the draft vocabulary of each, after tokens x_0 .. x_n with states of x_0 .. x_(n-1)."""
        self.keys, self.values = [], []
        for p in range(len(tokens) - 1):
            state = self.layer(tokens[p + 1], self.combine(states[p].astype(np.float64)), p)
        found, logits = [], []
        for k in range(count):
            logits.append(self.logits(state))
            found.append(int(self.targets[logits[-1].argmax()]))
            state = self.layer(found[-1], self.feed(state), len(tokens) - 1 + k)
        return found, logits

    def combine(self, x: np.ndarray) -> np.ndarray:
        if not self.layout.eagle3:
            return x
        if self.layout.config.get("norm_before_fc"):
            x = rms(x, self.w["input_norm.weight"])
        if self.layout.config.get("fc_norm"):
            x = np.concatenate([rms(part, self.w[f"fc_norm.{i}.weight"]) for i, part in enumerate(np.split(x, 3))])
        return self.w["fc.weight"] @ x

    def feed(self, state: np.ndarray) -> np.ndarray:
        return rms(state, self.w["norm.weight"]) if self.layout.config.get("norm_output") or self.layout.mtp else state

    def logits(self, state: np.ndarray) -> np.ndarray:
        return self.head @ (rms(state, self.w["norm.weight"]) if self.layout.eagle3 or self.layout.mtp else state)

    def layer(self, token: int, hidden: np.ndarray, position: int) -> np.ndarray:
        p, embedded = self.layout.prefix, self.table[token]
        if self.layout.eagle3:
            normed = rms(hidden, self.w[p + "hidden_norm.weight"])
            residual = normed if self.layout.config.get("norm_before_residual") else hidden
            read = np.concatenate([rms(embedded, self.w[p + "input_layernorm.weight"]), normed])
        elif self.layout.mtp:
            both = [rms(hidden, self.w[p + "hidden_norm.weight"]), rms(embedded, self.w[p + "token_norm.weight"])]
            residual = self.w["fc.weight"] @ np.concatenate(both)
            read = rms(residual, self.w[p + "input_layernorm.weight"])
        else:
            residual = self.w["fc.weight"] @ np.concatenate([embedded, hidden]) + self.w.get("fc.bias", 0)
            read = rms(residual, self.w[p + "input_layernorm.weight"]) if self.layout.first_norm else residual
        x = residual + self.w[p + "self_attn.o_proj.weight"] @ self.attend(read, position)
        h = rms(x, self.w[p + "post_attention_layernorm.weight"])
        gate, up = (self.w[f"{p}mlp.{name}_proj.weight"] @ h for name in ("gate", "up"))
        return x + self.w[p + "mlp.down_proj.weight"] @ (silu(gate) * up)

    def attend(self, x: np.ndarray, position: int) -> np.ndarray:
        a = self.layout.prefix + "self_attn."
        rows = (self.w[f"{a}{name}_proj.weight"] @ x + self.w.get(f"{a}{name}_proj.bias", 0) for name in "qkv")
        q, k, v = (row.reshape(-1, self.layout.head_dim) for row in rows)
        if self.layout.qk_norm:
            q, k = rms(q, self.w[a + "q_norm.weight"]), rms(k, self.w[a + "k_norm.weight"])
        del self.keys[position:], self.values[position:]
        self.keys.append(rotate(k, position))
        self.values.append(v)
        q, groups = rotate(q, position), self.layout.heads // self.layout.kv_heads
        out = []
        for head in range(self.layout.heads):
            keys, values = (np.stack(each)[:, head // groups] for each in (self.keys, self.values))
            scores = keys @ q[head] * self.layout.head_dim**-0.5
            weights = np.exp(scores - scores.max())
            out.append(weights @ values / weights.sum())
        return np.concatenate(out)


def medusa_logits(tensors: Tensors, heads: int, layers: int, state: np.ndarray) -> list[np.ndarray]:
    w, found = {name: array.astype(np.float64) for name, array in tensors.items()}, []
    for i in range(heads):
        x = state.astype(np.float64)
        for j in range(layers):
            x = x + silu(w[f"{i}.{j}.linear.weight"] @ x + w[f"{i}.{j}.linear.bias"])
        found.append(w[f"{i}.{layers}.weight"] @ x)
    return found


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return np.asarray(e / e.sum())
