"""Trains the EAGLE-3 head of the demonstration model, which guesses the next tokens from the model's own hidden states.

    python -m tinyvllm.demo.train_heads --out DIR [--steps N] [--seed S] [--draft-vocab N] [--measure]

DIR gets `heads/` (config.json and model.safetensors in EAGLE-3's published layout), a checkpoint from which a stopped run continues, and
`heads.json` with the acceptance on held-out text. The head learns the model's distribution, not the text's: the loss is the divergence of
the head's softmax from the model's. It is unrolled as in use ("training-time test", Li et al. 2025, arXiv:2503.01840): in pass j the head
reads its own output of pass j - 1 where the model's hidden states would be, so that the fifth guess is about as good as the first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from tinyvllm.demo import corpus
from tinyvllm.demo.train import MODEL, Llama, Muon, Plan, RMSNorm, Shape, chat_prompt, generate, linear, load, replace, rotate, rows

DEMO = Path(__file__).parent
LAYERS = (2, 4, 6)  # the hidden states that the head reads: the residual stream after that many layers
KINDS = ("story", "chat", "world", "arithmetic", "json")
COUNTS = (1, 2, 3, 4, 5, 7)  # guesses a step that acceptance is measured for


@dataclass(frozen=True)
class HeadShape:
    """What the head's config.json adds to the model's shape."""

    intermediate_size: int = 640
    draft_vocab_size: int = 2048


@dataclass(frozen=True)
class Learning:
    """Rates of Muon for matrices and AdamW for norms; `passes` of training-time test, each of which weighs `decay` times the one before."""

    passes: int = 6
    decay: float = 0.9
    matrix_rate: float = 0.01
    norm_rate: float = 0.002


class Attention(nn.Module):
    """Attention whose projections read embedding and hidden state side by side, unrolled over the passes of training-time test."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = s.num_attention_heads, s.num_key_value_heads, s.head_dim
        self.q_proj = linear(2 * s.hidden_size, self.heads * s.head_dim)
        self.k_proj = linear(2 * s.hidden_size, self.kv_heads * s.head_dim)
        self.v_proj = linear(2 * s.hidden_size, self.kv_heads * s.head_dim)
        self.o_proj = linear(self.heads * s.head_dim, s.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x [B, T, 2E]. Row t of pass j sees rows 0 to t of pass 0, and of the passes after that row t alone. `past` gets this pass."""
        b, t, _ = x.shape
        q = rotate(self.q_proj(x).view(b, t, self.heads, self.head_dim).transpose(1, 2), cos, sin)  # [B, H, T, D]
        k = rotate(self.k_proj(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        past.append((k.repeat_interleave(self.heads // self.kv_heads, 1), v.repeat_interleave(self.heads // self.kv_heads, 1)))
        (first, values), later = past[0], past[1:]
        hidden = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        scores = [(q @ first.transpose(2, 3)).masked_fill(hidden, float("-inf")), *((q * k).sum(-1, keepdim=True) for k, _ in later)]
        weights = (torch.cat(scores, -1).float() * self.head_dim**-0.5).softmax(-1).to(q.dtype)
        out = weights[..., :t] @ values
        for i, (_, value) in enumerate(later):
            out = out + weights[..., t + i : t + i + 1] * value
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, intermediate), linear(hidden, intermediate)
        self.down_proj = linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    def __init__(self, s: Shape, intermediate: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.hidden_norm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = MLP(s.hidden_size, intermediate)

    def forward(self, e: Tensor, h: Tensor, cos: Tensor, sin: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        h = self.hidden_norm(h)  # norm_before_residual: what the residual stream starts from
        h = h + self.self_attn(torch.cat((self.input_layernorm(e), h), -1), cos, sin, past)
        return h + self.mlp(self.post_attention_layernorm(h))


class Head(nn.Module):
    """EAGLE-3's draft model for a `Llama`; the names of its parameters are the published ones. It reads the model's own embedding."""

    d2t: Tensor  # [draft vocabulary] int64: the model's token is i + d2t[i]

    def __init__(self, shape: Shape, head: HeadShape, tokens: list[int]) -> None:
        super().__init__()
        self.shape, self.head = shape, head
        self.fc = linear(len(LAYERS) * shape.hidden_size, shape.hidden_size)
        self.midlayer = MidLayer(shape, head.intermediate_size)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = linear(shape.hidden_size, head.draft_vocab_size)
        self.register_buffer("d2t", torch.tensor(tokens) - torch.arange(len(tokens)))

    @property
    def tokens(self) -> Tensor:
        """The model's token of each token of the draft vocabulary."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def start(self, model: Llama) -> None:
        """Begin as a layer that does nothing, with the model's own head and last norm, which is small: the logits start flat."""
        for name, p in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(p)
            elif p.ndim == 2:
                nn.init.normal_(p, std=p.shape[1] ** -0.5)
        with torch.no_grad():
            self.norm.weight.copy_(model.norm.weight)
            self.lm_head.weight.copy_(model.embed_tokens.weight[self.tokens])

    def passes(self, model: Llama, ids: Tensor, features: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits [B, T', V'] of guess 0, 1, ..., and the layer's output: guess j of row t is about ids[t + 2 + j].

        ids [B, T + 1], features [B, T, 3E] of the first T of them. T' is T less one a pass: a row needs the tokens that it has guessed.
        """
        h = self.fc(features)
        past: list[tuple[Tensor, Tensor]] = []
        width = features.shape[1]
        for j in range(count):
            # all rows stay, so that the keys of pass 0 are the same in every pass; those that read past the end are cut off below
            e = model.embed_tokens(F.pad(ids[:, 1 + j : 1 + j + width], (0, max(0, 1 + j + width - ids.shape[1])))).to(h.dtype)
            at = torch.arange(j, j + width).clamp(max=len(model.cos) - 1)
            cos, sin = (z[at].to(h.dtype) for z in (model.cos, model.sin))
            h = self.norm(self.midlayer(e, h, cos, sin, past))  # norm_output: what the next pass reads
            yield self.lm_head(h), h


def hidden_states(model: Llama, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The states of LAYERS side by side [B, T, 3E], and the last layer's after the final norm [B, T, E]."""
    x = model.embed_tokens(tokens)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.bfloat16)
    cos, sin = (z[: tokens.shape[1]].to(x.dtype) for z in (model.cos, model.sin))
    states = [x]
    for layer in model.layers:
        states.append(layer(states[-1], cos, sin))
    return torch.cat([states[i] for i in LAYERS], -1), model.norm(states[-1])


def frequent_tokens(tokenizer: Tokenizer, count: int, seed: int) -> list[int]:
    """The `count` most frequent tokens of the corpus, ascending. The rest of the vocabulary the head never guesses."""
    seen: Counter[int] = Counter()
    for document in islice(corpus.documents(seed), 6000):
        seen.update(tokenizer.encode(document.render()).ids)
    return sorted(token for token, _ in seen.most_common(count))


# ---- training ----


def divergence(head: Head, model: Llama, ids: Tensor, learning: Learning) -> Tensor:
    """Mean loss over rows and passes: the cross entropy of the head's guess with the model's distribution on the draft vocabulary."""
    with torch.no_grad():
        features, top = hidden_states(model, ids[:, :-1])
        wanted = F.linear(top, model.embed_tokens.weight[head.tokens]).float().softmax(-1)  # [B, T, V']
    width, total, weight = features.shape[1], torch.zeros(()), 1.0
    for j, (logits, _) in enumerate(head.passes(model, ids, features, learning.passes)):
        rows = width - 1 - j  # row t guesses what the model says after token t + 1 + j
        guesses = F.log_softmax(logits[:, :rows].float(), -1)
        total = total - weight * (wanted[:, 1 + j :] * guesses).sum(-1).mean()
        weight *= learning.decay
    return total / sum(learning.decay**j for j in range(learning.passes))


def train(head: Head, model: Llama, tokenizer: Tokenizer, plan: Plan, learning: Learning, seed: int, out: Path) -> float:
    """Trains in place and returns CPU seconds; continues from `out/head.pt` where there is one."""
    matrices, vectors = ([p for p in head.parameters() if p.ndim == n] for n in (2, 1))
    optimizers: list[torch.optim.Optimizer] = [
        Muon([p for p in matrices if p is not head.lm_head.weight], learning.matrix_rate, 0.1),
        torch.optim.AdamW([head.lm_head.weight], learning.norm_rate, betas=(0.9, 0.95), weight_decay=0.0),
        torch.optim.AdamW(vectors, learning.norm_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    base = [learning.matrix_rate, learning.norm_rate, learning.norm_rate]
    path, setting = out / "head.pt", {"plan": asdict(plan), "learning": asdict(learning), "head": asdict(head.head), "seed": seed}
    step, seconds, smooth = 0, 0.0, 0.0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        before = Plan(**saved["setting"]["plan"])  # until the rate falls, nothing depends on the number of steps
        same = saved["setting"] | {"plan": asdict(before) | {"steps": plan.steps}} == setting
        if not same or (before != plan and saved["step"] > min(before.falls_at, plan.falls_at)):
            raise SystemExit(f"{path} is of another plan or seed; remove it or choose another --out")
        head.load_state_dict(saved["head"])
        for o, state in zip(optimizers, saved["optimizers"], strict=True):
            o.load_state_dict(state)
        step, seconds, smooth = saved["step"], saved["seconds"], saved["loss"]
    began, mark = time.process_time(), time.perf_counter()
    for batch in rows(tokenizer, plan, seed, step):
        with torch.autocast("cpu", torch.bfloat16):
            loss = divergence(head, model, batch, learning)
        loss.backward()
        for o, lr in zip(optimizers, base, strict=True):
            for group in o.param_groups:
                group["lr"] = lr * plan.rate(step)
            o.step()
            o.zero_grad()
        step += 1
        smooth += (loss.item() - smooth) * max(0.02, 1 / step)
        if step % 20 == 0 or step == plan.steps:
            used = seconds + time.process_time() - began
            print(f"step {step}/{plan.steps} loss {smooth:.4f} cpu {used:.0f} s wall {time.perf_counter() - mark:.0f} s", flush=True)
        if step % 50 == 0 or step == plan.steps:
            seconds, began = seconds + time.process_time() - began, time.process_time()
            state = {"head": head.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "setting": setting}
            replace(path, partial(torch.save, state | {"step": step, "seconds": seconds, "loss": smooth}))
    return seconds


# ---- export ----


def export(head: Head, folder: Path) -> None:
    """config.json and model.safetensors (bfloat16, `d2t` int64) as EAGLE-3 heads are published."""
    folder.mkdir(parents=True, exist_ok=True)
    s, model = head.shape, json.loads((DEMO / "model" / "config.json").read_text())
    kept = (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "hidden_act",
        "model_type",
        "torch_dtype",
        "use_cache",
        "attention_bias",
        "mlp_bias",
    )
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **{key: model[key] for key in kept},
        **asdict(s),
        "num_hidden_layers": 1,
        "intermediate_size": head.head.intermediate_size,
        "draft_vocab_size": head.head.draft_vocab_size,
        "tie_word_embeddings": False,
        "norm_before_residual": True,
        "norm_output": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS), "use_aux_hidden_state": True},
    }
    replace(folder / "config.json", lambda p: p.write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n"))
    tensors = {name: p.detach().to(torch.bfloat16).contiguous() for name, p in head.named_parameters()} | {"d2t": head.d2t}
    replace(folder / "model.safetensors", lambda p: save_file(tensors, p, {"format": "pt"}))


# ---- acceptance ----


def held_out_prompts(kind: str, count: int) -> list[str]:
    """The beginnings of held-out documents: the question of a chat, else about the first fifth."""
    prompts = []
    for document in islice(corpus.documents(7, "held-out", kind), count):
        if document.turns:
            prompts.append(chat_prompt(document.turns[0]))
        else:
            text = document.render()
            prompts.append(text[: max(20, len(text) // 5)])
    return prompts


@dataclass(frozen=True)
class Guessed:
    """A continuation of the model's and the head's guesses about it: `guesses` int64 [K, T], of which row j is about ids[t + 2 + j]."""

    ids: list[int]
    begin: int  # of the continuation
    guesses: list[list[int]]


@torch.no_grad()
def guess(head: Head, model: Llama, tokenizer: Tokenizer, kind: str, count: int, drafts: int, temperature: float) -> list[Guessed]:
    """The guesses read the tokens of the text; where all before one were right, these are what the head itself has guessed."""
    prompts, found = held_out_prompts(kind, count), []
    for prompt, answer in zip(prompts, generate(model, tokenizer, prompts, 96, temperature, seed=3), strict=True):
        ids = tokenizer.encode(prompt + answer).ids
        batch = torch.tensor([ids])
        features, _ = hidden_states(model, batch[:, :-1])
        guesses = [head.tokens[logits[0].argmax(-1)].tolist() for logits, _ in head.passes(model, batch, features, drafts)]
        found.append(Guessed(ids, len(tokenizer.encode(prompt).ids), guesses))
    return found


def acceptance(texts: list[Guessed], drafts: int) -> dict[str, Any]:
    """Tokens a step with `drafts` guesses each, and how often each guess is right where those before it were."""
    steps = tokens = 0
    right, tried = [0] * drafts, [0] * drafts
    for text in texts:
        at = text.begin  # ids[at] is the newest token: drawn, and not read by the model
        while at < len(text.ids) - 1:
            accepted = 0
            while accepted < drafts and at + 1 + accepted < len(text.ids):
                tried[accepted] += 1
                if text.guesses[accepted][at - 1] != text.ids[at + 1 + accepted]:
                    break
                right[accepted] += 1
                accepted += 1
            advanced = min(accepted + 1, len(text.ids) - 1 - at)
            steps, tokens, at = steps + 1, tokens + advanced, at + advanced
    rates = [round(r / max(1, t), 4) for r, t in zip(right, tried, strict=True)]
    return {"tokens": tokens, "tokens_per_step": round(tokens / max(1, steps), 3), "right": rates}


def measure(head: Head, model: Llama, tokenizer: Tokenizer, count: int) -> dict[str, Any]:
    """Acceptance by kind of text and number of guesses, on greedy continuations of held-out prompts."""
    figures: dict[str, Any] = {}
    for kind in KINDS:
        texts = guess(head, model, tokenizer, kind, count, max(COUNTS), 0.0)
        figures[kind] = {drafts: acceptance(texts, drafts) for drafts in COUNTS}
        print(kind, {k: f["tokens_per_step"] for k, f in figures[kind].items()}, figures[kind][max(COUNTS)]["right"], flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tinyvllm.demo.train_heads", description="Train the demonstration model's EAGLE-3 head."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the head, its figures and the checkpoint")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--draft-vocab", type=int, default=2048, help="tokens that the head can guess: the most frequent of the corpus")
    parser.add_argument("--intermediate", type=int, default=640, help="width of the head's feed-forward")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens a step")
    parser.add_argument("--measure", action="store_true", help="only export the checkpoint and measure it")
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts of each kind to measure acceptance on")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves it to PyTorch")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load(DEMO / "model", MODEL).requires_grad_(False), Tokenizer.from_file(str(DEMO / "model" / "tokenizer.json"))
    shape = HeadShape(args.intermediate, args.draft_vocab)
    head = Head(MODEL, shape, frequent_tokens(tokenizer, shape.draft_vocab_size, args.seed))
    head.start(model)
    if args.measure:
        head.load_state_dict(torch.load(args.out / "head.pt", weights_only=True)["head"])
    else:
        train(head, model, tokenizer, Plan(args.steps, batch_tokens=args.batch_tokens), Learning(), args.seed, args.out)
    export(head, args.out / "heads")
    figures = measure(head.eval(), model, tokenizer, args.prompts)
    (args.out / "heads.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
