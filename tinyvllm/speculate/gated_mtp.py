"""Multi-token prediction of models with recurrent states: the layer for drafts of Qwen3-Next, 3.5 and 3.6, method "mtp".

`mtp.*` of their checkpoints: x = fc(concat(pre_fc_norm_embedding(embedding), pre_fc_norm_hidden(state))) with the state after the model's
final norm; then a layer as the model's own with attention, gated, and with experts where the model has some; `norm`, and the model's head.
For further tokens the layer reads its own state after `norm`. Entry p of its cache is as EAGLE's (eagle.py). The layer has no recurrent
state of its own, so a rejected guess leaves nothing.

Order, states and norms are as vLLM and SGLang have them; llama.cpp 24025 measured that states before the final norm are accepted less.
"""

from __future__ import annotations

import re
from dataclasses import replace

from tinygrad import Tensor
from tinygrad.dtype import DType

from tinyvllm.batch import Batch, LayerCache
from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import ModelConfig, WeightRecipe
from tinyvllm.models.delta import DraftBlock
from tinyvllm.models.families import draft_recipes
from tinyvllm.models.llama import rms
from tinyvllm.models.projections import DraftWeights
from tinyvllm.models.qwen_next import draft_layer, is_mlx
from tinyvllm.ops.head import Table, embed, norm_head
from tinyvllm.ops.linear import Weight
from tinyvllm.runner.runner import Runner
from tinyvllm.runner.source import CheckpointSource
from tinyvllm.runner.weight_plan import WeightPlan
from tinyvllm.runner.weights import WeightLoader
from tinyvllm.speculate.head_files import SPEAKER, HeadFile, head_dtype
from tinyvllm.speculate.protocol import FINAL
from tinyvllm.weights.checkpoint import Checkpoint
from tinyvllm.weights.load import check_sources

_MAX_REFUSAL = 500  # characters of a message that says what to try
_LAYER = re.compile(r"mtp\.layers\.(\d{1,4})\..+")


@dataclass(frozen=True, eq=False)
class GatedMtpHeads:
    """The loaded layer. `shape` is that of a model with it alone; `table` and `head` are the target's."""

    shape: ModelConfig
    block: DraftBlock
    table: Table
    head: Weight
    dtype: DType  # of keys and values
    method = "mtp"
    state_layers = (FINAL,)
    tokens = None  # the vocabulary is the target's

    def combine(self, states: Tensor, count: Tensor) -> Tensor:
        """The states themselves, float32 [T, E]."""
        return states

    def layer(self, tokens: Tensor, hidden: Tensor, batch: Batch, cache: LayerCache, angles: Tensor) -> Tensor:
        """The state float32 [T, E] after the layer, of tokens int32 [T] and states `hidden` [T, E]."""
        x = embed(self.table, tokens, batch.rows, self.shape.embedding_scale)
        return self.block.forward_drafts(x, hidden, batch, cache, angles)

    def feed(self, state: Tensor) -> Tensor:
        """What the layer reads of its own state [T, E] at the next token."""
        return rms(self.block.norm)(state).contiguous()

    def logits(self, states: Tensor, rows: Tensor, count: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits float32 [N, V] of rows [N] int32 of states [T, E], the first `count` [1] counting; and their maxima as `norm_head`."""
        return norm_head(states, rms(self.block.norm), self.head, rows, count, self.shape.logits_divisor, self.shape.logits_cap)


def gated_mtp_file(checkpoint: Checkpoint, model: ModelConfig) -> HeadFile:
    """The layer for drafts of a checkpoint. ModelError if it has none or several, an embedding of its own, or norms of which it is unknown
    how they are stored.
    """
    tensors = {name: record for name, record in checkpoint.tensors.items() if name.startswith("mtp.")}
    layers = {found[1] for name in tensors if (found := _LAYER.fullmatch(name))}
    if layers - {"0"}:
        raise ModelError(f"{SPEAKER}: {checkpoint.path} has {len(layers)} layers mtp.layers.*; supported is one, use the method suffix")
    if not layers:
        has = "is GGUF" if checkpoint.kind == "gguf" else "has none"
        raise ModelError(
            f"{SPEAKER}: method mtp needs the layer mtp.layers.0.* of safetensors, {checkpoint.path} {has}; conversions leave it out: give "
            "the folder of the published checkpoint as model, or use the method suffix",
            _MAX_REFUSAL,
        )
    if is_mlx(CheckpointSource(checkpoint), model.delta_layers):
        raise ModelError(
            f"{SPEAKER}: {checkpoint.path} was written for MLX, whose norms of mtp.* are stored in several ways; give the folder of the "
            "published checkpoint as model"
        )
    fields = Fields(checkpoint.config)
    if fields.boolean("mtp_use_dedicated_embeddings"):
        raise ModelError(f"{SPEAKER}: {fields.where}: mtp_use_dedicated_embeddings true is not supported; the layer reads the model's own")
    return HeadFile(replace(checkpoint, tensors=tensors), fields)


def read_gated_mtp(file: HeadFile, model: ModelConfig) -> tuple[ModelConfig, DraftBlock, list[WeightRecipe]]:
    """A model of the layer alone, the layer without weights, and their recipes. ModelError for a tensor that is missing, has a wrong shape,
    or is unknown.
    """
    shape = draft_layer(model, CheckpointSource(file.checkpoint))
    block = DraftBlock(shape)
    recipes = draft_recipes(shape, block)
    check_sources(file.checkpoint, recipes)
    file.require_used(source for recipe in recipes for source in recipe.sources)
    return shape, block, recipes


def load_gated_mtp(file: HeadFile, runner: Runner, format: str | None = None) -> GatedMtpHeads:
    """The layer by the products of the runner's device. `format` is that of their matrices; None: as stored."""
    shape, block, recipes = read_gated_mtp(file, runner.config)
    loader = WeightLoader(file.checkpoint, WeightPlan(runner.placement, head_dtype(file), format))
    block.weights = DraftWeights(**loader.load_products(block, block.products(), recipes))
    weights = runner.model.weights
    return GatedMtpHeads(shape, block, weights.table, weights.head, head_dtype(file))
