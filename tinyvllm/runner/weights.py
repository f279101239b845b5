"""Loads a checkpoint's weights into a model: packed for products that have kernels here, plain tensors for everything else.

Matrices are packed into the layout that the device's kernels read, straight from the mapped file, whose pages are dropped on the way:
panels once, by all cores of the host; tiles on the GPU, from rows that are uploaded as they are. The peak is therefore what stays, and on
a GPU a staging buffer more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinyvllm.backends.cpu.nodes import over_memory_nodes
from tinyvllm.backends.operands import KernelWeight
from tinyvllm.backends.registry import select
from tinyvllm.bridge import mapped
from tinyvllm.errors import KernelError, ModelError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import WeightRecipe
from tinyvllm.models.projections import ModelWeights, Product
from tinyvllm.ops.head import Table
from tinyvllm.ops.linear import TensorWeight, Weight
from tinyvllm.quant.codecs import NUMPY_DTYPES
from tinyvllm.quant.formats import FLOATS, FORMATS, Layout, formats_in, packed_in
from tinyvllm.quant.layouts import (
    MixedWeight,
    PackedWeight,
    RowSource,
    RowWeight,
    StoredWeight,
    TileWeight,
    packable,
    panel_bytes,
    row_bytes,
)
from tinyvllm.quant.slices import ColumnShare, HeadShare, RowShare
from tinyvllm.runner.load_notes import LoadNotes
from tinyvllm.runner.packing import Rows, pack_panels, place_tiles
from tinyvllm.runner.pipeline import PipelineStage
from tinyvllm.runner.row_part import RowPart
from tinyvllm.runner.split import Split
from tinyvllm.runner.weight_cache import WeightCache
from tinyvllm.runner.weight_plan import WeightPlan
from tinyvllm.weights.checkpoint import Checkpoint
from tinyvllm.weights.convert import DTYPE_FORMATS, check_fits_float16
from tinyvllm.weights.dummy import dummy_rows, dummy_source, dummy_tensors
from tinyvllm.weights.load import beyond_float16, check_range, column_order, load_rows, load_tensors, locate_rows, rows_format
from tinyvllm.weights.mapping import BuiltRecord, TensorRecord, allocate, drop_pages
from tinyvllm.weights.memory import place_bytes

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class _Group:
    """The projections of one product: their modules, which hold `weight` and `bias`, and the recipes of their weights."""

    field: str
    modules: list[Any]
    recipes: list[WeightRecipe]


class WeightLoader:
    """Loads a model's weights from `checkpoint`, or random ones where that is None. `kept` is the folder for packed weights on disk."""

    def __init__(
        self,
        checkpoint: Checkpoint | None,
        plan: WeightPlan,
        progress: Progress | None = None,
        kept: Path | None = None,
        split: Split | None = None,
        stage: PipelineStage | None = None,
    ):
        """`split` is the part of each layer, `stage` the layers that this process has as one of several ranks."""
        self._checkpoint, self._plan, self._progress, self._split, self._stage = checkpoint, plan, progress, split, stage
        self._recipes: dict[str, WeightRecipe] = {}
        self._head = ""  # the name of the head's recipe
        keeps = plan.layout is Layout.PANELS  # rows stay those of the file, and a GPU packs tiles faster than a disk reads
        self._kept = WeightCache(kept, checkpoint, _identity(plan, split, stage)) if keeps and kept and checkpoint else None
        self.bytes = 0  # that the model holds
        self.streamed = 0  # of these, what a decode step of one sequence reads: not an embedding table of its own, nor all experts
        self.formats: set[str] = set()  # of the packed matrices of products
        self._orders: dict[_Group, np.ndarray] = {}  # of columns, where a product's weights have them in another order
        self._ordered: set[str] = set()  # the recipes of these products
        self.unpacked: dict[str, str] = {}  # tensors of quantized checkpoints that became floats without being asked to, and why
        self._wanted: dict[str, str] = {}  # formats by names of recipes; empty where those of the file are kept
        self._notes = LoadNotes(plan.format)
        self._done = self._total = 0

    @property
    def maps_all(self) -> bool:
        """Whether an earlier start has packed the matrices: their pages are those of a file, which the system may drop."""
        return self._kept is not None and self._kept.complete

    @over_memory_nodes()
    def load(self, model: Any, recipes: list[WeightRecipe]) -> None:
        """Set `model.weights` and the `weights` of every layer, and place all other tensors under their names."""
        self._wanted, stage = self._plan.wanted(recipes), self._stage
        self._check_imatrix(recipes)
        recipes = [recipe for recipe in recipes if stage is None or stage.holds(recipe.name)]
        rest, end = {recipe.name: recipe for recipe in recipes}, "token_embd" if model.config.tied else "output"
        self._recipes, self._head = dict(rest), f"{end}.weight"
        self._total = sum(prod(recipe.shape) for recipe in recipes) * self._plan.dtype.itemsize
        layers = [_groups(block, block.products(), f"blk.{i}.", rest) for i, block in enumerate(model.blk, self._first_layer)]
        heads = _groups(model, {"head": (end,)}, "", rest) if stage is None or stage.has_head else []
        inputs = _groups(model, model.products(), "", rest)
        self._orders = {group: order for groups in layers for group in groups if (order := self._column_order(group)) is not None}
        self._ordered = {recipe.name for group in self._orders for recipe in group.recipes}
        self._explain_floats(recipes)
        packed = self._pack_all([group for groups in (*layers, heads, inputs) for group in groups], rest)
        embeds = stage is None or stage.embeds
        table = self._table(model, packed.get(heads[0]) if heads else None, rest) if embeds else None
        others = {field: self._own_table(getattr(model, name), f"{name}.weight", rest) for field, name in model.tables().items()}
        self._place_plain(model, list(rest.values()))
        for block, groups in zip(model.blk, layers, strict=True):
            block.weights = block.weights_type(**{group.field: self._product(block, group, packed.get(group)) for group in groups})
        if table is None and embeds:
            table = model.token_embd.weight
        ends: dict[str, Any] = {group.field: self._joined(group, packed.get(group)) for group in inputs}
        ends |= {field: getattr(model, name).weight if others[field] is None else others[field] for field, name in model.tables().items()}
        model.weights = ModelWeights(table, self._joined(heads[0], packed.get(heads[0])).weight if heads else None, **ends)
        self._notes.log()

    @property
    def _first_layer(self) -> int:
        return 0 if self._stage is None else self._stage.layers.start

    def load_products(self, owner: Any, products: dict[str, tuple[str, ...]], recipes: list[WeightRecipe]) -> dict[str, Product]:
        """The products of `owner`, each of the modules that its tuple names; other tensors are placed under their names.

        For weights that are no whole model, such as the heads of speculation. The modules hold `weight` and `bias`, as None until then.
        """
        rest, self._wanted = {recipe.name: recipe for recipe in recipes}, self._plan.wanted(recipes)
        self._total = sum(prod(recipe.shape) for recipe in recipes) * self._plan.dtype.itemsize
        groups = _groups(owner, products, "", rest)
        packed = self._pack_all(groups, rest)
        self._place_plain(owner, list(rest.values()))
        return {group.field: self._joined(group, packed.get(group)) for group in groups}

    def _check_imatrix(self, recipes: list[WeightRecipe]) -> None:
        """ModelError, before anything is loaded, for an importance matrix of another model."""
        imatrix = self._plan.imatrix
        if imatrix is None:
            return
        matrices = [recipe for recipe in recipes if recipe.name in self._wanted]
        lacking = [recipe.name for recipe in matrices if imatrix.columns(recipe) is None]
        if len(lacking) == len(matrices):
            raise ModelError(f"weights: {imatrix.path} has none of the model's matrices, such as {lacking[0]}; is it of another model?")
        self._notes.unweighted = lacking

    def _pack_all(self, groups: list[_Group], rest: dict[str, WeightRecipe]) -> dict[_Group, Weight]:
        """The packed weights of all groups that are packed; their recipes are taken out of `rest`."""
        unpacked = [group for group in groups if not self._packs(group.recipes)]
        if unpacked and self._split is not None:
            raise KernelError(
                f"tensor_parallel_size={self._split.group.world_size}: no kernel multiplies with {unpacked[0].recipes[0].name}, "
                "and only kernels divide a product; leave TINYVLLM_KERNELS out, or use one process"
            )
        groups = [group for group in groups if group not in unpacked]
        if self._kept is not None and self._checkpoint is not None and not (self._stage and self._stage.is_copy):
            sources = {source for group in groups for recipe in group.recipes for source in recipe.sources}
            self._kept.begin(sum(self._checkpoint.tensors[s].nbytes for s in sources if s in self._checkpoint.tensors))
        packed: dict[_Group, Weight] = {}
        for group in groups:
            packed[group] = weight = self._place_packed(group.recipes)
            self.formats.update(weight.format.split("+"))
            for module, recipe in zip(group.modules, group.recipes, strict=True):
                del rest[recipe.name]
                module.weight = None  # no op may take the shapeless stand-in for the weight
        if self._kept is not None:
            self._kept.finish()
        return packed

    def _packs(self, recipes: list[WeightRecipe]) -> bool:
        """Whether to pack these: kernels here will read them, or the plan wants a packed format."""
        plan, I, stem = self._plan, recipes[0].shape[1], recipes[0].stem
        if not plan.multiplies(recipes[0]):
            select(stem, plan.placement, f"Nx{I}: pack at load")  # which notes why
            return False
        if any(self._wanted.get(recipe.name, plan.floats) not in formats_in(plan.layout) for recipe in recipes):
            return False
        reason = packable("F32", I)
        if plan.quantized and reason is not None:
            raise ModelError(f"weights: {recipes[0].name} cannot be {plan.format}: {reason}; leave quantization out")
        return reason is None and (plan.quantized or select(stem, plan.placement, f"Nx{I}: pack at load") is not None)

    def _table(self, model: Any, head: Weight | None, rest: dict[str, WeightRecipe]) -> Table | None:
        """The packed embedding table: the head's matrix if tied, else rows of its own. None if it stays a tensor."""
        if self._split is not None and model.config.tied and isinstance(head, PackedWeight):
            return self._rows(self._recipes["token_embd.weight"])  # whole: any rank embeds any token
        if isinstance(head, (PackedWeight, StoredWeight)) and model.config.tied:
            return head.parts[0] if isinstance(head, StoredWeight) else head
        return self._own_table(model.token_embd, "token_embd.weight", rest)

    def _own_table(self, module: Any, name: str, rest: dict[str, WeightRecipe]) -> Table | None:
        """The rows of an embedding table for kernels. None if it stays a tensor."""
        recipe = rest.get(name)
        if recipe is None or not self._packs([recipe]):
            return None
        del rest[recipe.name]
        module.weight = None
        return self._rows(recipe)

    def _explain_floats(self, recipes: list[WeightRecipe]) -> None:
        """Note the matrices of a quantized checkpoint that are not kept packed, unless the plan wants one format for all."""
        if self._checkpoint is None or self._plan.format is not None:
            return
        kept = packed_in(self._plan.layout)
        for recipe in recipes:
            for record in (self._checkpoint.tensors[source] for source in recipe.sources):
                if not isinstance(record, BuiltRecord):
                    continue
                if record.format not in kept or len(recipe.shape) != 2 or not self._plan.multiplies(recipe):
                    self.unpacked[record.name] = record.reason or f"no kernel here reads {record.format}"
                elif rows_format(self._checkpoint, recipe, self._plan.dtype, kept, ordered=True) in FLOATS:
                    self.unpacked[record.name] = "its parts are transposed, or of several formats"
                elif record.order is not None and recipe.name not in self._ordered:
                    self.unpacked[record.name] = "columns in an order of their own"

    def _column_order(self, group: _Group) -> np.ndarray | None:
        """The order that the columns of all weights of a product have; None where it is the usual one, or one must be loaded in floats."""
        if self._checkpoint is None or self._plan.format is not None or not self._packs(group.recipes):
            return None
        if group.recipes[0].stem != "matmul":  # experts have orders of their own, and a router shares its norm with them
            return None
        first, *others = (column_order(self._checkpoint, recipe) for recipe in group.recipes)
        return first if first is not None and all(order is not None and np.array_equal(order, first) for order in others) else None

    def _product(self, block: Any, group: _Group, packed: Weight | None) -> Product:
        """The product of a layer; the weights of a norm in front of it are put in the order of its columns."""
        product, order = self._joined(group, packed), self._orders.get(group)
        return product if order is None else self._in_order(block, group, product, order)

    def _in_order(self, block: Any, group: _Group, product: Product, order: np.ndarray) -> Product:
        columns = Tensor(order.astype(np.int32), device=self._plan.placement.device).realize()
        if norm := block.input_norms().get(group.field):
            norm.weight = norm.weight[columns].contiguous().realize()
        return replace(product, order=columns)

    def _joined(self, group: _Group, packed: Weight | None) -> Product:
        """The product of a group with its packed weight, or with the tensors that were placed."""
        weight = TensorWeight(tuple(module.weight for module in group.modules)) if packed is None else packed
        biases: list[Tensor] = [module.bias for module in group.modules if getattr(module, "bias", None) is not None]
        return Product(weight, self._concatenated(biases) if len(biases) > 1 else biases[0] if biases else None)

    def _concatenated(self, biases: list[Tensor]) -> Tensor:
        """Once, here: in a captured step that would be a kernel of every step."""
        return biases[0].cat(*biases[1:]).contiguous().realize()

    def _place_plain(self, model: Any, recipes: list[WeightRecipe]) -> None:
        """Vectors in float32, which every op computes with; the rest in the model's dtype."""
        vectors, others = [r for r in recipes if len(r.shape) == 1], [r for r in recipes if len(r.shape) != 1]
        for dtype, some in ((dtypes.float32, vectors), (self._plan.dtype, others)):
            tensors = self._plain_tensors(some, dtype)
            for recipe in some:
                if self._split is not None and (own := self._row_part(recipe)) != RowPart(slice(0, recipe.shape[0])):
                    tensors[recipe.name] = own.of(tensors[recipe.name]).contiguous().realize()
                self._count(recipe, tensors[recipe.name].nbytes())
                self._note(recipe, DTYPE_FORMATS[dtype])
            place(model, tensors, self._first_layer)

    def _plain_tensors(self, recipes: list[WeightRecipe], dtype: DType) -> dict[str, Tensor]:
        device = self._plan.placement.device
        if self._checkpoint is None:
            tensors = dummy_tensors(recipes, device, dtype)
        else:
            tensors = load_tensors(self._checkpoint, recipes, device, dtype, None)
        for recipe in recipes:
            if recipe.logarithm:
                tensors[recipe.name] = (-tensors[recipe.name].exp()).contiguous().realize()
            if recipe.factor != 1.0 and self._checkpoint is not None:
                tensors[recipe.name] = (tensors[recipe.name] * recipe.factor).contiguous().realize()
            if recipe.offset and self._checkpoint is not None:
                tensors[recipe.name] = (tensors[recipe.name] + recipe.offset).contiguous().realize()
        return tensors

    def _count(self, recipe: WeightRecipe, nbytes: int, streamed: bool = True) -> None:
        self.bytes += nbytes
        self.streamed += round(nbytes * recipe.share) if streamed else 0
        self._done += prod(recipe.shape) * self._plan.dtype.itemsize  # as if unpacked: packed sizes are known only afterwards
        if self._progress is not None:
            self._progress(self._done, self._total, recipe.name)

    def _note(self, recipe: WeightRecipe, format: str) -> None:
        """What a user should know of a matrix that the model holds in `format`; those of quantized checkpoints are described as such."""
        record = None if self._checkpoint is None else self._checkpoint.tensors[recipe.sources[0]]
        if isinstance(record, TensorRecord):
            self._notes.add(recipe, record.format, format)

    # --- matrices for kernels

    def _place_packed(self, recipes: list[WeightRecipe]) -> KernelWeight:
        """The matrices of one product as the device's kernels read them."""
        places = {Layout.ROWS: self._stored, Layout.TILES: self._tiled, Layout.PANELS: self._packed}
        return places[self._plan.layout_of(recipes[0])](recipes)

    def _stored(self, recipes: list[WeightRecipe]) -> StoredWeight:
        """The rows of each part as the file stores them."""
        held = []
        for recipe in recipes:
            part = self._load_rows(recipe)
            held.append(RowWeight(self._place_rows(part.data), part.format, *recipe.shape))
            self._note(recipe, part.format)
            self._count(recipe, part.data.nbytes)
        return StoredWeight(tuple(held))

    def _tiled(self, recipes: list[WeightRecipe]) -> TileWeight | MixedWeight:
        """The rows of all parts in tiles, packed on the device: as one matrix, or a matrix for each run of parts of one format."""
        parts = [(recipe, self._located(recipe)) for recipe in recipes]
        weights = []
        for format, run in itertools.groupby(parts, key=lambda part: self._format_of(part[0], part[1].format)):
            weights.append(self._tiled_run(format, list(run)))
        return weights[0] if len(weights) == 1 else MixedWeight(tuple(weights))

    def _tiled_run(self, format: str, parts: list[tuple[WeightRecipe, RowSource]]) -> TileWeight:
        recipes = [recipe for recipe, _ in parts]
        I, share = self._columns(recipes[0], format), self._share(recipes[0], format)
        try:
            weight = place_tiles(self._plan.placement, [rows for _, rows in parts], I, format, share)
        except FloatingPointError:
            self._check_ranges(recipes)
            raise
        for recipe in recipes:
            self._count(recipe, self._num_rows(recipe) * row_bytes(weight.format, weight.I))
            self._note(recipe, weight.format)
        return weight

    def _check_ranges(self, recipes: list[WeightRecipe]) -> None:
        """ModelError that names the first of these matrices with numbers beyond float16."""
        for recipe in recipes:
            if self._checkpoint is not None:
                check_range(self._checkpoint, recipe)

    def _packed(self, recipes: list[WeightRecipe]) -> PackedWeight | MixedWeight:
        """The rows of all parts packed: as one matrix, or a matrix for each run of parts of one format."""
        weights: list[PackedWeight] = []
        while recipes:
            found = None if self._kept is None else self._kept.get(recipes[0].name)
            format, O, packed = self._pack(recipes) if found is None else found
            I, share = self._columns(recipes[0], format), self._share(recipes[0], format)
            weights.append(PackedWeight(place_bytes(packed, self._plan.placement.device), format, O, I, share))
            while O > 0:
                recipe, *recipes = recipes
                O -= self._num_rows(recipe)
                self._count(recipe, recipe.shape[0] * row_bytes(format, recipe.shape[1]))
                self._note(recipe, format)
        return weights[0] if len(weights) == 1 else MixedWeight(tuple(weights))

    def _pack(self, recipes: list[WeightRecipe]) -> tuple[str, int, np.ndarray]:
        """Format, rows and packed bytes of the first recipes that share a format; written into the cache file if one was begun."""
        rows = [self._load_rows(recipe) for recipe in recipes]
        format = rows[0].format
        parts = list(itertools.takewhile(lambda part: part.format == format, rows))
        O, I = sum(len(part.data) for part in parts), self._columns(recipes[0], format)
        size = panel_bytes(format, O, I)
        packed = allocate(size) if self._kept is None else self._kept.scratch(size)
        pack_panels(format, I, parts, packed)
        return format, O, packed if self._kept is None else self._kept.keep(recipes[0].name, format, O, packed)

    def _rows(self, recipe: WeightRecipe) -> RowWeight:
        """An embedding table as the file stores it, mapped."""
        rows = self._load_rows(recipe, whole=True)
        self._count(recipe, rows.data.nbytes, streamed=False)
        self._note(recipe, rows.format)
        return RowWeight(self._place_rows(rows.data), rows.format, *recipe.shape)

    def _place_rows(self, data: np.ndarray) -> Tensor:
        placed = mapped if self._plan.layout is Layout.ROWS else place_bytes  # a Mac's GPU reads the file's own pages
        return placed(data.reshape(-1), self._plan.placement.device)

    def _load_rows(self, recipe: WeightRecipe, whole: bool = False) -> Rows:
        """The rows as stored where kernels read that format, else as the plan wants all matrices to be.

        Of a rank its part, unless `whole`.
        """
        if self._checkpoint is None:
            format = self._dummy_format(recipe)
            rows = Rows(format, dummy_rows(recipe, format))
            return rows if whole else self._part(recipe, rows)
        if self._split is not None and not whole and recipe.share < 1.0:  # a matrix of all experts
            return self._converted(recipe, self._part_of_experts(self._checkpoint, recipe))
        packed, ordered = packed_in(self._plan.layout), recipe.name in self._ordered
        rows = Rows(*load_rows(self._checkpoint, recipe, self._plan.dtype, packed, ordered))
        return self._converted(recipe, rows if whole else self._part(recipe, rows))

    # --- the part of a rank

    def _part(self, recipe: WeightRecipe, rows: Rows) -> Rows:
        """This rank's rows and columns of a matrix, of which the file's other bytes are not read."""
        if self._split is None:
            return rows
        self._refuse_orders()
        data, columns = self._row_part(recipe).of(rows.data), self._column_bytes(recipe, rows.format)
        return Rows(rows.format, np.ascontiguousarray(data if columns is None else data[:, columns]))

    def _located_part(self, recipe: WeightRecipe, rows: RowSource) -> RowSource:
        """As `_part`, of rows that are not read yet."""
        if self._split is None:
            return rows
        self._refuse_orders()
        columns, own = self._column_bytes(recipe, rows.format), self._row_part(recipe)
        if own != RowPart(slice(0, rows.O)):
            rows = rows.taken(own.of(np.arange(rows.O)))
        return rows if columns is None else rows.cut(columns)

    def _refuse_orders(self) -> None:
        if self._orders:
            raise ModelError("tensor_parallel_size: columns in an order of their own are not divided yet; leave it out")

    def _part_of_experts(self, checkpoint: Checkpoint, recipe: WeightRecipe) -> Rows:
        """As `_part`, where the file has the rank's rows in as many places as there are experts."""
        rows = locate_rows(checkpoint, recipe, self._plan.dtype, packed_in(self._plan.layout))
        columns = self._column_bytes(recipe, rows.format)
        rows = rows.taken(self._row_part(recipe).of(np.arange(rows.O)))
        data = (rows if columns is None else rows.cut(columns)).gathered()
        if self._plan.floats == "F16" and rows.format in FLOATS and rows.format != "F16":
            try:
                check_fits_float16(data.view(NUMPY_DTYPES[rows.format]))
            except FloatingPointError as error:
                raise ModelError(beyond_float16(recipe)) from error
        for block in rows.blocks:
            drop_pages(block)
        return Rows(rows.format, data)

    def _column_bytes(self, recipe: WeightRecipe, stored: str) -> slice | None:
        """The bytes of a row in `stored` that are the rank's; None for all."""
        format = self._format_of(recipe, stored)
        share = self._share(recipe, format)
        return self._split.column_bytes(share, format, stored) if self._split is not None and isinstance(share, ColumnShare) else None

    def _row_part(self, recipe: WeightRecipe) -> RowPart:
        O, split = recipe.shape[0], self._split
        if split is None:
            return RowPart(slice(0, O))
        return RowPart(split.head_rows(O)) if recipe.name == self._head else split.rows(recipe.name, O, self._down_format(recipe))

    def _down_format(self, recipe: WeightRecipe) -> str:
        """The format of the second matrix of the MLP, the experts or the shared expert to whose first ones a tensor belongs, if to any."""
        layer, _, part = recipe.name.rpartition(".ffn_")
        kind = part.split(".")[0].removeprefix("gate").removeprefix("up")
        down = self._recipes.get(f"{layer}.ffn_down{kind}.weight")
        return "" if down is None else self._format_in_memory(down)

    def _format_in_memory(self, recipe: WeightRecipe) -> str:
        """The format that a matrix will have, before it is loaded."""
        if self._checkpoint is None:
            return self._dummy_format(recipe)
        return self._format_of(recipe, rows_format(self._checkpoint, recipe, self._plan.dtype, packed_in(self._plan.layout)))

    def _num_rows(self, recipe: WeightRecipe) -> int:
        return self._row_part(recipe).count

    def _share(self, recipe: WeightRecipe, format: str) -> ColumnShare | HeadShare | RowShare | None:
        if self._split is None:
            return None
        if recipe.name == self._head:
            return self._split.head_share(recipe.shape[0])
        if recipe.name.endswith(".attn_q.weight"):
            return self._split.heads_of_all()
        return self._split.column_share(recipe.name, format, recipe.shape[1])

    def _columns(self, recipe: WeightRecipe, format: str) -> int:
        """The columns of the matrix in memory."""
        share = self._share(recipe, format)
        if self._split is None or not isinstance(share, ColumnShare):
            return recipe.shape[1]
        part = self._split.column_bytes(share, format, format)
        columns = int((part.stop - part.start) // FORMATS[format].nbytes * FORMATS[format].elements)
        if columns != share.columns and self._plan.layout is not Layout.PANELS:
            raise ModelError(
                f"tensor_parallel_size={share.group.world_size}: the {recipe.shape[1]} columns of {recipe.name} are in blocks of "
                f"{FORMATS[format].elements} in {format}, which {self._plan.placement} does not divide; use fewer ranks, or another format"
            )
        return columns

    def _converted(self, recipe: WeightRecipe, rows: Rows) -> Rows:
        """The rows in the format that the plan wants. ModelError for numbers that cannot be quantized."""
        format, imatrix = self._format_of(recipe, rows.format), self._plan.imatrix
        try:
            return rows.converted(format, None if imatrix is None or format == rows.format else imatrix.columns(recipe))
        except FloatingPointError as error:
            what = f"{recipe.name!r} has numbers that are not finite or beyond float16's range, and cannot be {format}"
            raise ModelError(f"weights: {what}; leave quantization out") from error

    def _located(self, recipe: WeightRecipe) -> RowSource:
        """The rows of `_load_rows` where they are; those that have to be quantized are so on the host."""
        if self._checkpoint is None:
            return self._located_part(recipe, dummy_source(recipe, self._dummy_format(recipe)))
        rows = locate_rows(self._checkpoint, recipe, self._plan.dtype, packed_in(self._plan.layout), recipe.name in self._ordered)
        rows = self._located_part(recipe, rows)
        if not self._plan.quantized or rows.format == self._wanted[recipe.name]:
            return rows
        done = self._converted(recipe, Rows(rows.format, rows.gathered()))
        return RowSource.of(done.format, done.data)

    def _dummy_format(self, recipe: WeightRecipe) -> str:
        """The format of a matrix of random numbers."""
        return self._format_of(recipe, self._plan.floats)

    def _format_of(self, recipe: WeightRecipe, stored: str) -> str:
        """The format of a matrix that the file has in `stored`, or that was unpacked to it."""
        return recipe.format or self._wanted.get(recipe.name) or (self._plan.floats if stored in FLOATS else stored)


def _identity(plan: WeightPlan, split: Split | None, stage: PipelineStage | None) -> str:
    """What the packed matrices of this process depend on."""
    identity = plan.identity if split is None else f"{plan.identity} rank {split.group.rank} of {split.group.world_size}"
    return identity if stage is None or stage.is_whole else f"{identity} layers {stage.layers.start} to {stage.layers.stop}"


def place(model: Any, tensors: dict[str, Tensor], first_layer: int = 0) -> None:
    """Put tensors where their dotted names say; the model has the layers from `first_layer` on."""
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        owner = model
        for part in path:
            owner = owner[int(part) - first_layer] if part.isdigit() else getattr(owner, part)
        setattr(owner, last, tensor)


def _groups(owner: Any, products: dict[str, tuple[str, ...]], prefix: str, recipes: dict[str, WeightRecipe]) -> list[_Group]:
    """The products of a layer or of the model, whose weights' names begin with `prefix`."""
    return [
        _Group(field, [getattr(owner, name) for name in names], [recipes[f"{prefix}{name}.weight"] for name in names])
        for field, names in products.items()
    ]
