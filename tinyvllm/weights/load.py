"""From a checkpoint's bytes to the model's tensors: mapped where that is enough, converted one at a time where it is not.

Takes recipes, one for every tensor of the model, and gives tinygrad tensors under their names, or the rows of a matrix as they are
stored for those who pack them. Does not know any architecture: which tensors there are, and how they come from the file's, the recipes
say.

Where the bytes live. On tinygrad's CPU device a stored tensor that is already what the model wants is the mapped file itself; nothing is
read until a kernel touches it. Everything else is written once, into memory of its own, in pieces that fit the processor's cache, and
the file's pages are dropped as it goes, so that the peak is what stays resident plus one tensor's source at the very most. On other
devices each tensor is copied over, one after the other.

How long they live. tinygrad does not own memory that it is handed, so the arrays hang on the tinygrad buffer: when the last user of
the buffer is gone (the tensor, a view of it, a captured graph) the array is released, and not before kernels in flight have ended.
"""

from __future__ import annotations

import functools
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from math import prod
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from tinygrad import Device, Tensor, dtypes

from tinyvllm.errors import FormatError, ModelError
from tinyvllm.quant.codecs import bf16_to_f32, f32_to_bf16, readable_formats, unpack
from tinyvllm.quant.formats import FORMATS, BlockFormat, Layout, packed_in
from tinyvllm.weights.checkpoint import Checkpoint, TensorRecord
from tinyvllm.weights.mapping import allocate, drop_pages, is_mapped

if TYPE_CHECKING:
    from tinygrad.dtype import DType

_SPEAKER = "weights"
# How numpy carries the three formats that a model's tensors can have in memory.
_NUMPY: dict[str, np.dtype[Any]] = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(np.uint16)}
# tinygrad's CPU kernels load float32 in fours and float16 in fours with instructions that fault on less; bfloat16 one by one.
_ALIGNMENT = {"F32": 16, "F16": 8, "BF16": 8}
_CHUNK = 1 << 18  # elements converted at a time: 1 MiB of float32 stays in the second-level cache with its temporaries
_DROP_EVERY = 16  # chunks: faulting pages in again around every single drop costs more than the conversion
_POOL = 1_048_573  # prime, so that no two rows of a dummy tensor begin at the same place


class Recipe(Protocol):
    """How one tensor of the model comes from the file's.

    `transform` takes the sources in order and returns an array of `shape`; None means the single source as it is. It may only move
    elements (slice, permute, transpose, stack): its inputs come as stored, float32, float16 or bfloat16 bits as uint16, when they
    all have the same one of these formats; otherwise they have been converted to the model's dtype first (bfloat16 again as
    uint16). A slice of rows therefore stays a view of the file, and is mapped. One that only moves whole rows may also be given the
    bytes of a packed matrix, a row a row: it must not count on the number of columns.
    """

    @property
    def name(self) -> str: ...
    @property
    def sources(self) -> tuple[str, ...]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def transform(self) -> Callable[[list[np.ndarray]], np.ndarray] | None: ...


Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, the tensor just done


def load_tensors(
    checkpoint: Checkpoint, recipes: Iterable[Recipe], device: str, dtype: DType, progress: Progress | None = None
) -> dict[str, Tensor]:
    """Every recipe's tensor, of `dtype` (float32, float16 or bfloat16), realized on `device`.

    ModelError names a tensor that is missing, has the wrong shape or does not fit float16; FormatError one in a format that has no
    reader. What can be checked from the headers is checked before anything is loaded. Tensors may share the file's memory: they are
    read-only.
    """
    wanted = _format_of_dtype(dtype)
    recipes = list(recipes)
    _check_sources(checkpoint, recipes)
    total = sum(prod(r.shape) for r in recipes) * dtype.itemsize
    done, out = 0, {}
    for recipe in recipes:
        records = [checkpoint.tensors[source] for source in recipe.sources]
        out[recipe.name] = _to_device(_build(recipe, records, wanted, device), device, dtype)
        for record in records:
            drop_pages(record.data)
        done += prod(recipe.shape) * dtype.itemsize
        if progress is not None:
            progress(done, total, recipe.name)
    return out


def load_rows(
    checkpoint: Checkpoint, recipe: Recipe, dtype: DType, packed: tuple[str, ...] = packed_in(Layout.PANELS)
) -> tuple[str, np.ndarray]:
    """The matrix of one recipe [O, I] as rows of bytes: the name of its format and uint8 [O, bytes of a row], C-contiguous.

    As stored (F32, F16, BF16 or one of the formats `packed`) where the sources agree on one of these and the transform can be done in it; a
    view of the mapped file where the transform is none or a slice of rows, and then the caller drops its pages when done. Otherwise in the
    format of `dtype`, in memory of its own. Stored floats are not converted to `dtype`, only checked to fit it. Errors as `load_tensors`.
    """
    wanted = _format_of_dtype(dtype)
    if len(recipe.shape) != 2:
        raise ModelError(f"{_SPEAKER}: {recipe.name!r} has the shape {list(recipe.shape)}, expected a matrix; load it with load_tensors")
    _check_sources(checkpoint, [recipe])
    records = [checkpoint.tensors[source] for source in recipe.sources]
    try:
        name, rows = _rows(recipe, records, wanted, packed)
    except FloatingPointError as error:
        raise ModelError(_beyond_float16(recipe)) from error
    if not is_mapped(rows):
        for record in records:
            drop_pages(record.data)
    return name, rows


def dummy_tensors(recipes: Iterable[Recipe], device: str, dtype: DType, seed: int = 0) -> dict[str, Tensor]:
    """Random weights of the recipes' shapes: normal with deviation 0.02, and 1 for vectors called weight, which are norms.

    A tensor depends on the seed and its own name alone. All are cut from one pool of about a million numbers, at memory speed.
    """
    wanted = _format_of_dtype(dtype)
    pool = _from_f32(np.random.default_rng(seed).standard_normal(_POOL, np.float32) * np.float32(0.02), wanted)
    one = _from_f32(np.ones(1, np.float32), wanted)
    out = {}
    for recipe in recipes:
        flat = allocate(prod(recipe.shape) * wanted.nbytes).view(_NUMPY[wanted.name])
        if len(recipe.shape) == 1 and recipe.name.endswith("weight"):
            flat[:] = one
        else:
            _fill_from_pool(flat, pool, zlib.crc32(recipe.name.encode()) % _POOL)
        out[recipe.name] = _to_device(flat.reshape(recipe.shape), device, dtype)
    return out


def _fill_from_pool(flat: np.ndarray, pool: np.ndarray, start: int) -> None:
    position = 0
    while position < len(flat):
        piece = pool[start : start + len(flat) - position]
        flat[position : position + len(piece)] = piece
        position, start = position + len(piece), 0


# --- what can be known from the headers


def _format_of_dtype(dtype: DType) -> BlockFormat:
    names = {dtypes.float32: "F32", dtypes.float16: "F16", dtypes.bfloat16: "BF16"}
    if dtype not in names:
        raise ModelError(f"{_SPEAKER}: a model's dtype is float32, float16 or bfloat16, got {dtype}")
    return FORMATS[names[dtype]]


def _check_sources(checkpoint: Checkpoint, recipes: Sequence[Recipe]) -> None:
    missing = [s for r in recipes for s in r.sources if s not in checkpoint.tensors]
    if missing:
        more = f" (nor {len(missing) - 1} others, such as {missing[1]!r})" if len(missing) > 1 else ""
        raise ModelError(f"{_SPEAKER}: {checkpoint.path} has no tensor {missing[0]!r}{more}, which the model needs")
    for recipe in recipes:
        for source in recipe.sources:
            _check_readable(checkpoint, checkpoint.tensors[source])
        if recipe.transform is None:
            if len(recipe.sources) != 1:
                raise ModelError(f"{_SPEAKER}: {recipe.name!r} has {len(recipe.sources)} sources and no transform to join them")
            found = checkpoint.tensors[recipe.sources[0]].shape
            if found != recipe.shape:
                raise ModelError(_wrong_shape(recipe, f"{recipe.sources[0]!r} in {checkpoint.path} has {list(found)}"))


def _check_readable(checkpoint: Checkpoint, record: TensorRecord) -> None:
    if record.format not in readable_formats():
        raise FormatError(
            f"{_SPEAKER}: tensor {record.name!r} in {checkpoint.path} is stored as {record.format}, which cannot be read; "
            f"use a model in one of {', '.join(readable_formats())}"
        )


def _wrong_shape(recipe: Recipe, found: str) -> str:
    return f"{_SPEAKER}: {recipe.name!r} must have the shape {list(recipe.shape)} by the model's configuration, but {found}"


# --- from records to one array of the wanted format


def _build(recipe: Recipe, records: list[TensorRecord], wanted: BlockFormat, device: str) -> np.ndarray:
    """The tensor as a contiguous array in the wanted format: a view of the file where it can be one, else memory of its own."""
    try:
        if recipe.transform is None and records[0].format not in _NUMPY:
            return _unpacked(records[0], wanted)
        array = _transformed(recipe, records, wanted)
        return array if _usable_as_it_is(array, wanted, device) else _converted(array, wanted)
    except FloatingPointError as error:
        raise ModelError(_beyond_float16(recipe)) from error


def _beyond_float16(recipe: Recipe) -> str:
    return f"{_SPEAKER}: {recipe.name!r} holds numbers beyond float16's range; use bfloat16 or float32"


def _rows(recipe: Recipe, records: list[TensorRecord], wanted: BlockFormat, packed: tuple[str, ...]) -> tuple[str, np.ndarray]:
    formats = {record.format for record in records}
    stored = FORMATS[records[0].format] if len(formats) == 1 else wanted
    if stored.name in packed and _moves_whole_rows(recipe, records):
        blocks = [record.data.reshape(record.shape[0], -1) for record in records]
        return stored.name, np.ascontiguousarray(blocks[0] if recipe.transform is None else recipe.transform(blocks))
    if stored.name not in _NUMPY:
        stored = wanted
    array = _transformed(recipe, records, wanted)
    if not array.flags.c_contiguous:
        array = _converted(array, stored)
    if wanted.name == "F16" and stored.name != "F16":
        _check_fits_float16(array)
    return stored.name, array.view(np.uint8).reshape(recipe.shape[0], -1)


def _moves_whole_rows(recipe: Recipe, records: list[TensorRecord]) -> bool:
    """Whether the transform, tried on matrices of as many rows but two columns, gives the right number of rows, each whole."""
    if recipe.transform is None:
        return True
    if any(len(record.shape) != 2 or record.shape[1] != recipe.shape[1] for record in records):
        return False
    ends = np.cumsum([2 * record.shape[0] for record in records])
    trial = [np.arange(end - 2 * record.shape[0], end).reshape(-1, 2) for record, end in zip(records, ends)]
    try:
        moved = recipe.transform(trial)
    except (ValueError, IndexError):
        return False  # said better where it is tried on the numbers themselves
    return moved.shape == (recipe.shape[0], 2) and bool((moved[:, 0] % 2 == 0).all() and (moved[:, 0] + 1 == moved[:, 1]).all())


def _check_fits_float16(array: np.ndarray) -> None:
    """FloatingPointError if a finite number of `array` (float32 or bfloat16 bits) rounds to an infinite float16."""
    narrow = array.dtype == _NUMPY["BF16"]
    bits = array.reshape(-1).view(np.uint16 if narrow else np.uint32)
    # The first number that rounds up to 65536 is 65520; from `infinite` on come the infinities and NaNs that are stored as such.
    first, infinite = (0x4780, 0x7F80) if narrow else (0x477FF000, 0x7F800000)
    for start in range(0, len(bits), _CHUNK):
        magnitude = np.bitwise_and(bits[start : start + _CHUNK], 0x7FFF if narrow else 0x7FFFFFFF)
        if ((magnitude >= first) & (magnitude < infinite)).any():
            raise FloatingPointError("overflow")


def _transformed(recipe: Recipe, records: list[TensorRecord], wanted: BlockFormat) -> np.ndarray:
    formats = {record.format for record in records}
    as_stored = len(formats) == 1 and formats <= _NUMPY.keys()
    arrays = [_stored(r) if as_stored else _unpacked(r, wanted) for r in records]
    if recipe.transform is None:
        return arrays[0]
    shapes = ", ".join(f"{r.name!r} {list(r.shape)}" for r in records)
    try:
        array = recipe.transform(arrays)
    except (ValueError, IndexError) as error:
        raise ModelError(_wrong_shape(recipe, f"it cannot be made from {shapes}: {error}")) from error
    if array.shape != recipe.shape:
        raise ModelError(_wrong_shape(recipe, f"{shapes} give {list(array.shape)}"))
    return array


def _stored(record: TensorRecord) -> np.ndarray:
    return record.data.view(_NUMPY[record.format]).reshape(record.shape)


def _usable_as_it_is(array: np.ndarray, wanted: BlockFormat, device: str) -> bool:
    if array.dtype != _NUMPY[wanted.name] or not array.flags.c_contiguous:
        return False
    if not _is_cpu(device):
        return True  # it is copied in a moment
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    spare = 0 if is_mapped(array) else whole.nbytes - array.nbytes  # a slice would keep all that it was cut from
    return array.ctypes.data % _ALIGNMENT[wanted.name] == 0 and spare == 0


def _unpacked(record: TensorRecord, wanted: BlockFormat) -> np.ndarray:
    """The record in the wanted format, in memory of its own, piece by piece; the pages it came from are dropped on the way."""
    stored = FORMATS[record.format]
    blocks = record.data.reshape(-1, stored.nbytes)
    out = allocate(len(blocks) * stored.elements * wanted.nbytes).view(_NUMPY[wanted.name])
    step = max(1, _CHUNK // stored.elements)
    for start in range(0, len(blocks), step):
        piece = blocks[start : start + step]
        values = unpack(stored.name, piece).reshape(-1)
        out[start * stored.elements : start * stored.elements + len(values)] = _from_f32(values, wanted)
        if start % (step * _DROP_EVERY) == 0:
            drop_pages(blocks[max(0, start - step * _DROP_EVERY) : start])
    return out.reshape(record.shape)


def _converted(array: np.ndarray, wanted: BlockFormat) -> np.ndarray:
    """A copy of `array` (float32, float16 or bfloat16 bits, in any layout) in the wanted format, contiguous, piece by piece."""
    out = allocate(array.size * wanted.nbytes).view(_NUMPY[wanted.name])
    in_order = array.flags.c_contiguous  # the rows of a transposed one lie all over it: its pages must stay until the end
    source, target = (array.reshape(-1), out) if in_order else (array, out.reshape(array.shape))
    step = max(1, _CHUNK // max(1, prod(source.shape[1:])))
    for start in range(0, len(source), step):
        piece = source[start : start + step]
        same = piece.dtype == target.dtype
        target[start : start + step] = piece if same else _from_f32(_to_f32(piece), wanted)
        if in_order and start % (step * _DROP_EVERY) == 0:
            drop_pages(source[max(0, start - step * _DROP_EVERY) : start])
    return out.reshape(array.shape)


def _to_f32(array: np.ndarray) -> np.ndarray:
    return bf16_to_f32(array) if array.dtype == _NUMPY["BF16"] else array.astype(np.float32)


def _from_f32(values: np.ndarray, wanted: BlockFormat) -> np.ndarray:
    """float32 -> the wanted format as numpy carries it. FloatingPointError for a finite number that float16 cannot hold."""
    if wanted.name == "F32":
        return values
    if wanted.name == "BF16":
        return f32_to_bf16(values)
    with np.errstate(over="raise"):
        return values.astype(np.float16)


# --- from an array to a tensor


def _is_cpu(device: str) -> bool:
    return Device.canonicalize(device).split(":")[0] == "CPU"


def _to_device(array: np.ndarray, device: str, dtype: DType) -> Tensor:
    if _is_cpu(device):
        return adopt(array, device, dtype)
    # By way of a CPU tensor: numpy has no bfloat16, and a bitcast on the device would be a kernel and a second copy there.
    tensor = adopt(array, "CPU", dtype).to(device).realize()
    Device[device].synchronize()  # CUDA keeps its pinned copy of what was sent until then, in the end one of the whole model
    return tensor


def place_bytes(array: np.ndarray, device: str) -> Tensor:
    """uint8 [N] on any device: the array's own memory on the CPU, a copy elsewhere."""
    return _to_device(array, device, dtypes.uint8)


def adopt(array: np.ndarray, device: str, dtype: DType) -> Tensor:
    """A tensor on a CPU device whose memory is the array's, which lives until tinygrad has let go of the buffer and run what reads it."""
    tensor = Tensor.from_blob(array.ctypes.data, array.shape, device=device, dtype=dtype)
    _start_releasing()
    # On the buffer, not the tensor: `replace`, views and captured graphs outlive the Tensor object and keep the buffer.
    weakref.finalize(tensor.uop.buffer, _dropped.put, (Device[device].synchronize, array)).atexit = False
    return tensor


_dropped: SimpleQueue[tuple[Callable[[], None], np.ndarray]] = SimpleQueue()  # its put may run in the middle of anything, as finalizers do


@functools.cache
def _start_releasing() -> None:
    threading.Thread(target=_release_dropped, name="tinyvllm-release-weights", daemon=True).start()


def _release_dropped() -> None:
    """Waits for the device before it lets memory go: `realize` returns before the CPU worker has run.

    A thread of its own, because a finalizer may run inside that worker, where waiting for it would never end.
    """
    while True:
        synchronize, array = _dropped.get()
        synchronize()
        del array
