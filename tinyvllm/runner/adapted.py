"""Which products of a model low-rank adapters may change, and how the modules of an adapter become matrices of these products.

The names of modules are those of Hugging Face's checkpoints. A product may be several modules, or a part of one; one with a matrix for each
expert, or each head, has as many matrices of an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from tinyvllm.errors import ModelError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import Latent, ModelConfig, Transform
from tinyvllm.models.families import Family, find_family
from tinyvllm.quant.layouts import PackedWeight
from tinyvllm.quant.slices import ColumnShare, slice_unit
from tinyvllm.runner.opened import OpenedModel
from tinyvllm.runner.row_part import RowPart
from tinyvllm.runner.source import CheckpointSource
from tinyvllm.runner.split import SUMMED

_SIXTEEN = 16  # outputs that the kernel takes at a time
_AFTER = {"ffn_in": "ffn_down", "shared_in": "shared_down"}  # products whose outputs others read, in slices
IN_FRONT = -1  # the layer of products in front of the layers
Key = tuple[int, str]  # the layer of a product, and its field
# a [r, I] and b [O, r] of a module to those of M matrices of a product, a [M, r, I] and b [M, O, r]
_Matrices = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class ProductShape:
    """One product of `owner`, which is a layer or the model: its inputs, and the outputs of each projection, of each of its matrices."""

    owner: Any
    layer: int
    field: str
    inputs: int
    outputs: tuple[int, ...]
    names: tuple[str, ...]
    matrices: int = 1

    def sizes(self, rank: int) -> tuple[tuple[int, int, int, int], tuple[int, int, int]]:
        """Shapes of one adapter's matrices [M, P, R, I] and [M, R, O]."""
        return (self.matrices, len(self.outputs), rank, self.inputs), (self.matrices, rank, sum(self.outputs))


@dataclass(frozen=True, eq=False)
class OwnProduct:
    """What this process has of a product: some of its matrices, and of each the columns of A, in the weight's order, and of each
    projection the rows of B. `outputs` are how many rows that is; `unit` and `share` those of `AdapterStack`.
    """

    shape: ProductShape
    columns: slice
    parts: tuple[RowPart, ...]
    matrices: slice
    unit: int = 0
    share: ColumnShare | None = None

    @property
    def outputs(self) -> tuple[int, ...]:
        return tuple(part.count for part in self.parts)

    @property
    def count(self) -> int:
        """How many matrices."""
        return len(range(self.matrices.start, self.matrices.stop))

    def sizes(self, rank: int) -> tuple[tuple[int, int, int, int], tuple[int, int, int]]:
        """As those of `ProductShape`."""
        matrices = self.count
        return (matrices, len(self.parts), rank, self.columns.stop - self.columns.start), (matrices, rank, sum(self.outputs))


@dataclass(frozen=True)
class Part:
    """What a module is of a product: of the projection `index` the matrices from number `first` on."""

    key: Key
    index: int
    matrices: _Matrices
    first: int = 0


@dataclass(frozen=True)
class Module:
    """Inputs and outputs of a module, how many matrices its tensors hold, and what it is of products."""

    inputs: int
    outputs: int
    matrices: int
    parts: tuple[Part, ...]

    def joined(self, other: Module) -> Module:
        """A module that is several projections."""
        return replace(self, outputs=self.outputs + other.outputs, parts=self.parts + other.parts)


def adapted_products(opened: OpenedModel, experts: bool) -> Iterator[ProductShape]:
    """The products that adapters may change; with `experts` those of the experts that rows choose, too."""
    model, shapes = opened.model, {recipe.name: recipe.shape for recipe in opened.recipes}
    if not hasattr(model, "adapters"):
        raise ModelError(f"enable_lora: adapters are not supported for models of {opened.config.family}; leave it out")
    found = False
    for layer, owner in enumerate((model, *opened.blocks), IN_FRONT):
        for field, parts in owner.products().items():
            matrices = owner.adapted(field)
            chosen = any("_exps" in part for part in parts)
            if not matrices or (chosen and not experts):
                continue
            found |= chosen
            names = tuple(_tensor(layer, part) for part in parts)
            own = [shapes[name] for name in names]
            yield ProductShape(owner, layer, field, own[0][1], tuple(rows // matrices for rows, _ in own), names, matrices)
    if experts and not found:
        raise ModelError(f"lora_experts: models of {opened.config.family} have no experts that adapters may change; leave it out")


def own_product(opened: OpenedModel, shape: ProductShape) -> OwnProduct:
    """What this process has of a product whose weight is loaded. ModelError for parts that no kernel computes."""
    weights, split = shape.owner.weights, opened.split
    weight, whole = getattr(weights, shape.field).weight, slice(0, shape.inputs)
    parts, matrices = tuple(RowPart(slice(0, rows)) for rows in shape.outputs), slice(0, shape.matrices)
    if shape.names[0].split(".")[-2] in SUMMED and isinstance(weight, PackedWeight):
        unit = slice_unit(weight.format, shape.inputs) if opened.plan.placement.is_cpu else 0
        if split is None or not isinstance(weight.share, ColumnShare):
            return OwnProduct(shape, whole, parts, matrices, unit)
        return OwnProduct(shape, split.columns(weight.share, weight.format), parts, matrices, unit, weight.share)
    if split is None:
        return OwnProduct(shape, whole, parts, matrices)
    if (heads := split.matrices(shape.names[0])) is not None:
        return OwnProduct(shape, whole, parts, heads)
    down = getattr(weights, _AFTER[shape.field]).weight.format if shape.field in _AFTER else ""
    all_rows = (rows * shape.matrices for rows in shape.outputs)
    divided = (split.rows(name, rows, down) for name, rows in zip(shape.names, all_rows, strict=True))
    own = OwnProduct(shape, whole, tuple(replace(part, matrices=1) for part in divided), matrices)
    if odd := next((rows for rows in own.outputs if rows % _SIXTEEN), 0):
        raise ModelError(
            f"enable_lora: a part of the product with {shape.names[0]} has {odd} outputs in each of {split.group.world_size} ranks, and "
            "kernels of adapters take sixteens; use fewer ranks"
        )
    return own


def modules_of(opened: OpenedModel, products: list[ProductShape]) -> dict[str, Module]:
    """The modules that adapters may have, by their names; those of parameters of experts have the name of the parameter."""
    family, modules = find_family(CheckpointSource(opened.checkpoint)), dict[str, Module]()
    for shape in products:
        for index, name in enumerate(shape.names):
            for module, own in _modules(family, opened.config, shape, index, name):
                modules[module] = modules[module].joined(own) if module in modules else own
    return modules


def unread_modules(opened: OpenedModel) -> frozenset[str]:
    """Modules that files may have, and that the model does not compute."""
    family, layers = find_family(CheckpointSource(opened.checkpoint)), enumerate(opened.blocks)
    return frozenset(_module(family, opened.config, _tensor(layer, part))[0] for layer, block in layers for part in block.unread())


def _modules(family: Family, config: ModelConfig, shape: ProductShape, index: int, name: str) -> Iterator[tuple[str, Module]]:
    key, outputs = (shape.layer, shape.field), shape.outputs[index]
    if "_exps" in name:
        yield from _of_experts(family, config, shape, index, name)
        return
    module, transform = _module(family, config, name)
    if shape.matrices == 1:
        yield module, Module(shape.inputs, outputs, 1, (Part(key, index, _moved(transform)),))
        return
    assert config.latent is not None, "others have one matrix a product"
    keys, H = shape.field == "k_b", shape.matrices
    part = Part(key, index, _keys(config.latent, H) if keys else _values(config.latent, H))
    yield module, Module(config.latent.rank, H * (config.latent.plain if keys else config.latent.value), 1, (part,))


def _of_experts(family: Family, config: ModelConfig, shape: ProductShape, index: int, name: str) -> Iterator[tuple[str, Module]]:
    """A module for each expert, as transformers 4 has them, and the parameter of all experts, as transformers 5 has it."""
    key, X, F = (shape.layer, shape.field), shape.matrices, shape.outputs[index]
    each, _ = family.sources(replace(config, experts_in_one=False), "safetensors", name)
    for expert, source in enumerate(each if len(each) == X else ()):
        yield source.removesuffix(".weight"), Module(shape.inputs, F, 1, (Part(key, index, _moved(None), expert),))
    (source,), transform = family.sources(replace(config, experts_in_one=True), "safetensors", name)
    assert transform is not None, "the rows of a part of the parameter"
    yield source, Module(shape.inputs, F, X, (Part(key, index, _parameter(X, transform, config.experts_transposed)),))


def _tensor(layer: int, part: str) -> str:
    """The model's tensor of a projection."""
    return f"{part}.weight" if layer == IN_FRONT else f"blk.{layer}.{part}.weight"


def _module(family: Family, model: ModelConfig, tensor: str) -> tuple[str, Transform | None]:
    """The module of a tensor in Hugging Face's checkpoint, and how its rows become those of the tensor."""
    (source,), transform = family.sources(model, "safetensors", tensor)
    return source.removesuffix(".weight"), transform


def _moved(transform: Transform | None) -> _Matrices:
    """One matrix, some of the module's outputs or all in another order."""
    return lambda a, b: (a[None], (b if transform is None else transform([b]))[None])


def _parameter(experts: int, transform: Transform, transposed: bool) -> _Matrices:
    """Those of all experts, from the tensors of a parameter as `LowRank` has them; `transposed`: the transform reads [X, I, O]."""

    def matrices(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        each = b.reshape(len(b), -1, experts).transpose(2, 0, 1)
        rows = transform([each.swapaxes(1, 2) if transposed else each])
        return a.reshape(experts, -1, a.shape[1]), rows.reshape(experts, -1, each.shape[2])

    return matrices


def _keys(latent: Latent, heads: int) -> _Matrices:
    """From queries to what is multiplied with the latent, of each head: the module's matrix for keys, transposed. So are A and B."""

    def matrices(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        own = b.reshape(heads, latent.plain + latent.value, -1)[:, : latent.plain]
        return own.swapaxes(1, 2), np.broadcast_to(a.T, (heads, *a.T.shape))

    return matrices


def _values(latent: Latent, heads: int) -> _Matrices:
    """From the latent to the values of each head."""

    def matrices(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.broadcast_to(a, (heads, *a.shape)), b.reshape(heads, latent.plain + latent.value, -1)[:, latent.plain :]

    return matrices
