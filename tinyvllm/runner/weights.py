"""Puts a checkpoint's weights into a model: packed for products that have kernels here, plain tensors for all else.

For the CPU they are packed into panels, for CUDA into tiles: written once, by all cores, straight from the mapped file, whose pages are
dropped on the way; so the peak is what stays, and on a GPU one matrix on the host.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinyvllm.backends.cpu.toolchain import has_compiler
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.launch import run_now
from tinyvllm.backends.registry import select, usable_variants
from tinyvllm.bridge import mapped
from tinyvllm.config import cache_folder
from tinyvllm.errors import ModelError
from tinyvllm.models.config import Weight
from tinyvllm.models.projections import bias_of
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import FLOATS, FORMATS, Layout, formats_in, packed_in
from tinyvllm.quant.layouts import (
    PANEL,
    PackedWeight,
    RowWeight,
    StoredWeight,
    TileWeight,
    convert_rows,
    packable,
    panel_bytes,
    put_tiles,
    quantize_rows,
    row_bytes,
    unpack_rows,
)
from tinyvllm.runner.weight_cache import WeightCache
from tinyvllm.weights.checkpoint import Checkpoint
from tinyvllm.weights.load import dummy_tensors, load_rows, load_tensors, place_bytes
from tinyvllm.weights.mapping import allocate, drop_pages

DTYPE_FORMATS: dict[DType, str] = {getattr(dtypes, FORMATS[name].dtype or ""): name for name in FLOATS}
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class WeightPlan:
    """How weights are to be held: `dtype` of what is not packed; `format` every matrix must have, or None for the one it is stored in."""

    device: str
    dtype: DType
    format: str | None

    @property
    def layout(self) -> Layout:
        """The layout that the device's kernels read."""
        return {"METAL": Layout.ROWS, "CUDA": Layout.TILES}.get(self.device.split(":")[0], Layout.PANELS)

    @property
    def stored(self) -> bool:
        """Whether the device's kernels read rows as files have them."""
        return self.layout is Layout.ROWS

    @property
    def tiled(self) -> bool:
        """Whether the device's kernels read tiles."""
        return self.layout is Layout.TILES

    @property
    def target(self) -> str:
        """The format of a matrix that the checkpoint stores in floats."""
        return self.format or DTYPE_FORMATS[self.dtype]

    @property
    def quantized(self) -> bool:
        """Whether every matrix must be packed."""
        return self.format is not None and not FORMATS[self.format].is_float


class WeightLoader:
    """Loads a model's weights from `checkpoint`, or makes them up where that is None. Panels are kept below `kept`, if that is given."""

    def __init__(self, checkpoint: Checkpoint | None, plan: WeightPlan, progress: Progress | None = None, kept: Path | None = None):
        self._checkpoint, self._plan, self._progress = checkpoint, plan, progress
        packing = f"{DTYPE_FORMATS[plan.dtype]} {plan.format}{' tiles' if plan.tiled else ''}"
        self._kept = None if kept is None or checkpoint is None or plan.stored else WeightCache(kept, checkpoint, packing)
        self.bytes = 0  # that the model holds
        self.streamed = 0  # of which a decode step reads so many: all but an embedding table of its own
        self._done = self._total = 0

    def load(self, model: Any, recipes: list[Weight]) -> None:
        """Give every weight of the model its place."""
        by_name = {recipe.name: recipe for recipe in recipes}
        self._total = sum(prod(recipe.shape) for recipe in recipes) * self._plan.dtype.itemsize
        rest = dict(by_name)
        products = [(owner, names, [by_name[f"{prefix}{name}.weight"] for name in names]) for owner, prefix, names in _products(model)]
        products = [product for product in products if self._packs(product[2])]
        if self._kept is not None and self._checkpoint is not None and not self._kept.complete:
            sources = {source for _, _, parts in products for part in parts for source in part.sources}
            self._kept.begin(sum(self._checkpoint.tensors[s].data.nbytes for s in sources if s in self._checkpoint.tensors))
        for owner, names, parts in products:
            owner.__dict__.setdefault("packed", {})[names] = self._stored(parts) if self._plan.stored else self._packed(parts)
            for part, name in zip(parts, names, strict=True):
                del rest[part.name]
                getattr(owner, name).weight = None  # nobody may take the shapeless stand-in for the weight
        if self._kept is not None:
            self._kept.finish()
        table = by_name["token_embd.weight"]
        if model.config.tied and "token_embd.weight" not in rest:
            head = model.packed["token_embd",]
            model.packed_table = head.parts[0] if isinstance(head, StoredWeight) else head
        elif "token_embd.weight" in rest and self._packs([table]):
            model.packed_table = self._rows(table)
            model.token_embd.weight = None
            del rest["token_embd.weight"]
        self._plain(model, list(rest.values()))
        for block in model.blk:
            for names in block.products():
                bias_of(block, *names)  # joined now: what is first computed in a captured step is computed in all of them

    def _packs(self, parts: list[Weight]) -> bool:
        """Whether to pack these: kernels will read them here, or the plan wants a format that there is only packed."""
        I = parts[0].shape[1]
        reason, must, known = packable("F32", I), self._plan.quantized, formats_in(self._plan.layout)
        if self._plan.target not in known:
            if must:
                packed = ", ".join(packed_in(self._plan.layout))
                raise ModelError(f"weights: no kernel on {self._plan.device} multiplies {self._plan.format}; it multiplies {packed}")
            return False
        if must and reason is not None:
            raise ModelError(f"weights: {parts[0].name} cannot be {self._plan.format}: {reason}; leave quantization out")
        return reason is None and (must or select("matmul", Placement(self._plan.device), f"weights of {I} inputs") is not None)

    def _plain(self, model: Any, recipes: list[Weight]) -> None:
        """Vectors in float32, which is what every op computes with; the rest in the model's dtype."""
        vectors, others = [r for r in recipes if len(r.shape) == 1], [r for r in recipes if len(r.shape) != 1]
        for dtype, some in ((dtypes.float32, vectors), (self._plan.dtype, others)):
            if self._checkpoint is None:
                tensors = dummy_tensors(some, self._plan.device, dtype)
            else:
                tensors = load_tensors(self._checkpoint, some, self._plan.device, dtype, None)
            for recipe in some:
                self._count(recipe, tensors[recipe.name].nbytes())
            place(model, tensors)

    def _count(self, recipe: Weight, nbytes: int, streamed: bool = True) -> None:
        self.bytes += nbytes
        self.streamed += nbytes if streamed else 0
        self._done += prod(recipe.shape) * self._plan.dtype.itemsize  # as if unpacked: what is packed how is known only when it has been
        if self._progress is not None:
            self._progress(self._done, self._total, recipe.name)

    # --- matrices for kernels

    def _placed(self, packed: np.ndarray, format: str, O: int, I: int) -> PackedWeight:
        """The packed bytes where kernels read them."""
        made = TileWeight if self._plan.tiled else PackedWeight
        return made(place_bytes(packed, self._plan.device), format, O, I)

    def _stored(self, parts: list[Weight]) -> StoredWeight:
        """Each part's rows as they lie in the file, if they are all of one format."""
        loaded = [self._load_rows(part) for part in parts]
        formats = {name for name, _ in loaded}
        format = formats.pop() if len(formats) == 1 else DTYPE_FORMATS[self._plan.dtype]
        held = []
        for part, (name, data) in zip(parts, loaded, strict=True):
            if name != format:
                data = convert_rows(name, format, data) if name in FLOATS else convert_rows("F32", format, _unpacked(name, data))
            held.append(RowWeight(mapped(data.reshape(-1), self._plan.device), format, *part.shape))
            self._count(part, data.nbytes)
        return StoredWeight(tuple(held))

    def _packed(self, parts: list[Weight]) -> PackedWeight:
        """One packed matrix with the parts' rows, one part behind the other: as kept, or packed now."""
        found = None if self._kept is None else self._kept.get(parts[0].name)
        if found is None:
            return self._pack(parts)
        format, O, panels = found
        I = parts[0].shape[1]
        for part in parts:
            self._count(part, part.shape[0] * row_bytes(format, I))
        return self._placed(panels, format, O, I)

    def _pack(self, parts: list[Weight]) -> PackedWeight:
        loaded = [self._load_rows(part) for part in parts]
        formats = {name for name, _ in loaded}
        format = formats.pop() if len(formats) == 1 else DTYPE_FORMATS[self._plan.dtype]
        O, I = sum(part.shape[0] for part in parts), parts[0].shape[1]
        size = panel_bytes(format, O, I)
        fresh = None if self._kept is None else self._kept.allocate(parts[0].name, format, O, size)
        panels = allocate(size) if fresh is None else fresh
        loaded = [(name, rows) if name == format or name in FLOATS else ("F32", _unpacked(name, rows)) for name, rows in loaded]
        if self._plan.tiled:
            loaded = [(format, rows if name == format else convert_rows(name, format, rows)) for name, rows in loaded]
        if any(len(rows) % PANEL for _, rows in loaded[:-1]):  # sixteen rows belong to two parts: make them one
            joined = np.concatenate([rows if name == format else convert_rows(name, format, rows) for name, rows in loaded])
            loaded = [(format, joined)]
        first = 0
        for name, data in loaded:
            last = first + -(-len(data) // PANEL)
            if self._plan.tiled:
                _pack_tiles(format, I, panels, data, (first, last, len(data), -(-O // PANEL)))
            else:
                _pack_panels(name, format, I, panels, data, (first, last, len(data)))
            drop_pages(data)
            first = last
        for part in parts:
            self._count(part, part.shape[0] * row_bytes(format, I))
        return self._placed(panels, format, O, I)

    def _rows(self, recipe: Weight) -> RowWeight:
        """An embedding table as it lies in the file, mapped."""
        format, rows = self._load_rows(recipe)
        O, I = recipe.shape
        self._count(recipe, rows.nbytes, streamed=False)
        placed = mapped if self._plan.stored else place_bytes  # a Mac's GPU reads the file's own pages
        return RowWeight(placed(rows.reshape(-1), self._plan.device), format, O, I)

    def _load_rows(self, recipe: Weight) -> tuple[str, np.ndarray]:
        """Format and rows, uint8 [O, bytes of a row]: as stored, or as the plan wants all to be."""
        wanted, floats = self._plan.format, DTYPE_FORMATS[self._plan.dtype]
        if self._checkpoint is None:
            return _dummy_rows(recipe, wanted or floats)
        format, rows = load_rows(self._checkpoint, recipe, self._plan.dtype, packed_in(self._plan.layout))
        target = wanted or (floats if format in FLOATS else format)
        if target == format:
            return format, rows
        if target in FLOATS:
            rows = rows if format in FLOATS else _unpacked(format, rows)
            return target, convert_rows(format if format in FLOATS else "F32", target, rows)
        return target, quantize_rows(target, _unpacked(format, rows).view(np.float32))


def place(model: Any, tensors: dict[str, Tensor]) -> None:
    """Put tensors where their dotted names say."""
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        owner = model
        for part in path:
            owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
        setattr(owner, last, tensor)


def _products(model: Any) -> Iterable[tuple[Any, str, tuple[str, ...]]]:
    """Of every product of the model: who owns it, what its weights' names begin with, and its parts."""
    for i, block in enumerate(model.blk):
        for names in block.products():
            yield block, f"blk.{i}.", names
    yield model, "", ("token_embd" if model.config.tied else "output",)


def _pack_panels(source: str, format: str, I: int, panels: np.ndarray, rows: np.ndarray, span: tuple[int, int, int]) -> None:
    kernel = Kernel.cpu("pack", _packer(), 1, 2, SOURCE=source, FORMAT=format, I=I)
    run_now(kernel, panels, np.ascontiguousarray(rows), np.array(span, np.int32))


def _pack_tiles(format: str, I: int, tiles: np.ndarray, rows: np.ndarray, span: tuple[int, int, int, int]) -> None:
    if not has_compiler(cache_folder()):  # a GPU box need not have a C compiler; this takes several times as long
        put_tiles(format, I, tiles, rows, span[0], span[3])
        return
    kernel = Kernel.cpu("pack_tiles", _packer(), 1, 2, FORMAT=format, I=I)
    run_now(kernel, tiles, np.ascontiguousarray(rows), np.array(span, np.int32))


def _packer() -> str:
    """The best variant for this processor, whatever runs the products."""
    return usable_variants(Placement("CPU"))[0]


def _unpacked(format: str, rows: np.ndarray) -> np.ndarray:
    """Rows of any format as rows of float32, uint8 [O, 4 I]."""
    return np.ascontiguousarray(unpack_rows(format, rows)).view(np.uint8)


_POOL = 1 << 20  # numbers


def _dummy_rows(recipe: Weight, format: str) -> tuple[str, np.ndarray]:
    """Random rows, normal with deviation 0.02, cut from one pool of a million numbers; a tensor depends on its own name alone."""
    O, I = recipe.shape
    pool = _dummy_pool(format)
    out = allocate(O * row_bytes(format, I))
    per_block = FORMATS[format].nbytes
    start, position = zlib.crc32(recipe.name.encode()) % (len(pool) // per_block) * per_block, 0
    while position < len(out):
        piece = pool[start : start + len(out) - position]
        out[position : position + len(piece)] = piece
        position, start = position + len(piece), 0
    return format, out.reshape(O, -1)


def _dummy_pool(format: str) -> np.ndarray:
    if format not in _pools:
        # an odd number of blocks, so that no two rows begin at the same place
        values = np.random.default_rng(0).standard_normal((1, _POOL - 32), np.float32) * np.float32(0.02)
        rows = convert_rows("F32", format, values.view(np.uint8)) if format in FLOATS else quantize_rows(format, values)
        _pools[format] = rows.reshape(-1)
    return _pools[format]


_pools: dict[str, np.ndarray] = {}
