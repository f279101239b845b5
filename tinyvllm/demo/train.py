"""Trains what `tinyvllm/demo/` ships: a tokenizer, a small LLaMA, a smaller draft of it, and the model card with their figures.

    python -m tinyvllm.demo.train --out DIR [--steps N] [--draft-steps N] [--seed S]

DIR gets `model/` and `draft/` (Hugging Face folders), `README.md`, and checkpoints: a run that was stopped goes on where it was.
PyTorch, tokenizers and safetensors are needed here and nowhere else in the package.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

from tinyvllm.demo import corpus
from tinyvllm.demo.corpus import BOS, END, PAD, ROLES, Asked

VOCAB = 3072
SPECIAL = (BOS, END, PAD, *ROLES.values())
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('the roles are system, user and assistant') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] | trim) + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")


@dataclass(frozen=True)
class Shape:
    """A LLaMA, in the words of its config.json."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    head_dim: int = 64
    vocab_size: int = VOCAB
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 1024


MODEL = Shape(hidden_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, intermediate_size=1024)
DRAFT = Shape(hidden_size=128, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, intermediate_size=512)


@dataclass(frozen=True)
class Plan:
    """How long and how fast to learn. The rate warms up, stays, and falls to zero over the last `cooldown` of the steps.

    Until the rate falls nothing depends on the number of steps, so a run may still be made longer or shorter.
    """

    steps: int
    batch_tokens: int = 6144
    cooldown: float = 0.5
    warmup: int = 60
    matrix_rate: float = 0.02   # Muon
    other_rate: float = 0.004   # AdamW: embedding and norms
    matrix_decay: float = 0.02

    @property
    def falls_at(self) -> int:
        return round(self.steps * (1 - self.cooldown))

    def rate(self, step: int) -> float:
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / (self.steps - self.falls_at))

    def row_length(self, step: int) -> int:
        """Short rows are cheap; the long ones at the end teach the late positions."""
        return 256 if step < self.falls_at else 512 if step < self.steps * 0.92 else 1024


# ---- tokenizer ----

def train_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE: every text can be encoded, digits stand alone, a plain encode begins with BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=list(SPECIAL), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    texts = ((d.text or "\n".join(content for _, content in d.turns)) for d in islice(corpus.documents(seed), 40000))
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise RuntimeError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {VOCAB}: it is too small or too uniform")
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False),
                                                    processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[bos])])
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": True, "add_eos_token": False,
        "added_tokens_decoder": {str(tokenizer.token_to_id(t)): {"content": t, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True} for t in SPECIAL},
        "additional_special_tokens": list(ROLES.values()), "bos_token": BOS, "eos_token": END, "pad_token": PAD, "unk_token": None, "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False, "model_max_length": MODEL.max_position_embeddings, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


# ---- model ----

class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = s.num_attention_heads, s.num_key_value_heads, s.head_dim
        self.q_proj = linear(s.hidden_size, self.heads * s.head_dim)
        self.k_proj = linear(s.hidden_size, self.kv_heads * s.head_dim)
        self.v_proj = linear(s.hidden_size, self.kv_heads * s.head_dim)
        self.o_proj = linear(self.heads * s.head_dim, s.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:       # x [B, T, E]; cos, sin [T, D]
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.head_dim).transpose(1, 2)        # [B, H, T, D]
        k = self.k_proj(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)     # [B, K, T, D]
        v = self.v_proj(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (z.repeat_interleave(self.heads // self.kv_heads, dim=1) for z in (k, v))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE as Hugging Face lays it out: the pair of a lane is half a head away."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class MLP(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = linear(s.hidden_size, s.intermediate_size)
        self.up_proj = linear(s.hidden_size, s.intermediate_size)
        self.down_proj = linear(s.intermediate_size, s.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = MLP(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The names of the parameters, with "model." in front, are those of LlamaForCausalLM."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        angle = torch.outer(torch.arange(shape.max_position_embeddings).float(), shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim))
        self.register_buffer("cos", torch.cat((angle, angle), dim=-1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angle, angle), dim=-1).sin(), persistent=False)
        for name, p in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(p)       # a layer begins as the identity
            elif p.ndim == 2:
                nn.init.normal_(p, std=0.02 if "embed" in name else p.shape[1] ** -0.5)

    def hidden(self, tokens: Tensor) -> Tensor:         # [B, T] -> [B, T, E]
        x = self.embed_tokens(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.bfloat16)
        cos, sin = (z[: tokens.shape[1]].to(x.dtype) for z in (self.cos, self.sin))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:        # [B, T] -> [B, T, V]
        return F.linear(self.hidden(tokens), self.embed_tokens.weight)


# ---- optimizer ----

def orthogonal(g: Tensor) -> Tensor:
    """The nearest orthogonal matrix, roughly, by five Newton-Schulz steps (Muon, Jordan et al. 2024)."""
    x = g.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for a, b, c in ((3.4445, -4.7750, 2.0315),) * 5:
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return (x.T if tall else x).to(g.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix is made orthogonal before it is applied: about twice AdamW's progress a step here."""

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:     # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("momentum", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(m, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


# ---- data ----

CHUNK = 64      # steps whose rows are generated at once


def rows(tokenizer: Tokenizer, plan: Plan, seed: int, start: int) -> Iterator[Tensor]:
    """The batches of steps `start`, `start + 1`, ...: [B, row + 1]. A row begins with a document and is cut where it is full.

    A chunk's documents depend on the seed and the number of the chunk alone, so that a resumed run sees what an unbroken one would.
    """
    for chunk in range(start // CHUNK, math.ceil(plan.steps / CHUNK)):
        stream = corpus.documents(seed * 100_003 + chunk + 1)
        waiting: list[list[int]] = []
        for step in range(chunk * CHUNK, min((chunk + 1) * CHUNK, plan.steps)):
            length = plan.row_length(step)
            batch = []
            for _ in range(plan.batch_tokens // length):
                row: list[int] = []
                while len(row) <= length:
                    if not waiting:
                        waiting = [e.ids for e in tokenizer.encode_batch([d.render() for d in islice(stream, 1000)])]
                    row += waiting.pop()
                batch.append(row[: length + 1])
            if step >= start:
                yield torch.tensor(batch)


# ---- training ----

def backward(model: Llama, tokens: Tensor, targets: Tensor) -> float:
    """Adds the gradients of the mean loss. The logits exist for 1024 rows at a time: all of them at once are slower on a CPU."""
    total = 0.0
    with torch.autocast(tokens.device.type, torch.bfloat16):
        hidden = model.hidden(tokens).flatten(0, 1)     # [B * T, E]
        top = hidden.detach().requires_grad_()
        for h, t in zip(top.split(1024), targets.split(1024), strict=True):
            loss = F.cross_entropy(F.linear(h, model.embed_tokens.weight).float(), t, reduction="sum") / len(targets)
            loss.backward()
            total += loss.item()
    hidden.backward(top.grad)
    return total


def train(name: str, shape: Shape, plan: Plan, tokenizer: Tokenizer, seed: int, out: Path, device: torch.device) -> tuple[Llama, dict[str, float]]:
    torch.manual_seed(seed)
    model = Llama(shape).to(device)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers: list[torch.optim.Optimizer] = [Muon(matrices, plan.matrix_rate, plan.matrix_decay),
                                               torch.optim.AdamW(others, plan.other_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
    base = [plan.matrix_rate, plan.other_rate]
    checkpoint = out / f"{name}.pt"
    step, seconds, smooth = 0, 0.0, math.log(shape.vocab_size)
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        old = Plan(**saved["plan"])
        if saved["seed"] != seed or (old != plan and (asdict(old) | {"steps": plan.steps} != asdict(plan) or saved["step"] > min(old.falls_at, plan.falls_at))):
            raise SystemExit(f"{checkpoint} is of another plan or seed; remove it or choose another --out")
        model.load_state_dict(saved["model"])
        for o, state in zip(optimizers, saved["optimizers"], strict=True):
            o.load_state_dict(state)
        step, seconds, smooth = saved["step"], saved["seconds"], saved["loss"]

    def save() -> None:
        torch.save({"plan": asdict(plan), "seed": seed, "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step, "seconds": seconds, "loss": smooth},
                   checkpoint.with_suffix(".tmp"))
        os.replace(checkpoint.with_suffix(".tmp"), checkpoint)

    began = time.process_time()
    mark, marked = time.perf_counter(), step
    for batch in rows(tokenizer, plan, seed, step):
        batch = batch.to(device)
        loss = backward(model, batch[:, :-1], batch[:, 1:].flatten())
        for o, lr in zip(optimizers, base, strict=True):
            for group in o.param_groups:
                group["lr"] = lr * plan.rate(step)
            o.step()
            o.zero_grad()
        step += 1
        smooth += (loss - smooth) * max(0.02, 1 / step)
        if step % 20 == 0 or step == plan.steps:
            now = time.perf_counter()
            print(f"{name} step {step}/{plan.steps} loss {loss:.4f} smooth {smooth:.4f} rate {plan.rate(step - 1):.3f} "
                  f"{(step - marked) * plan.batch_tokens / (now - mark):.0f} tokens/s", flush=True)
            mark, marked = now, step
        if step % 50 == 0 or step == plan.steps:
            seconds, began = seconds + time.process_time() - began, time.process_time()
            save()
    return model, {"loss": smooth, "cpu_seconds": seconds, "tokens": step * plan.batch_tokens, "steps": step}


def load_tokenizer(out: Path, seed: int) -> Tokenizer:
    path = out / "tokenizer.json"
    if not path.exists():
        train_tokenizer(seed).save(str(path))
    return Tokenizer.from_file(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tinyvllm.demo.train", description="Train the demonstration model and its draft.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the models, the card and the checkpoints")
    parser.add_argument("--steps", type=int, default=2000, help="steps of the model")
    parser.add_argument("--draft-steps", type=int, default=1500, help="steps of the draft")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stage", choices=("all", "model", "draft", "export"), default="all", help="train one of the two, or only export what the checkpoints hold")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves it to PyTorch")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(torch.accelerator.current_accelerator() or "cpu") if torch.accelerator.is_available() else torch.device("cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(args.out, args.seed)
    if args.stage in ("all", "model"):
        train("model", MODEL, Plan(args.steps), tokenizer, args.seed, args.out, device)
    if args.stage in ("all", "draft"):
        train("draft", DRAFT, Plan(args.draft_steps), tokenizer, args.seed + 1, args.out, device)


if __name__ == "__main__":
    main()
