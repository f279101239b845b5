"""Medusa: several heads on the last hidden state, each of which guesses one token further ahead (Cai et al. 2024, arXiv:2401.10774).

Head i is `num_layers` residual blocks x + SiLU(W x + b) and a vocabulary head of its own. From the state of token p, after the model's
final norm, it guesses token p + 2 + i; the model's own head is the one for p + 1. The published file has `{i}.{j}.linear.weight`,
`{i}.{j}.linear.bias` and `{i}.{num_layers}.weight`.

Medusa-lite needs no training: a head is the model's own, as if its block were zero. All heads then rank the same, so guess i is the most
probable token that is neither the newest nor an earlier guess.
"""

from __future__ import annotations

from collections.abc import Sequence as Row

import numpy as np
from tinygrad import Tensor

from tinyvllm.bridge import Captured, copied, upload
from tinyvllm.errors import ArgumentError
from tinyvllm.foreign import MAX_LAYERS
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import WeightRecipe
from tinyvllm.models.projections import Product
from tinyvllm.ops.linear import linear
from tinyvllm.runner.arrays import PackedArrays
from tinyvllm.runner.prepare import Shape, decode_bucket
from tinyvllm.runner.runner import Runner
from tinyvllm.sampling.parameters import SamplingFlags
from tinyvllm.speculate.head_files import MAX_DRAFTS, SPEAKER, HeadFile, Target, expect_equal, head_recipe, load_head_products
from tinyvllm.speculate.last_states import Guessing, LastStates
from tinyvllm.speculate.picks import Guesses, Picks
from tinyvllm.speculate.protocol import FINAL, StateRows

_KEYS = (
    "medusa_num_heads",
    "medusa_num_layers",
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "truncated_vocab_size",
    "medusa_choices",
)


@dataclass(frozen=True)
class MedusaHead:
    """One head's blocks and its vocabulary head."""

    blocks: tuple[Product, ...]
    vocabulary: Product

    def __call__(self, x: Tensor, count: Tensor) -> Tensor:
        """Logits float32 [B, V] of x [B, E] float32, whose first `count` [1] rows count."""
        for block in self.blocks:
            x = (x + linear(block.in_order(x), block.weight, count, block.bias).silu()).contiguous()
        return linear(self.vocabulary.in_order(x), self.vocabulary.weight, count, self.vocabulary.bias).contiguous()


def read_medusa(file: HeadFile, target: Target) -> tuple[int, int]:
    """Number of heads and of blocks a head. ModelError for a description that is not of Medusa heads of this target."""
    file.require_keys(_KEYS)
    fields = file.fields
    heads, layers = (
        fields.integer("medusa_num_heads", low=1, high=MAX_DRAFTS),
        fields.integer("medusa_num_layers", 1, low=1, high=MAX_LAYERS),
    )
    expect_equal("hidden_size", fields.integer("hidden_size", target.hidden_size), target.hidden_size, "the target")
    for key in ("vocab_size", "truncated_vocab_size"):
        expect_equal(key, fields.integer(key, target.vocab_size), target.vocab_size, "the target")
    return heads, layers


def medusa_recipes(file: HeadFile, target: Target) -> tuple[dict[str, tuple[str, ...]], list[WeightRecipe]]:
    """The products of the heads by name, each with its module, and the recipes of their tensors. ModelError for a missing or wrong one."""
    heads, layers = read_medusa(file, target)
    E, V = target.hidden_size, target.vocab_size
    products: dict[str, tuple[str, ...]] = {}
    recipes: list[WeightRecipe] = []
    for i in range(heads):
        for j in range(layers):
            products[f"{i}.{j}"] = (f"block_{i}_{j}",)
            recipes.append(head_recipe(file, f"block_{i}_{j}.weight", (E, E), f"{i}.{j}.linear.weight"))
            recipes.append(head_recipe(file, f"block_{i}_{j}.bias", (E,), f"{i}.{j}.linear.bias"))
        products[f"{i}"] = (f"head_{i}",)
        recipes.append(head_recipe(file, f"head_{i}.weight", (V, E), f"{i}.{layers}.weight"))
    file.require_used(source for recipe in recipes for source in recipe.sources)
    return products, recipes


def load_medusa(file: HeadFile, runner: Runner, format: str | None = None) -> list[MedusaHead]:
    """The heads of a published file, by the products of the runner's device, in a format as `load_head_products`."""
    target = Target.of(runner.config)
    heads, layers = read_medusa(file, target)
    loaded, _ = load_head_products(file, runner, *medusa_recipes(file, target), format)
    return [MedusaHead(tuple(loaded[f"{i}.{j}"] for j in range(layers)), loaded[f"{i}"]) for i in range(heads)]


@dataclass(frozen=True)
class _Guesser:
    """The captured guesses of B rows and K heads, and their inputs."""

    inputs: PackedArrays  # rows [B] of the kept states, the newest token [B] of each, and their count [1]
    picks: Picks
    guesses: Guesses
    captured: Captured


class MedusaDrafter(LastStates):
    """Drafts by Medusa heads. They read no cache, so a sequence has drafts right after its first step."""

    method = "medusa"
    state_layers: tuple[int, ...] = (FINAL,)
    excludes = False  # whether a guess is never the newest token nor an earlier guess

    def __init__(self, runner: Runner, heads: list[MedusaHead], max_drafts: int | None = None):
        if max_drafts is not None and max_drafts > len(heads):
            raise ArgumentError(f"{SPEAKER}: num_speculative_tokens={max_drafts}, but there are {len(heads)} Medusa heads; ask for fewer")
        super().__init__(len(heads) if max_drafts is None else max_drafts, runner.max_num_seqs)
        self._heads, self._vocab_size, self._device = heads, runner.config.vocab_size, runner.device
        self._gathers: dict[tuple[int, int], tuple[Tensor, Captured]] = {}  # by rows of a step's states and of the kept ones
        self._guessers: dict[tuple[int, int, int, SamplingFlags], _Guesser] = {}
        self._states: Tensor | None = None  # [R, E], the kept ones

    def _keep(self, states: Tensor, rows: Row[StateRows]) -> None:
        self._gather(states, [each.first_row + each.count - 1 for each in rows], decode_bucket(len(rows)))

    def _capture_keep(self, states: Tensor, shape: Shape, R: int) -> None:
        self._gather(states, [], R)

    def _drop(self) -> None:
        self._gathers.clear()
        self._guessers.clear()

    def _gather(self, states: Tensor, rows: list[int], R: int) -> None:
        """Keep these rows of a step's states, and padding up to R."""
        T = int(states.shape[0])
        if (T, R) not in self._gathers:
            index = copied(np.zeros(R, np.int32), self._device)
            self._gathers[T, R] = index, Captured(lambda states: states[index].contiguous().realize())
        index, gather = self._gathers[T, R]
        upload(index, np.array([*rows, *[0] * (R - len(rows))], np.int32))
        self._states = gather(states)

    def _guess(self, batch: Guessing) -> tuple[np.ndarray, np.ndarray]:
        assert self._states is not None
        key = int(self._states.shape[0]), batch.bucket, batch.K, batch.flags
        if key not in self._guessers:
            self._guessers[key] = self._new_guesser(batch)
        guesser = self._guessers[key]
        views, count = guesser.inputs.views, len(batch.sequences)
        views["rows"][:], views["count"][0] = batch.padded_rows, count
        views["newest"][:count] = [sequence.token_at(len(sequence) - 1) for sequence in batch.sequences]
        guesser.inputs.upload()
        guesser.picks.place(batch.sequences)
        guesser.captured(self._states)
        return guesser.guesses.read()

    def _new_guesser(self, batch: Guessing) -> _Guesser:
        B, K, V = batch.bucket, batch.K, self._vocab_size
        inputs = PackedArrays({"rows": B, "newest": B, "count": 1}, self._device)
        rows, newest, count = (inputs.tensors[name] for name in ("rows", "newest", "count"))
        picks, guesses = Picks(B, K, batch.flags, V, self._device), Guesses(K, B, self._device)

        def function(states: Tensor) -> list[Tensor]:
            x = states[rows].contiguous()
            tokens: list[Tensor] = []
            for k, head in enumerate(self._heads[:K]):
                logits = head(x, count)
                if self.excludes:
                    logits = _without(logits, [newest, *tokens])
                token, confidence = picks.pick(k, logits.realize(), None)
                tokens.append(token.realize())
                guesses.put(k, token, confidence)
            return tokens

        return _Guesser(inputs, picks, guesses, Captured(function))


class MedusaLiteDrafter(MedusaDrafter):
    """Drafts by the model's own head on the last state, without any training: the runners-up of the token that was drawn."""

    method = "medusa_lite"
    excludes = True

    def __init__(self, runner: Runner, max_drafts: int):
        super().__init__(runner, [MedusaHead((), Product(runner.model.weights.head, None))] * max_drafts, max_drafts)


def _without(logits: Tensor, tokens: list[Tensor]) -> Tensor:
    """Logits [B, V] with those of tokens [B] each at minus infinity."""
    ids = Tensor.arange(int(logits.shape[1]), device=logits.device).reshape(1, -1)
    for token in tokens:
        logits = (ids == token.reshape(-1, 1)).where(-float("inf"), logits)
    return logits.contiguous()
