"""Trains what `tinyvllm/demo/` ships: a tokenizer, a small LLaMA, a smaller draft of it, and the model card with their figures.

    python -m tinyvllm.demo.train --out DIR [--steps N] [--draft-steps N] [--seed S]

DIR gets `model/` and `draft/` (Hugging Face folders), `README.md`, and checkpoints: a stopped run continues where it was.
PyTorch, tokenizers and safetensors are needed here and nowhere else in the package.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

from tinyvllm.demo import corpus
from tinyvllm.demo.corpus import BOS, END, PAD, PEOPLE, ROLES, Asked

VOCAB = 3072
SPECIAL = (BOS, END, PAD, *ROLES.values())
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('the roles are system, user and assistant') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] | trim) + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


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
    batch_tokens: int = 4096
    cooldown: float = 0.5
    warmup: int = 60
    matrix_rate: float = 0.01  # Muon
    matrix_decay: float = 0.1
    embedding_rate: float = 0.01  # AdamW
    norm_rate: float = 0.002

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
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=list(SPECIAL), initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    texts = ((d.text or "\n".join(content for _, content in d.turns)) for d in islice(corpus.documents(seed), 40000))
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise RuntimeError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {VOCAB}: it is too small or too uniform")
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[bos]),
        ]
    )
    return tokenizer


def write_tokenizer_config(tokenizer: Tokenizer, path: Path) -> None:
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(t)): {
                "content": t,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for t in SPECIAL
        },
        "additional_special_tokens": list(ROLES.values()),
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MODEL.max_position_embeddings,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    path.write_text(json.dumps(config, indent=2) + "\n")


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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x [B, T, E]; cos, sin [T, D]
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.head_dim).transpose(1, 2)  # [B, H, T, D]
        k = self.k_proj(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)  # [B, K, T, D]
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

    cos: Tensor  # [positions, D]
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        angle = torch.outer(
            torch.arange(shape.max_position_embeddings).float(), shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        )
        self.register_buffer("cos", torch.cat((angle, angle), dim=-1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angle, angle), dim=-1).sin(), persistent=False)
        # The embedding is large and the last norm small: with a small embedding (tied, so that the logits start small) the layers soon
        # write so much more than the embedding holds that no later layer sees which token it was, and names are never copied.
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        nn.init.constant_(self.norm.weight, 0.06)
        for name, p in self.layers.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(p)  # a layer begins as the identity
            elif p.ndim == 2:
                nn.init.normal_(p, std=p.shape[1] ** -0.5)

    def hidden(self, tokens: Tensor) -> Tensor:  # [B, T] -> [B, T, E]
        x = self.embed_tokens(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.bfloat16)
        cos, sin = (z[: tokens.shape[1]].to(x.dtype) for z in (self.cos, self.sin))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:  # [B, T] -> [B, T, V]
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
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("momentum", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(m, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


# ---- data ----

CHUNK = 64  # steps whose rows are generated at once


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
        hidden = model.hidden(tokens).flatten(0, 1)  # [B * T, E]
        top = hidden.detach().requires_grad_()
        for h, t in zip(top.split(1024), targets.split(1024), strict=True):
            loss = F.cross_entropy(F.linear(h, model.embed_tokens.weight).float(), t, reduction="sum") / len(targets)
            loss.backward()
            total += loss.item()
    hidden.backward(top.grad)
    return total


def train(name: str, shape: Shape, plan: Plan, tokenizer: Tokenizer, seed: int, out: Path, device: torch.device) -> None:
    """Continues from `out/name.pt` where there is one, and leaves the trained weights there."""
    torch.manual_seed(seed)
    model = Llama(shape).to(device)
    optimizers: list[torch.optim.Optimizer] = [
        Muon([p for p in model.layers.parameters() if p.ndim == 2], plan.matrix_rate, plan.matrix_decay),
        torch.optim.AdamW([model.embed_tokens.weight], plan.embedding_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], plan.norm_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    base = [plan.matrix_rate, plan.embedding_rate, plan.norm_rate]
    checkpoint = out / f"{name}.pt"
    step, seconds, smooth = 0, 0.0, math.log(shape.vocab_size)
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        old = Plan(**saved["plan"])
        if saved["seed"] != seed or (
            old != plan and (asdict(old) | {"steps": plan.steps} != asdict(plan) or saved["step"] > min(old.falls_at, plan.falls_at))
        ):
            raise SystemExit(f"{checkpoint} is of another plan or seed; remove it or choose another --out")
        model.load_state_dict(saved["model"])
        for o, state in zip(optimizers, saved["optimizers"], strict=True):
            o.load_state_dict(state)
        step, seconds, smooth = saved["step"], saved["seconds"], saved["loss"]

    def save() -> None:
        torch.save(
            {
                "plan": asdict(plan),
                "seed": seed,
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
                "step": step,
                "seconds": seconds,
                "loss": smooth,
            },
            checkpoint.with_suffix(".tmp"),
        )
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
            print(
                f"{name} step {step}/{plan.steps} loss {loss:.4f} smooth {smooth:.4f} rate {plan.rate(step - 1):.3f} "
                f"{(step - marked) * plan.batch_tokens / (now - mark):.0f} tokens/s",
                flush=True,
            )
            mark, marked = now, step
        if step % 50 == 0 or step == plan.steps:
            seconds, began = seconds + time.process_time() - began, time.process_time()
            save()


# ---- export ----


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """A reader of `path` sees the old file or the new one, never half of one."""
    write(path.with_name(path.name + ".tmp"))
    path.with_name(path.name + ".tmp").chmod(0o644)  # safetensors writes 0600
    os.replace(path.with_name(path.name + ".tmp"), path)


def export(state: dict[str, Tensor], shape: Shape, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    bos, end, pad = (tokenizer.token_to_id(t) for t in (BOS, END, PAD))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": bos,
        "eos_token_id": end,
        "pad_token_id": pad,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "model_type": "llama",
        "pretraining_tp": 1,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    generation = {"bos_token_id": bos, "do_sample": True, "eos_token_id": end, "pad_token_id": pad, "temperature": 0.7, "top_p": 0.95}
    tensors = {f"model.{name}": value.to("cpu", torch.bfloat16).contiguous() for name, value in state.items()}
    replace(folder / "model.safetensors", lambda p: save_file(tensors, p, metadata={"format": "pt"}))
    replace(
        folder / "config.json", lambda p: p.write_text(json.dumps(dict(sorted((config | asdict(shape)).items())), indent=2) + "\n") and None
    )
    replace(folder / "generation_config.json", lambda p: p.write_text(json.dumps(generation, indent=2) + "\n"))
    replace(folder / "tokenizer.json", lambda p: tokenizer.save(str(p)))
    replace(folder / "tokenizer_config.json", lambda p: write_tokenizer_config(tokenizer, p))


def load(folder: Path, shape: Shape) -> Llama:
    """The exported weights, rounded to bf16 as they are shipped."""
    model = Llama(shape)
    model.load_state_dict({name.removeprefix("model."): value.float() for name, value in load_file(folder / "model.safetensors").items()})
    return model.eval()


# ---- evaluation: everything the card says is measured here, on the exported weights ----


def chat_prompt(*turns: tuple[str, str]) -> str:
    return "".join(f"{ROLES[role]}{content}{END}" for role, content in turns) + ROLES["assistant"]


@torch.no_grad()
def generate(model: Llama, tokenizer: Tokenizer, prompts: list[str], most: int, temperature: float = 0.0, seed: int = 0) -> list[str]:
    """Continuations, by running the whole rows again for every token: slow, but with nothing in it that could be wrong."""
    end, noise = tokenizer.token_to_id(END), torch.Generator().manual_seed(seed)
    assert end is not None, f"train: the tokenizer has no {END}"
    rows = [e.ids for e in tokenizer.encode_batch(prompts)]
    begin, open_rows = [len(r) for r in rows], list(range(len(rows)))
    for _ in range(most):
        width = max(len(rows[i]) for i in open_rows)
        batch = torch.tensor([rows[i] + [end] * (width - len(rows[i])) for i in open_rows])
        last = torch.tensor([len(rows[i]) - 1 for i in open_rows])
        hidden = model.hidden(batch)[torch.arange(len(open_rows)), last]
        logits = F.linear(hidden, model.embed_tokens.weight)  # [rows still open, V]
        if temperature:
            ids = torch.multinomial((logits / temperature).softmax(-1), 1, generator=noise).flatten().tolist()
        else:
            ids = logits.argmax(-1).tolist()
        for i, token in zip(open_rows, ids, strict=True):
            rows[i].append(token)
        open_rows = [i for i in open_rows if rows[i][-1] != end and len(rows[i]) < model.shape.max_position_embeddings]
        if not open_rows:
            break
    return [tokenizer.decode(r[b:], skip_special_tokens=True) for r, b in zip(rows, begin, strict=True)]


@torch.no_grad()
def held_out_loss(model: Llama, draft: Llama, tokenizer: Tokenizer, kind: str, count: int) -> dict[str, float]:
    """Mean loss a token over documents read one by one, and how often the two models name the same next token."""
    total = total_draft = same = tokens = characters = 0.0
    for document in islice(corpus.documents(7, "held-out", kind), count):
        text = document.render()
        ids = torch.tensor(tokenizer.encode(text).ids[: model.shape.max_position_embeddings])
        a, b = (m(ids[None, :-1])[0] for m in (model, draft))
        total += F.cross_entropy(a, ids[1:], reduction="sum").item()
        total_draft += F.cross_entropy(b, ids[1:], reduction="sum").item()
        same += (a.argmax(-1) == b.argmax(-1)).sum().item()
        tokens += len(ids) - 1
        characters += len(text)
    return {"documents": count, "tokens": tokens, "loss": total / tokens, "draft_loss": total_draft / tokens, "agreement": same / tokens}


def right(asked: Asked, answer: str) -> bool:
    """The short answer is in the answer as whole words; a name or a yes that must be the answer has to come first."""
    wanted, said = (re.findall(r"\w+", text.lower()) for text in (asked.short, answer))
    if asked.question.startswith(("Is ", "Does ", "Who is older", "Who is younger")) and asked.short in (
        "Yes",
        "No",
        *(p.name for p in PEOPLE),
    ):
        return said[:1] == wanted
    return any(said[i : i + len(wanted)] == wanted for i in range(len(said)))


def distinct(make: Callable[[], Asked], count: int) -> list[Asked]:
    found: dict[str, Asked] = {}
    for _ in range(count * 200):
        asked = make()
        found.setdefault(asked.question, asked)
        if len(found) == count:
            break
    return list(found.values())


def questions(rng: random.Random) -> dict[str, list[Asked]]:
    """What is asked, by group. Every question with a key is one that training never asked."""

    def never_asked(make: Callable[[random.Random], Asked]) -> Callable[[], Asked]:
        def one() -> Asked:
            while True:
                asked = make(rng)
                if corpus.held_out(asked.key):
                    return asked

        return one

    def sums(op: str) -> Callable[[], Asked]:
        def one() -> Asked:
            a, o, b, c = corpus.numbers(rng, "held-out", op)
            return Asked(f"What is {a} {corpus.SIGN[o][0]} {b}?", str(c), "")

        return one

    return {
        "Willowmere: people": distinct(never_asked(corpus.about_people), 120),
        "Willowmere: places": distinct(never_asked(corpus.about_places), 20),
        "Willowmere: yes or no": distinct(never_asked(corpus.yes_or_no), 40),
        "Willowmere: who is older": distinct(never_asked(corpus.older), 30),
        "Willowmere: other facts (asked in training too)": [Asked(*f) for f in corpus.FACTS],
        "General knowledge (asked in training too)": [Asked(*f) for f in corpus.GENERAL],
        "Says that it does not know": distinct(lambda: corpus.unknown(rng), 60),
        "Sums": distinct(sums("+"), 100),
        "Differences": distinct(sums("-"), 100),
        "Products": distinct(sums("x"), 10),
        "Word problems": distinct(lambda: corpus.word_problem(rng, "held-out"), 60),
    }


def number_right(asked: Asked, answer: str) -> bool:
    said = re.findall(r"-?\d+", answer)
    return bool(said) and asked.short in (said[-1], said[2] if len(said) > 2 else said[-1])


def json_scores(model: Llama, tokenizer: Tokenizer) -> dict[str, float]:
    asked = [d.turns for d in islice((d for d in corpus.documents(7, "held-out", "json") if len(d.turns) == 2), 100)]
    answers = generate(model, tokenizer, [chat_prompt(t[0]) for t in asked], 160)
    valid = exact = 0
    for turns, answer in zip(asked, answers, strict=True):
        try:
            exact += json.loads(answer) == json.loads(turns[1][1])
            valid += 1
        except ValueError:
            pass
    return {"asked": len(asked), "valid": valid, "exact": exact}


SAMPLES = (("Once upon a time", 0.7), ("In the village of Willowmere", 0.7), ("The little fox wanted to", 0.7))
CHATS = (
    ("Hello! My name is Anna.",),
    ("Who are you?",),
    ("What does Mira do?",),
    ("Where does Caspar live, and what is his pet?",),
    ("Who has a parrot?",),
    ("What is the capital of France?",),
    ("What is 27 + 35?",),
    ("Name three animals.",),
    ("Write a JSON record for Edda.",),
    ("Tell me a story about a fox.",),
)


def evaluate(out: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    model, draft = load(out / "model", MODEL), load(out / "draft", DRAFT)
    figures: dict[str, Any] = {"held_out": {kind: held_out_loss(model, draft, tokenizer, kind, 200) for kind in corpus.KINDS}}
    scores: dict[str, dict[str, int]] = {}
    wrong: list[tuple[str, str, str]] = []
    for group, asked in questions(random.Random(7)).items():
        check = number_right if group in ("Sums", "Differences", "Products", "Word problems") else right
        for role, m in (("model", model), ("draft", draft)):
            answers = [
                a
                for i in range(0, len(asked), 64)
                for a in generate(m, tokenizer, [chat_prompt(("user", x.question)) for x in asked[i : i + 64]], 48)
            ]
            good = [
                ("do not know" in a or "not sure" in a) if group.startswith("Says") else check(x, a)
                for x, a in zip(asked, answers, strict=True)
            ]
            scores.setdefault(group, {"asked": len(asked)})[role] = sum(good)
            if m is model:
                wrong += [(x.question, a, x.short) for x, a, g in zip(asked, answers, good, strict=True) if not g]
    figures |= {"scores": scores, "json": json_scores(model, tokenizer), "wrong": wrong}
    figures["stories"] = [(p, generate(model, tokenizer, [p], 300, t, seed)[0]) for seed, (p, t) in enumerate(SAMPLES)]
    figures["chats"] = [(c[0], generate(model, tokenizer, [chat_prompt(("user", c[0]))], 300)[0]) for c in CHATS]
    return figures


# ---- the card ----

CARD = Path(__file__).with_name("card.template.md")


def card(figures: dict[str, Any], out: Path, seed: int) -> str:
    runs = {name: torch.load(out / f"{name}.pt", map_location="cpu", weights_only=True) for name in ("model", "draft")}
    values: dict[str, object] = {
        "model": MODEL,
        "draft": DRAFT,
        "seed": seed,
        "draft_seed": seed + 1,
        "torch": torch.__version__.split("+")[0],
        "threads": torch.get_num_threads(),
    }
    for name, run in runs.items():
        plan = Plan(**run["plan"])
        values |= {
            f"{name}_steps": plan.steps,
            f"{name}_tokens": run["step"] * plan.batch_tokens,
            f"{name}_loss": run["loss"],
            f"{name}_minutes": run["seconds"] / 60,
            f"{name}_parameters": sum(p.numel() for p in run["model"].values()),
            f"{name}_bytes": (out / name / "model.safetensors").stat().st_size / 1e6,
            "batch": plan.batch_tokens,
            "matrix_rate": plan.matrix_rate,
            "matrix_decay": plan.matrix_decay,
            "embedding_rate": plan.embedding_rate,
            "norm_rate": plan.norm_rate,
            "warmup": plan.warmup,
        }
    held = figures["held_out"]

    def quote(text: str) -> str:
        return "\n".join(f"> {line}".rstrip() for line in text.split("\n"))

    values |= {
        "shares": ", ".join(f"{kind} {share:.0%}" for kind, share in corpus.SHARES.items()),
        "documents": held["story"]["documents"],
        "losses": "\n".join(
            f"| {kind} | {h['tokens']:,.0f} | {h['loss']:.3f} | {math.exp(h['loss']):.2f} "
            f"| {h['draft_loss']:.3f} | {math.exp(h['draft_loss']):.2f} | {h['agreement']:.1%} |"
            for kind, h in held.items()
        ),
        "scores": "\n".join(
            f"| {group} | {n['asked']} | {n['model']} ({n['model'] / n['asked']:.0%}) | {n['draft']} ({n['draft'] / n['asked']:.0%}) |"
            for group, n in figures["scores"].items()
        ),
        "json_asked": figures["json"]["asked"],
        "json_valid": figures["json"]["valid"],
        "json_exact": figures["json"]["exact"],
        "stories": "\n\n".join(quote(f"**{p}**{a if a[:1] in ',.' else ' ' + a.lstrip()}") for p, a in figures["stories"]),
        "chats": "\n\n".join(quote(f"**{q}**\n\n{a}") for q, a in figures["chats"]),
        "wrong": "\n".join(
            f"- {q} *{a}* (expected: {e})" for q, a, e in random.Random(0).sample(figures["wrong"], min(8, len(figures["wrong"])))
        ),
    }
    return CARD.read_text().format(**values)


def load_tokenizer(out: Path, seed: int) -> Tokenizer:
    path = out / "tokenizer.json"
    if not path.exists():
        train_tokenizer(seed).save(str(path))
    return Tokenizer.from_file(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tinyvllm.demo.train", description="Train the demonstration model and its draft.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the models, the card and the checkpoints")
    parser.add_argument("--steps", type=int, default=1200, help="steps of the model")
    parser.add_argument("--draft-steps", type=int, default=1000, help="steps of the draft")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--stage",
        choices=("all", "model", "draft", "export", "card"),
        default="all",
        help="train one of the two, only export the checkpoints, or only write the card",
    )
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
    if args.stage in ("all", "export"):
        for name, shape in (("model", MODEL), ("draft", DRAFT)):
            saved = torch.load(args.out / f"{name}.pt", map_location="cpu", weights_only=True)
            export(saved["model"], shape, tokenizer, args.out / name)
    if args.stage in ("all", "card"):
        figures = evaluate(args.out, tokenizer)
        (args.out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
        (args.out / "README.md").write_text(card(figures, args.out, args.seed))


if __name__ == "__main__":
    main()
