"""From a checkpoint's bytes to the model's tensors: mapped where possible, converted one tensor at a time otherwise.

Takes a recipe per tensor of the model and returns tinygrad tensors under their names, or the rows of a matrix as stored, for packing. Knows
no architecture: the recipes say which tensors there are and how they come from those of the file.

Where the bytes are. On tinygrad's CPU device a stored tensor that is already what the model wants is the mapped file itself; nothing is
read until a kernel touches it. Everything else is written once, into memory of its own, in pieces that fit the processor's cache, and
the file's pages are dropped on the way, so that the peak is what stays resident plus at most one tensor's source. On other
devices each tensor is copied, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from tinygrad import Tensor

from tinyvllm.errors import FormatError, ModelError
from tinyvllm.quant.codecs import NUMPY_DTYPES, readable_formats
from tinyvllm.quant.formats import FORMATS, BlockFormat, Layout, packed_in
from tinyvllm.quant.layouts import RowSource, joined, row_bytes
from tinyvllm.weights.checkpoint import Checkpoint
from tinyvllm.weights.convert import check_fits_float16, converted, format_of_dtype, unpacked
from tinyvllm.weights.mapping import BuiltRecord, Record, drop_pages, is_mapped, require_whole
from tinyvllm.weights.memory import is_cpu, to_device
from tinyvllm.weights.recipe import Recipe

if TYPE_CHECKING:
    from tinygrad.dtype import DType

_SPEAKER = "weights"
_VECTOR = 4  # numbers that tinygrad's CPU kernels load at once, with instructions that fault on a smaller alignment

Progress = Callable[[int, int, str], None]  # bytes done, bytes in total, the tensor just done


def load_tensors(
    checkpoint: Checkpoint, recipes: Iterable[Recipe], device: str, dtype: DType, progress: Progress | None = None
) -> dict[str, Tensor]:
    """The tensor of each recipe, of `dtype` (float32, float16 or bfloat16), realized on `device`.

    ModelError names a tensor that is missing, has the wrong shape or does not fit float16; FormatError one in a format that has no
    reader. What can be checked from the headers is checked before anything is loaded. Tensors may share the file's memory: they are
    read-only.
    """
    wanted = format_of_dtype(dtype)
    recipes = list(recipes)
    check_sources(checkpoint, recipes)
    total = sum(prod(r.shape) for r in recipes) * dtype.itemsize
    done, out = 0, {}
    for recipe in recipes:
        records = [checkpoint.tensors[source] for source in recipe.sources]
        _require_whole(checkpoint, records)
        out[recipe.name] = to_device(_build(recipe, records, wanted, device), device, dtype)
        _drop(records)
        done += prod(recipe.shape) * dtype.itemsize
        if progress is not None:
            progress(done, total, recipe.name)
    return out


def load_rows(
    checkpoint: Checkpoint, recipe: Recipe, dtype: DType, packed: tuple[str, ...] = packed_in(Layout.PANELS), ordered: bool = False
) -> tuple[str, np.ndarray]:
    """The matrix of one recipe [O, I] as rows of bytes: the name of its format and uint8 [O, bytes of a row], C-contiguous.

    As stored (F32, F16, BF16 or one of the formats `packed`) where the sources agree on one of these and the transform works in it; a
    view of the mapped file where the transform is none or a slice of rows, and then the caller drops its pages when done. Otherwise in the
    format of `dtype`, in memory of its own. So are packed rows with columns in an order of their own (`column_order`), unless the caller
    takes them `ordered`. Stored floats are not converted to `dtype`, only checked to fit it. Errors as `load_tensors`.
    """
    wanted, records = format_of_dtype(dtype), _records_of_matrix(checkpoint, recipe)
    try:
        name, rows = _rows(recipe, records, wanted, _kept_formats(checkpoint, recipe, packed, ordered))
    except FloatingPointError as error:
        raise ModelError(beyond_float16(recipe)) from error
    if not is_mapped(rows):
        _drop(records)
    return name, rows


def rows_format(checkpoint: Checkpoint, recipe: Recipe, dtype: DType, packed: tuple[str, ...], ordered: bool = False) -> str:
    """The format that `load_rows` returns for the same arguments, from the headers alone. Errors as far as these show them."""
    records = _records_of_matrix(checkpoint, recipe)
    kept = _kept_formats(checkpoint, recipe, packed, ordered)
    return _rows_format(recipe, records, format_of_dtype(dtype), kept).name


def column_order(checkpoint: Checkpoint, recipe: Recipe) -> np.ndarray | None:
    """Which column of the matrix each column of its packed rows is, int [I]; None where they are in order, or of several sources."""
    records = [checkpoint.tensors.get(source) for source in recipe.sources]
    return records[0].order if len(records) == 1 and isinstance(records[0], BuiltRecord) else None


def locate_rows(checkpoint: Checkpoint, recipe: Recipe, dtype: DType, packed: tuple[str, ...], ordered: bool = False) -> RowSource:
    """The rows of `load_rows` where the file has them: a transform that moves whole rows becomes their order.

    The caller drops the pages of the blocks when it has read them, and sees to numbers beyond float16. Rows that have to be transformed or
    unpacked are so on the host.
    """
    records = _records_of_matrix(checkpoint, recipe)
    stored, order = records[0].format, _row_order(recipe, records)
    located = _are_stored(records) and all(record.format == stored for record in records)
    if order is None or not located or stored not in (*packed, *NUMPY_DTYPES):
        return RowSource.of(*load_rows(checkpoint, recipe, dtype, packed, ordered))
    size = row_bytes(stored, recipe.shape[1])
    return joined([RowSource.of(stored, record.data.reshape(-1, size)) for record in records]).taken(order)


def check_range(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """ModelError that names the recipe if a finite number of its sources, which are floats, is beyond float16."""
    try:
        for source in recipe.sources:
            check_fits_float16(_stored(checkpoint.tensors[source]))
    except FloatingPointError as error:
        raise ModelError(beyond_float16(recipe)) from error


# --- what can be known from the headers


def _records_of_matrix(checkpoint: Checkpoint, recipe: Recipe) -> list[Record]:
    if len(recipe.shape) != 2:
        raise ModelError(f"{_SPEAKER}: {recipe.name!r} has the shape {list(recipe.shape)}, expected a matrix; load it with load_tensors")
    check_sources(checkpoint, [recipe])
    records = [checkpoint.tensors[source] for source in recipe.sources]
    _require_whole(checkpoint, records)
    return records


def check_sources(checkpoint: Checkpoint, recipes: Sequence[Recipe]) -> None:
    """What is checked from the headers before anything is loaded; errors as `load_tensors`."""
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
            shape = checkpoint.tensors[recipe.sources[0]].shape
            if shape != recipe.shape:
                raise ModelError(_wrong_shape(recipe, f"{recipe.sources[0]!r} in {checkpoint.path} has {list(shape)}"))


def _require_whole(checkpoint: Checkpoint, records: list[Record]) -> None:
    for record in records:
        for data in record.stored:
            require_whole(data, f"{_SPEAKER}: tensor {record.name!r} in {checkpoint.path}")


def _drop(records: list[Record]) -> None:
    for record in records:
        for data in record.stored:
            drop_pages(data)


def _check_readable(checkpoint: Checkpoint, record: Record) -> None:
    if record.format not in readable_formats():
        raise FormatError(
            f"{_SPEAKER}: tensor {record.name!r} in {checkpoint.path} is stored as {record.format}, which cannot be read; "
            f"use a model in one of {', '.join(readable_formats())}"
        )


def _wrong_shape(recipe: Recipe, got: str) -> str:
    return f"{_SPEAKER}: {recipe.name!r} must have the shape {list(recipe.shape)} by the model's configuration, but {got}"


# --- from records to one array of the wanted format


def _build(recipe: Recipe, records: list[Record], wanted: BlockFormat, device: str) -> np.ndarray:
    """The tensor as a contiguous array in the wanted format: a view of the file where it can be one, else memory of its own."""
    try:
        if recipe.transform is None and (records[0].format not in NUMPY_DTYPES or not _are_stored(records)):
            return unpacked(records[0], wanted)
        array = _transformed(recipe, records, wanted)
        return array if _usable_as_it_is(array, wanted, device) else converted(array, wanted)
    except FloatingPointError as error:
        raise ModelError(beyond_float16(recipe)) from error


def beyond_float16(recipe: Recipe) -> str:
    """What a finite number that float16 cannot hold is called."""
    return f"{_SPEAKER}: {recipe.name!r} holds numbers beyond float16's range; use bfloat16 or float32"


def _kept_formats(checkpoint: Checkpoint, recipe: Recipe, packed: tuple[str, ...], ordered: bool) -> tuple[str, ...]:
    """The formats in which the rows of this recipe stay packed."""
    several = [record for record in (checkpoint.tensors.get(source) for source in recipe.sources) if isinstance(record, BuiltRecord)]
    in_order = column_order(checkpoint, recipe) is None and (len(several) < 2 or all(record.order is None for record in several))
    return packed if ordered or in_order else ()


def _rows_format(recipe: Recipe, records: list[Record], wanted: BlockFormat, packed: tuple[str, ...]) -> BlockFormat:
    """As stored where the sources agree on a format that stays packed, or on a float format of the file; else as wanted."""
    stored = records[0].format
    if any(record.format != stored for record in records):
        return wanted
    stays = stored in packed and _row_order(recipe, records) is not None
    return FORMATS[stored] if stays or (stored in NUMPY_DTYPES and _are_stored(records)) else wanted


def _rows(recipe: Recipe, records: list[Record], wanted: BlockFormat, packed: tuple[str, ...]) -> tuple[str, np.ndarray]:
    stored = _rows_format(recipe, records, wanted, packed)
    if stored.name in packed:
        blocks = [record.data.reshape(*record.shape[:-1], -1) for record in records]
        return stored.name, np.ascontiguousarray(blocks[0] if recipe.transform is None else recipe.transform(blocks))
    array = _transformed(recipe, records, wanted)
    if not array.flags.c_contiguous:
        array = converted(array, stored)
    if wanted.name == "F16" and stored.name != "F16":
        check_fits_float16(array)
    return stored.name, array.view(np.uint8).reshape(recipe.shape[0], -1)


def _row_order(recipe: Recipe, records: list[Record]) -> np.ndarray | None:
    """The order in which the transform moves whole rows of its sources, int [O], counted through all of them; None if it does not.

    The transform is tried on tensors of as many rows but two columns.
    """
    if recipe.transform is None:
        return np.arange(recipe.shape[0])
    if any(len(record.shape) < 2 or record.shape[-1] != recipe.shape[1] for record in records):
        return None
    sizes = [2 * prod(record.shape[:-1]) for record in records]
    trial = [np.arange(end - size, end).reshape(*record.shape[:-1], 2) for record, size, end in zip(records, sizes, np.cumsum(sizes))]
    try:
        moved = recipe.transform(trial)
    except (ValueError, IndexError):
        return None  # `_transformed` reports it, with the shapes of the tensors themselves
    whole = moved.shape == (recipe.shape[0], 2) and bool((moved[:, 0] % 2 == 0).all() and (moved[:, 0] + 1 == moved[:, 1]).all())
    return moved[:, 0] // 2 if whole else None


def _transformed(recipe: Recipe, records: list[Record], wanted: BlockFormat) -> np.ndarray:
    formats = {record.format for record in records}
    as_stored = len(formats) == 1 and formats <= NUMPY_DTYPES.keys() and _are_stored(records)
    arrays = [_stored(r) if as_stored else unpacked(r, wanted) for r in records]
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


def _are_stored(records: list[Record]) -> bool:
    """Whether the file has the bytes of all records."""
    return not any(isinstance(record, BuiltRecord) for record in records)


def _stored(record: Record) -> np.ndarray:
    return record.data.view(NUMPY_DTYPES[record.format]).reshape(record.shape)


def _usable_as_it_is(array: np.ndarray, wanted: BlockFormat, device: str) -> bool:
    if array.dtype != NUMPY_DTYPES[wanted.name] or not array.flags.c_contiguous:
        return False
    if not is_cpu(device):
        return True  # it is copied in a moment
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    spare = 0 if is_mapped(array) else whole.nbytes - array.nbytes  # a slice would keep all that it was cut from
    return array.ctypes.data % (_VECTOR * wanted.nbytes) == 0 and spare == 0
