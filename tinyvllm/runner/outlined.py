"""What a model's weights will be once they are loaded, from the headers of its files alone: formats, bytes, and empty tensors for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinyvllm.backends.operands import KernelWeight
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import WeightRecipe
from tinyvllm.models.projections import Product
from tinyvllm.quant.formats import Layout, packed_in
from tinyvllm.quant.layouts import MixedWeight, PackedWeight, RowWeight, StoredWeight, TileWeight, panel_bytes, row_bytes
from tinyvllm.runner.pipeline import PipelineStage
from tinyvllm.runner.split import Split
from tinyvllm.runner.weight_plan import WeightPlan
from tinyvllm.runner.weights import WeightLoader
from tinyvllm.weights.checkpoint import Checkpoint
from tinyvllm.weights.convert import DTYPE_FORMATS
from tinyvllm.weights.load import check_sources, rows_format


@dataclass(frozen=True)
class Held:
    """A tensor as the engine will hold it; `streamed` if each decode step reads it, `share` of it for one sequence."""

    name: str
    shape: tuple[int, ...]
    format: str
    nbytes: int
    streamed: bool = True
    share: float = 1.0


def matrix_bytes(layout: Layout, format: str, O: int, I: int) -> int:
    return O * row_bytes(format, I) if layout is Layout.ROWS else panel_bytes(format, O, I)


@dataclass(frozen=True)
class AllWeights:
    """The weights of an engine in several ranks: every tensor, their bytes, and what of these a decode step of one sequence reads."""

    held: list[Held]
    bytes: int
    streamed: int

    @classmethod
    def of(cls, stages: Iterable[tuple[WeightOutline, PipelineStage]]) -> AllWeights:
        """Of stages on devices of their own, from the outline of the whole model on each."""
        held = [
            replace(one, streamed=one.streamed and (stage.has_head or one.name != "token_embd.weight"))
            for outline, stage in stages
            for one in outline.held
            if stage.holds(one.name)
        ]
        return cls(held, sum(one.nbytes for one in held), sum(round(one.nbytes * one.share) for one in held if one.streamed))


class WeightOutline(WeightLoader):
    """The loader without loading: it decides as `WeightLoader` does, and the model gets tensors that take no memory.

    After `load`, `held` has every tensor; `bytes`, `streamed` and `formats` are the loader's, as are the errors of headers.
    """

    def __init__(self, checkpoint: Checkpoint | None, plan: WeightPlan, split: Split | None = None, stage: PipelineStage | None = None):
        super().__init__(checkpoint, plan, split=split, stage=stage)
        self.held: list[Held] = []

    @property
    def own_bytes(self) -> int:
        """Without the embedding table, which all processes map."""
        return sum(held.nbytes for held in self.held if held.streamed)

    def _check_imatrix(self, recipes: list[WeightRecipe]) -> None:
        super()._check_imatrix(recipes)
        self._notes.unweighted = []  # loading logs it

    def _hold(self, recipe: WeightRecipe, format: str, nbytes: int, streamed: bool = True) -> None:
        self.held.append(Held(recipe.name, recipe.shape, format, nbytes, streamed, recipe.share))
        self._count(recipe, nbytes, streamed)

    def _format(self, recipe: WeightRecipe) -> str:
        """The format that the matrix will be held in."""
        if self._checkpoint is None:
            return self._dummy_format(recipe)
        packed, ordered = packed_in(self._plan.layout), recipe.name in self._ordered
        return self._format_of(recipe, rows_format(self._checkpoint, recipe, self._plan.dtype, packed, ordered))

    def _matrix(self, layout: Layout, format: str, O: int, I: int) -> Tensor:
        """uint8: the bytes of a matrix."""
        return Tensor.empty(matrix_bytes(layout, format, O, I), dtype=dtypes.uint8, device=self._plan.placement.device)

    def _place_packed(self, recipes: list[WeightRecipe]) -> KernelWeight:
        parts = [(recipe, self._format(recipe)) for recipe in recipes]
        if self._plan.layout_of(recipes[0]) is Layout.ROWS:
            return StoredWeight(tuple(self._row_weight(recipe, format) for recipe, format in parts))
        tiles, weights = self._plan.layout is Layout.TILES, list[TileWeight | PackedWeight]()
        for format, run in itertools.groupby(parts, key=lambda part: part[1]):
            together = [recipe for recipe, _ in run]
            O, I = sum(self._num_rows(recipe) for recipe in together), self._columns(together[0], format)
            held, share = self._matrix(self._plan.layout, format, O, I), self._share(together[0], format)
            weights.append(TileWeight(held, format, O, I, share) if tiles else PackedWeight(held, format, O, I, share))
            for recipe in together:
                self._hold(recipe, format, self._num_rows(recipe) * row_bytes(format, I))
        return weights[0] if len(weights) == 1 else MixedWeight(tuple(weights))

    def _row_weight(self, recipe: WeightRecipe, format: str, streamed: bool = True) -> RowWeight:
        O, I = recipe.shape
        self._hold(recipe, format, O * row_bytes(format, I), streamed)
        return RowWeight(self._matrix(Layout.ROWS, format, O, I), format, O, I)

    def _rows(self, recipe: WeightRecipe) -> RowWeight:
        return self._row_weight(recipe, self._format(recipe), streamed=False)

    def _plain_tensors(self, recipes: list[WeightRecipe], dtype: DType) -> dict[str, Tensor]:
        if self._checkpoint is not None:
            check_sources(self._checkpoint, recipes)
        for recipe in recipes:
            nbytes = prod(recipe.shape) * dtype.itemsize
            self.held.append(Held(recipe.name, recipe.shape, DTYPE_FORMATS[dtype], nbytes, share=recipe.share))
        return {recipe.name: Tensor.empty(*recipe.shape, dtype=dtype, device=self._plan.placement.device) for recipe in recipes}

    def _concatenated(self, biases: list[Tensor]) -> Tensor:
        return Tensor.empty(sum(int(bias.shape[0]) for bias in biases), dtype=biases[0].dtype, device=self._plan.placement.device)

    def _in_order(self, block: Any, group: Any, product: Product, order: np.ndarray) -> Product:
        return Product(product.weight, product.bias, Tensor.empty(len(order), dtype=dtypes.int32, device=self._plan.placement.device))
