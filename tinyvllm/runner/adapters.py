"""Low-rank adapters on the device: of each product the matrices of all of them, which captured steps read (ops/lora.py)."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes

from tinyvllm.bridge import download, upload
from tinyvllm.config.engine import EngineConfig
from tinyvllm.errors import FormatError, ModelError
from tinyvllm.integers import round_up
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.ops.lora import AdapterStack
from tinyvllm.placement import Placement
from tinyvllm.runner.adapted import (
    IN_FRONT,
    Key,
    Module,
    OwnProduct,
    Part,
    ProductShape,
    adapted_products,
    modules_of,
    own_product,
    unread_modules,
)
from tinyvllm.runner.opened import OpenedModel
from tinyvllm.weights.mapping import allocate
from tinyvllm.weights.memory import adopt
from tinyvllm.weights.peft import AdapterFiles

log = logging.getLogger("tinyvllm")

_RANK_STEP = 4  # of A, that the kernel takes at a time
_MAX_REFUSAL = 900  # characters of a message that lists a model's modules


@dataclass(frozen=True)
class PreparedAdapter:
    """An adapter as the device gets it: of each product that it changes, which has M matrices, a [M, P, R, I], b [M, R, O] and ranks [M];
    and a digest of all that.
    """

    products: Mapping[Key, tuple[np.ndarray, np.ndarray, np.ndarray]]
    digest: str


def adapter_bytes(config: EngineConfig, opened: OpenedModel) -> int:
    """Bytes of the matrices of all adapters that an engine may have at the same time, in all ranks."""
    if not config.enable_lora:
        return 0
    rank = round_up(config.max_lora_rank, _RANK_STEP)
    sizes = (size for shape in adapted_products(opened, config.lora_experts) for size in shape.sizes(rank))
    numbers = sum(int(np.prod(size, dtype=np.int64)) for size in sizes)
    return 4 * config.max_loras * numbers * opened.shares  # at most: of each matrix pair a rank has one whole, and a part of the other


class AdapterPool:
    """Room for `max_loras` adapters of ranks up to `max_lora_rank`, numbered from 1 as `Batch.adapters` has them. A stage of a pipeline
    checks them whole, and has the matrices of its own products.
    """

    def __init__(self, config: EngineConfig, opened: OpenedModel, device: str):
        self.count, self.max_rank, self._device = config.max_loras, config.max_lora_rank, device
        self._rank, self._experts = round_up(config.max_lora_rank, _RANK_STEP), config.lora_experts
        products = list(adapted_products(opened, config.lora_experts))
        self._products = {(shape.layer, shape.field): shape for shape in products}
        self._modules, self._unread = modules_of(opened, products), unread_modules(opened)
        self._stacks: dict[Key, AdapterStack] = {}
        self._own: dict[Key, OwnProduct] = {}
        self._orders: dict[Key, np.ndarray] = {}  # of columns, where a product's weight has them in another order
        for key, shape in self._products.items():
            if shape.layer != IN_FRONT and shape.layer not in opened.layers:
                continue
            own = self._own[key] = own_product(opened, shape)
            shape.owner.adapters[shape.field] = self._stacks[key] = self._stack(own)
            order = _column_order(shape)
            if order is not None:
                self._orders[key] = order

    def _stack(self, own: OwnProduct) -> AdapterStack:
        a, b = ((self.count * size[0], *size[1:]) for size in own.sizes(self._rank))
        starts = tuple(int(end) for end in np.cumsum((0, *own.outputs))[:-1])
        return AdapterStack(self._zeros(a), self._zeros(b), self._zeros(a[:1], np.int32), starts, own.unit, own.share)

    def _zeros(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Tensor:
        kind = dtypes.int32 if dtype is np.int32 else dtypes.float32
        if not Placement(self._device).is_cpu:
            return Tensor.zeros(*shape, dtype=kind, device=self._device).contiguous().realize()
        # zero pages that take memory only once an adapter is written into them
        return adopt(allocate(4 * int(np.prod(shape, dtype=np.int64))).view(dtype).reshape(shape), self._device, kind)

    def prepare(self, files: AdapterFiles) -> PreparedAdapter:
        """Read an adapter's numbers, laid out for `place`. Touches nothing that steps read, so any thread may call it.

        ModelError or FormatError for modules that the model lacks, other shapes, and ranks beyond max_lora_rank.
        """
        products: dict[Key, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        digest, names = hashlib.blake2b(digest_size=16), sorted(files.modules.keys() - self._unread)
        if unread := sorted(files.modules.keys() & self._unread):
            log.info("adapter: %d modules are left out, as the model does not compute them: %s, ...", len(unread), unread[0])
        found = {name: self._find(files, name) for name in names}
        for name, (known, module) in found.items():
            self._check(files, name, module)
            if twice := next((other for other, (same, _) in found.items() if other != name and same == known), None):
                raise FormatError(f"adapter: {name!r} and {twice!r} are both of {known!r}")
        for name, (_, module) in found.items():
            a, b = files.modules[name].read()
            digest.update(f"{name}\0{a.shape}\0{b.shape}\0".encode() + a.tobytes() + b.tobytes())
            for part in module.parts:
                self._lay(products, part, a, b)
        return PreparedAdapter(products, digest.hexdigest())

    def _find(self, files: AdapterFiles, name: str) -> tuple[str, Module]:
        """A module of the model and its name: of the parameters of experts that which has these inputs and outputs."""
        low = files.modules[name]
        if name in self._modules:
            return name, self._modules[name]
        experts = f"{name.removesuffix('.base_layer')}."
        own = {known: each for known, each in self._modules.items() if known.startswith(experts) and each.matrices > 1}
        fitting = [(known, each) for known, each in own.items() if (each.inputs, each.outputs) == (low.a.shape[1], low.b.shape[0])]
        if fitting or own:
            return fitting[0] if fitting else next(iter(own.items()))
        known = sorted({re.sub(r"^model\.layers\.\d+\.", "", module) for module in self._modules if ".experts." not in module})
        hint = "" if self._experts or ".experts" not in name else "; of experts that rows choose with lora_experts"
        raise ModelError(
            f"adapter: {name!r} is no module that adapters may change here; those of layers 0 to "
            f"{max(layer for layer, _ in self._products)} are {', '.join(known)}{hint}",
            _MAX_REFUSAL,
        )

    def _check(self, files: AdapterFiles, name: str, module: Module) -> None:
        low = files.modules[name]
        if low.rank > self.max_rank:
            raise ModelError(
                f"adapter: {name!r} has rank {low.rank}, and this engine was started with max_lora_rank={self.max_rank}; give more"
            )
        wanted = (low.rank * module.matrices, module.inputs), (module.outputs, low.rank * module.matrices)
        if (low.a.shape, low.b.shape) != wanted:
            raise FormatError(
                f"adapter: {name!r} has lora_A {list(low.a.shape)} and lora_B {list(low.b.shape)}, expected {list(wanted[0])} and "
                f"{list(wanted[1])}; is it of another model?"
            )

    def _lay(
        self, products: dict[Key, tuple[np.ndarray, np.ndarray, np.ndarray]], part: Part, module_a: np.ndarray, module_b: np.ndarray
    ) -> None:
        """Put a module's matrices to those of the product that it is a part of, if this process has that."""
        if part.key not in self._stacks:
            return
        mine, order = self._own[part.key], self._orders.get(part.key)
        if part.key not in products:
            down, up = mine.sizes(self._rank)
            products[part.key] = np.zeros(down, np.float32), np.zeros(up, np.float32), np.zeros(down[0], np.int32)
        all_a, all_b, ranks = products[part.key]
        a, b = part.matrices(module_a, module_b)
        b = mine.parts[part.index].of(b.swapaxes(0, 1)).swapaxes(0, 1)
        (count, rank), start = a.shape[:2], sum(mine.outputs[: part.index])
        first, end = max(part.first, mine.matrices.start), min(part.first + count, mine.matrices.stop)
        of_module, own = slice(first - part.first, end - part.first), slice(first - mine.matrices.start, end - mine.matrices.start)
        all_a[own, part.index, :rank] = (a if order is None else a[:, :, order])[of_module, :, mine.columns]
        all_b[own, :rank, start : start + b.shape[1]] = b[of_module].swapaxes(1, 2)
        ranks[own] = np.maximum(ranks[own], rank)

    def place(self, number: int, adapter: PreparedAdapter | None) -> None:
        """Make an adapter the one of this number, which no sequence uses; None for none."""
        for key, stack in self._stacks.items():
            changed = None if adapter is None else adapter.products.get(key)
            if changed is not None:
                for tensor, part in zip((stack.a, stack.b), changed[:2]):
                    upload(tensor, part, (number - 1) * part.size)
            ranks = np.zeros(self._own[key].count, np.int32) if changed is None else changed[2]
            upload(stack.ranks, ranks, (number - 1) * ranks.size)


def _column_order(shape: ProductShape) -> np.ndarray | None:
    """Of a product's inputs, their numbers in Hugging Face's checkpoint, int [I]; None where they are the same."""
    owner, sorted_by_groups = shape.owner, getattr(shape.owner.weights, shape.field).order
    own: np.ndarray | None = None if shape.layer == IN_FRONT else owner.input_order(shape.field)
    if sorted_by_groups is None:
        return own
    order = download(sorted_by_groups)
    return order if own is None else own[order]
