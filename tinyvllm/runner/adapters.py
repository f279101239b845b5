"""Low-rank adapters on the device: of each product the matrices of all of them, which captured steps read (ops/lora.py)."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes

from tinyvllm.bridge import download, upload
from tinyvllm.config.engine import EngineConfig
from tinyvllm.errors import FormatError, ModelError
from tinyvllm.integers import round_up
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import ModelConfig, Transform
from tinyvllm.models.families import Family, find_family
from tinyvllm.ops.lora import AdapterStack
from tinyvllm.placement import Placement
from tinyvllm.runner.opened import OpenedModel
from tinyvllm.runner.source import CheckpointSource
from tinyvllm.weights.mapping import allocate
from tinyvllm.weights.memory import adopt
from tinyvllm.weights.peft import AdapterFiles

log = logging.getLogger("tinyvllm")

_RANK_STEP = 4  # of A, that the kernel takes at a time
_MAX_REFUSAL = 900  # characters of a message that lists a model's modules
_IN_FRONT = -1  # the layer of products in front of the layers
_Key = tuple[int, str]  # the layer of a product, and its field


@dataclass(frozen=True)
class _Projection:
    """One of the projections of a product: its outputs, and how they come from those of the module in Hugging Face's checkpoint."""

    layer: int
    field: str
    index: int
    outputs: int
    transform: Transform | None


@dataclass(frozen=True)
class _ProductShape:
    """One product of `owner`, which is a layer or the model: its inputs, and the outputs of each projection."""

    owner: Any
    layer: int
    field: str
    inputs: int
    outputs: tuple[int, ...]
    names: tuple[str, ...]

    def sizes(self, rank: int) -> tuple[tuple[int, int, int], tuple[int, int]]:
        """Shapes of one adapter's matrices [P, R, I] and [R, O]."""
        return (len(self.outputs), rank, self.inputs), (rank, sum(self.outputs))


@dataclass(frozen=True)
class PreparedAdapter:
    """An adapter as the device gets it: of each product that it changes a [P, R, I], b [R, O] and its rank; and a digest of all that."""

    products: Mapping[_Key, tuple[np.ndarray, np.ndarray, int]]
    digest: str


def adapter_bytes(config: EngineConfig, opened: OpenedModel) -> int:
    """Bytes of the matrices of all adapters that an engine may have at the same time."""
    if not config.enable_lora:
        return 0
    rank = round_up(config.max_lora_rank, _RANK_STEP)
    numbers = sum(a * b * c + d * e for shape in _products(opened) for (a, b, c), (d, e) in [shape.sizes(rank)])
    return 4 * config.max_loras * numbers


def _products(opened: OpenedModel) -> Iterator[_ProductShape]:
    """The products that adapters may change: all but those of experts and of the choice among them."""
    model, shapes = opened.model, {recipe.name: recipe.shape for recipe in opened.recipes}
    if opened.config.latent is not None or not hasattr(model, "adapters"):
        raise ModelError(f"enable_lora: adapters are not supported for models of {opened.config.family}; leave it out")
    for layer, owner in enumerate((model, *model.blk), _IN_FRONT):
        for field, parts in owner.products().items():
            if not any("_exps" in part or part.startswith("ffn_gate_inp") for part in parts):
                names = tuple(_tensor(layer, part) for part in parts)
                own = [shapes[name] for name in names]
                yield _ProductShape(owner, layer, field, own[0][1], tuple(rows for rows, _ in own), names)


def _tensor(layer: int, part: str) -> str:
    """The model's tensor of a projection."""
    return f"{part}.weight" if layer == _IN_FRONT else f"blk.{layer}.{part}.weight"


class AdapterPool:
    """Room for `max_loras` adapters of ranks up to `max_lora_rank`, numbered from 1 as `Batch.adapters` has them."""

    def __init__(self, config: EngineConfig, opened: OpenedModel, device: str):
        self.count, self.max_rank, self._device = config.max_loras, config.max_lora_rank, device
        self._rank = round_up(config.max_lora_rank, _RANK_STEP)
        self._products = {(shape.layer, shape.field): shape for shape in _products(opened)}
        self._modules: dict[str, list[_Projection]] = {}
        self._stacks: dict[_Key, AdapterStack] = {}
        self._orders: dict[_Key, np.ndarray] = {}  # of columns, where a product's weight has them in another order
        family = find_family(CheckpointSource(opened.checkpoint))
        for key, shape in self._products.items():
            shape.owner.adapters[shape.field] = self._stacks[key] = self._stack(shape)
            order = _column_order(shape)
            if order is not None:
                self._orders[key] = order
            for index, (name, outputs) in enumerate(zip(shape.names, shape.outputs, strict=True)):
                module, transform = _module(family, opened.config, name)
                self._modules.setdefault(module, []).append(_Projection(shape.layer, shape.field, index, outputs, transform))
        layers = enumerate(opened.model.blk)
        self._unread = {_module(family, opened.config, _tensor(n, part))[0] for n, block in layers for part in block.unread()}

    def _stack(self, shape: _ProductShape) -> AdapterStack:
        a, b = ((self.count, *size) for size in shape.sizes(self._rank))
        starts = tuple(int(end) for end in np.cumsum((0, *shape.outputs))[:-1])
        return AdapterStack(self._zeros(a), self._zeros(b), self._zeros((self.count,), np.int32), starts)

    def _zeros(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Tensor:
        kind = dtypes.int32 if dtype is np.int32 else dtypes.float32
        if not Placement(self._device).is_cpu:
            return Tensor.zeros(*shape, dtype=kind, device=self._device).contiguous().realize()
        # zero pages that take memory only once an adapter is written into them
        return adopt(allocate(4 * int(np.prod(shape))).view(dtype).reshape(shape), self._device, kind)

    def prepare(self, files: AdapterFiles) -> PreparedAdapter:
        """Read an adapter's numbers, laid out for `place`. Touches nothing that steps read, so any thread may call it.

        ModelError or FormatError for modules that the model lacks, other shapes, and ranks beyond max_lora_rank.
        """
        products: dict[_Key, tuple[np.ndarray, np.ndarray, int]] = {}
        digest, names = hashlib.blake2b(digest_size=16), sorted(files.modules.keys() - self._unread)
        if unread := sorted(files.modules.keys() & self._unread):
            log.info("adapter: %d modules are left out, as the model does not compute them: %s, ...", len(unread), unread[0])
        for name in names:
            self._check(files, name)
        for name in names:
            a, b = files.modules[name].read()
            digest.update(f"{name}\0{a.shape}\0{b.shape}\0".encode() + a.tobytes() + b.tobytes())
            for projection in self._modules[name]:
                self._lay(products, projection, a, b)
        return PreparedAdapter(products, digest.hexdigest())

    def _check(self, files: AdapterFiles, name: str) -> None:
        low, projections = files.modules[name], self._modules.get(name)
        if projections is None:
            known = sorted({re.sub(r"^model\.layers\.\d+\.", "", module) for module in self._modules})
            raise ModelError(
                f"adapter: {name!r} is no module that adapters may change here; those of layers 0 to "
                f"{max(layer for layer, _ in self._products)} are {', '.join(known)}",
                _MAX_REFUSAL,
            )
        if low.rank > self.max_rank:
            raise ModelError(
                f"adapter: {name!r} has rank {low.rank}, and this engine was started with max_lora_rank={self.max_rank}; give more"
            )
        inputs = self._products[projections[0].layer, projections[0].field].inputs
        wanted = (low.rank, inputs), (sum(projection.outputs for projection in projections), low.rank)
        if (low.a.shape, low.b.shape) != wanted:
            raise FormatError(
                f"adapter: {name!r} has lora_A {list(low.a.shape)} and lora_B {list(low.b.shape)}, expected {list(wanted[0])} and "
                f"{list(wanted[1])}; is it of another model?"
            )

    def _lay(self, products: dict[_Key, tuple[np.ndarray, np.ndarray, int]], projection: _Projection, a: np.ndarray, b: np.ndarray) -> None:
        """Put a module's matrices to those of the product that it is a part of."""
        key = projection.layer, projection.field
        shape, order, rank = self._products[key], self._orders.get(key), len(a)
        if key not in products:
            down, up = shape.sizes(self._rank)
            products[key] = np.zeros(down, np.float32), np.zeros(up, np.float32), 0
        all_a, all_b, most = products[key]
        start = sum(shape.outputs[: projection.index])
        own = b if projection.transform is None else projection.transform([b])
        all_a[projection.index, :rank] = a if order is None else a[:, order]
        all_b[:rank, start : start + projection.outputs] = own.T
        products[key] = all_a, all_b, max(most, rank)

    def place(self, number: int, adapter: PreparedAdapter | None) -> None:
        """Make an adapter the one of this number, which no sequence uses; None for none."""
        for key, stack in self._stacks.items():
            changed = None if adapter is None else adapter.products.get(key)
            if changed is not None:
                for tensor, part in zip((stack.a, stack.b), changed[:2]):
                    upload(tensor, part, (number - 1) * part.size)
            upload(stack.ranks, np.array([0 if changed is None else changed[2]], np.int32), number - 1)


def _module(family: Family, model: ModelConfig, tensor: str) -> tuple[str, Transform | None]:
    """The module of a tensor in Hugging Face's checkpoint, and how its rows become those of the tensor."""
    (source,), transform = family.sources(model, "safetensors", tensor)
    return source.removesuffix(".weight"), transform


def _column_order(shape: _ProductShape) -> np.ndarray | None:
    """Of a product's inputs, their numbers in Hugging Face's checkpoint, int [I]; None where they are the same."""
    owner, sorted_by_groups = shape.owner, getattr(shape.owner.weights, shape.field).order
    own: np.ndarray | None = None if shape.layer == _IN_FRONT else owner.input_order(shape.field)
    if sorted_by_groups is None:
        return own
    order = download(sorted_by_groups)
    return order if own is None else own[order]
