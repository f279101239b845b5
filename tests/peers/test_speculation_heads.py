"""Heads for speculation against the published formulas, written in PyTorch here: whole texts, no cache. Needs PyTorch (`make test-peers`).

The heads are random; a text is delivered in pieces, with a wrong guess between two of them, and guessed from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")

from tests.speculate import heads as tiny  # noqa: E402
from tests.speculate.heads import LAYOUTS, MTP, E, Ends, Layout, Tensors, V  # noqa: E402
from tests.speculate.test_heads import K, Text, deliver, drafts, eagle_drafter  # noqa: E402
from tinyvllm.config.switches import cache_folder  # noqa: E402
from tinyvllm.runner.device import start_device  # noqa: E402
from tinyvllm.speculate.eagle_lite import EagleLiteDrafter  # noqa: E402
from tinyvllm.speculate.head_files import open_heads  # noqa: E402
from tinyvllm.speculate.medusa import MedusaDrafter, MedusaLiteDrafter, load_medusa  # noqa: E402

F = torch.nn.functional
SEED, TOLERANCE = 700, 2e-3  # float32 on both sides


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    """Also where no engine has run before in this process."""
    start_device("CPU", cache_folder())


def rms(x: Any, weight: Any) -> Any:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def rotary(x: Any) -> Any:
    """x [T, heads, D] at positions 0 to T - 1, features in two halves."""
    T, _, D = x.shape
    frequencies = 10000.0 ** (-torch.arange(0, D, 2) / D)
    angles = (torch.arange(T)[:, None] * frequencies)[:, None]
    cos, sin = angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2)
    turned = torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)
    return x * cos + turned * sin


class Peer:
    """The heads of a layout over a whole text at once."""

    def __init__(self, layout: Layout, tensors: Tensors, ends: Ends):
        self.layout, self.w = layout, {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in tensors.items()}
        self.table = self.w.get("embed_tokens.weight", torch.from_numpy(ends.table))
        self.head = self.w.get("lm_head.weight", torch.from_numpy(ends.head))
        self.normed = layout.eagle3 or layout.mtp
        self.targets = torch.arange(V) if "d2t" not in self.w else self.w["d2t"] + torch.arange(len(self.w["d2t"]))

    def linear(self, name: str, x: Any) -> Any:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def norm(self, name: str, x: Any) -> Any:
        return rms(x, self.w[f"{name}.weight"])

    def combine(self, states: Any) -> Any:
        """What the layer reads of the target's states [T, n E_t]."""
        if not self.layout.eagle3:
            return states
        if self.layout.config.get("norm_before_fc"):
            states = self.norm("input_norm", states)
        if self.layout.config.get("fc_norm"):
            states = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(states.chunk(3, -1))], -1)
        return self.linear("fc", states)

    def layer(self, tokens: Any, hidden: Any) -> Any:
        """States [T, W] after the layer, of tokens [T] and hidden [T, W]."""
        p, embedded = self.layout.prefix, self.table[tokens]
        if self.layout.eagle3:
            normed = self.norm(p + "hidden_norm", hidden)
            residual = normed if self.layout.config.get("norm_before_residual") else hidden
            x = torch.cat([self.norm(p + "input_layernorm", embedded), normed], -1)
        else:
            pair = [embedded, hidden]
            if self.layout.mtp:
                pair = [self.norm(p + "hidden_norm", hidden), self.norm(p + "token_norm", embedded)]
            residual = self.linear("fc", torch.cat(pair, -1))
            x = self.norm(p + "input_layernorm", residual) if self.layout.first_norm else residual
        x = residual + self.linear(p + "self_attn.o_proj", self.attention(x))
        h = self.norm(p + "post_attention_layernorm", x)
        return x + self.linear(p + "mlp.down_proj", F.silu(self.linear(p + "mlp.gate_proj", h)) * self.linear(p + "mlp.up_proj", h))

    def attention(self, x: Any) -> Any:
        a, T, D = self.layout.prefix + "self_attn.", len(x), self.layout.head_dim
        q, k, v = (self.linear(f"{a}{name}_proj", x).reshape(T, -1, D) for name in "qkv")
        if self.layout.qk_norm:
            q, k = self.norm(a + "q_norm", q), self.norm(a + "k_norm", k)
        groups = self.layout.heads // self.layout.kv_heads
        q, k, v = (part.transpose(0, 1) for part in (rotary(q), rotary(k).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(T, -1)

    def guesses(self, tokens: list[int], states: np.ndarray, count: int) -> tuple[list[int], list[float]]:
        """Greedy tokens and their probabilities, the text computed again for each."""
        hidden, following, found, chances = self.combine(torch.from_numpy(states[: len(tokens) - 1])), tokens[1:], [], []
        for _ in range(count):
            state = self.layer(torch.tensor(following), hidden)[-1]
            chance = F.softmax(F.linear(self.norm("norm", state) if self.normed else state, self.head), -1)
            found.append(int(self.targets[int(chance.argmax())]))
            chances.append(float(chance.max()))
            fed = self.norm("norm", state) if self.layout.config.get("norm_output") or self.layout.mtp else state
            hidden, following = torch.cat([hidden, fed[None]]), [*following, found[-1]]
        return found, chances


@pytest.mark.parametrize("layout", [*LAYOUTS, MTP], ids=lambda layout: layout.name)
def test_eagle_and_mtp(layout: Layout, tmp_path: Path) -> None:
    ends = Ends.random(SEED)
    drafter, _ = eagle_drafter(tmp_path, layout, ends)
    peer, text = Peer(layout, tiny.tensors_of(layout), ends), Text(3, 30, len(drafter.state_layers) * E)
    text.sequence.block_table = [*range(8)]
    deliver(drafter, [text], [25])
    text.append([3])
    deliver(drafter, [text], [5])
    for appended in ([7], [8, 9, 10], [11]):
        tokens, chances = peer.guesses(text.tokens, text.states, K)
        ((found, confidences),) = drafts(drafter, [text])
        assert found == tokens
        np.testing.assert_allclose(confidences, chances, rtol=TOLERANCE, atol=1e-5)
        text.append(appended)
        deliver(drafter, [text], [len(appended)])


def test_medusa(tmp_path: Path) -> None:
    tensors = tiny.medusa_tensors(4, 2, SEED)
    config = {"medusa_num_heads": 4, "medusa_num_layers": 2}
    runner = tiny.runner_of(Ends.random())
    drafter = MedusaDrafter(runner, load_medusa(open_heads(tiny.write_heads(tmp_path / "m", config, tensors)), runner))
    text, w = Text(5, 12, E), {name: torch.from_numpy(array) for name, array in tensors.items()}
    text.append([5])
    deliver(drafter, [text], [12])
    ((found, confidences),) = drafts(drafter, [text])
    for i, (token, confidence) in enumerate(zip(found, confidences, strict=True)):
        x = torch.from_numpy(text.states[11])
        for j in range(2):
            x = x + F.silu(F.linear(x, w[f"{i}.{j}.linear.weight"], w[f"{i}.{j}.linear.bias"]))
        chance = F.softmax(F.linear(x, w[f"{i}.2.weight"]), -1)
        assert token == int(chance.argmax())
        assert confidence == pytest.approx(float(chance.max()), rel=TOLERANCE)


def test_medusa_lite_and_eagle_lite() -> None:
    ends = Ends.random(SEED)
    head, text = torch.from_numpy(ends.head), Text(6, 9, E)
    text.append([4])
    lite, extrapolating = MedusaLiteDrafter(tiny.runner_of(ends), K), EagleLiteDrafter(tiny.runner_of(ends), K, alpha=0.5)
    for drafter in (lite, extrapolating):
        text.computed = 0
        deliver(drafter, [text], [9])
    last, before = torch.from_numpy(text.states[8]), torch.from_numpy(text.states[7])
    ranked = [token for token in (head @ last).argsort(descending=True).tolist() if token != 4]
    assert drafts(lite, [text])[0][0] == ranked[:K]
    found, confidences = drafts(extrapolating, [text])[0]
    h, change = last, last - before
    for token, confidence in zip(found, confidences, strict=True):
        change = 0.5 * change
        h = h + change
        chance = F.softmax(head @ h, -1)
        assert token == int(chance.argmax()) and confidence == pytest.approx(float(chance.max()), rel=TOLERANCE)
