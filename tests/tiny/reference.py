"""Random small checkpoints written by transformers, and what transformers itself computes from them. Needs PyTorch.

The reference is eager attention in float32 over the weights as they were stored, with the whole sequence computed again for every
token: no cache that could hide a disagreement.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.tiny.families import STEPS, Family

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # models this small only wait for the other threads

GAP = 5e-3  # least distance of the best logit from the second at every greedy step: 1e-3 is float noise's, with room
_NORMS_AT_0 = ("Gemma2", "Gemma3", "Qwen3Next", "Qwen3_5")  # whose weights are stored as 1 less
DISTINCT = 12  # least number of different tokens among the greedy ones of a prompt


@dataclass(frozen=True)
class Reference:
    """prompts: ids. logits: float32 [T, V] a prompt. tokens: STEPS ids a prompt. gap: the least top-1 to top-2 distance seen."""

    prompts: list[list[int]]
    logits: list[np.ndarray]
    tokens: list[list[int]]
    gap: float

    @property
    def usable(self) -> bool:
        return self.gap > GAP and all(len(set(tokens)) >= DISTINCT for tokens in self.tokens)


def write_checkpoint(family: Family, seed: int, folder: Path) -> None:
    """Saves a model of `family` with random weights, norms and biases to `folder` (config.json and safetensors)."""
    config = getattr(transformers, family.config_class)(**family.config)
    model = getattr(transformers, family.model_class)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(_random(name, weight, generator, norms_at=0.0 if family.model_class.startswith(_NORMS_AT_0) else 1.0))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    model.to(getattr(torch, family.store))
    size = {"max_shard_size": family.shard_bytes} if family.shard_bytes else {}
    model.save_pretrained(folder, **size)
    (folder / "generation_config.json").unlink(missing_ok=True)
    for path in folder.iterdir():
        path.chmod(0o644)


def _random(name: str, weight: torch.Tensor, generator: torch.Generator, norms_at: float) -> torch.Tensor:
    """Values that keep activations near 1 at a hidden size of 64, give logits a spread of 1 to 3, and leave no weight at its default."""
    noise = torch.randn(weight.shape, generator=generator)
    if name.endswith("bias"):
        return 0.2 * noise
    if name.endswith("A_log"):  # the state of a layer with the gated delta rule lasts for some tens of tokens
        return noise - 3
    if "linear_attn.conv1d" in name:
        return 0.5 * noise
    if weight.ndim == 1:  # norms
        norms_at = 1.0 if name.endswith("linear_attn.norm.weight") else norms_at
        return norms_at + 0.3 * noise
    if name.endswith(("embed_tokens.weight", "wte.weight", "wpe.weight")):
        return 0.2 * noise
    return (0.25 if "lm_head" in name else 0.15) * noise


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def prompts_of(family: Family, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, family.config["vocab_size"], length).tolist() for length in family.prompt_lengths]


@torch.no_grad()
def compute(model: Any, prompts: list[list[int]]) -> Reference:
    """Ends early, with fewer tokens, where two logits are too close for the checkpoint to be of use."""
    logits, tokens, gap = [], [], float("inf")
    for prompt in prompts:
        ids = list(prompt)
        for step in range(STEPS):
            out = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
            if step == 0:
                logits.append(out.numpy())
            best = out[-1].topk(2)
            gap = min(gap, float(best.values[0] - best.values[1]))
            ids.append(int(best.indices[0]))
            if gap <= GAP:
                return Reference(prompts, logits, tokens, gap)
        tokens.append(ids[len(prompt) :])
    return Reference(prompts, logits, tokens, gap)


@torch.no_grad()
def window_matters(model: Any, reference: Reference) -> bool:
    """Whether the model's sliding window, if it has one, changes the last logits of the longest prompt."""
    window = getattr(model.config, "sliding_window", None)
    if not window:
        return True
    kept = model.config.sliding_window, getattr(model.config, "layer_types", None)
    model.config.sliding_window = 10_000
    wide = model(input_ids=torch.tensor([reference.prompts[-1]]), use_cache=False).logits[0, -1]
    model.config.sliding_window = kept[0]
    return bool((wide - torch.from_numpy(reference.logits[-1][-1])).abs().max() > 0.1)


def make(family: Family, folder: Path, first_seed: int) -> tuple[int, Reference]:
    """The first seed from `first_seed` on whose checkpoint, left in `folder`, has a decisive and varied greedy continuation."""
    for seed in itertools.count(first_seed):
        write_checkpoint(family, seed, folder)
        model = load(folder)
        reference = compute(model, prompts_of(family, seed))
        if reference.usable:
            assert window_matters(model, reference), f"{folder.name}: the sliding window changes nothing"
            return seed, reference
    raise AssertionError("unreachable")
