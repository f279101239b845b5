"""Packs rows of files into the layout that a device's kernels read: panels on the host, tiles on the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.launch import run_alone, run_now
from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.registry import select, usable_variants
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.placement import Placement
from tinyvllm.quant.codecs import NUMPY_DTYPES
from tinyvllm.quant.formats import FLOATS
from tinyvllm.quant.layouts import PANEL, RowSource, TileWeight, convert_rows, joined, pack_tiles, unpack_rows
from tinyvllm.quant.slices import ColumnShare, HeadShare, RowShare
from tinyvllm.runner.quantize import quantized
from tinyvllm.weights.convert import check_fits_float16
from tinyvllm.weights.mapping import drop_pages
from tinyvllm.weights.memory import place_bytes

LITTLE = 2 << 20  # bytes that one thread packs in a millisecond: meeting the others takes longer, most of all on a busy machine


@dataclass(frozen=True, eq=False)
class Rows:
    """A matrix in rows as files store them: `data` uint8 [O, bytes of a row] in `format`."""

    format: str
    data: np.ndarray

    def floats(self) -> Rows:
        """The same numbers as floats: themselves, or unpacked to F32."""
        if self.format in FLOATS:
            return self
        return Rows("F32", np.ascontiguousarray(unpack_rows(self.format, self.data)).view(np.uint8))

    def converted(self, format: str, importance: np.ndarray | None = None) -> Rows:
        """Rounded to another float format, or quantized, with an importance for each column, float32 [I], for those of each of N matrices
        of as many rows, [N, I], or none.
        """
        if self.format == format:
            return self
        if importance is not None and importance.ndim == 2:
            parts = np.split(self.data, len(importance))
            return Rows(
                format, np.concatenate([Rows(self.format, part).converted(format, own).data for part, own in zip(parts, importance)])
            )
        if format in FLOATS:
            floats = self.floats()
            return Rows(format, convert_rows(floats.format, format, floats.data))
        return Rows(format, quantized(self.format, self.data, format, importance))


def pack_panels(format: str, I: int, parts: Sequence[Rows], out: np.ndarray) -> None:
    """Write the parts [O_i, I], one after the other, as one matrix in panels, uint8 `out`; their mapped pages are dropped."""
    parts = [part if part.format == format else part.floats() for part in parts]  # the kernel converts floats on the way
    if any(len(part.data) % PANEL for part in parts[:-1]):  # a panel with rows of two parts: make them one
        parts = [Rows(format, np.concatenate([part.converted(format).data for part in parts]))]
    first, variant = 0, usable_variants(Placement("CPU"))[0]  # also for a device without kernels of its own
    for part in parts:
        end = first + -(-len(part.data) // PANEL)
        kernel = Kernel.cpu("pack", variant, 1, 2, SOURCE=part.format, FORMAT=format)
        run = run_alone if part.data.nbytes <= LITTLE else run_now
        run(kernel, out, np.ascontiguousarray(part.data), np.array([first, end, len(part.data), I], np.int32))
        drop_pages(part.data)
        first = end


def place_tiles(
    placement: Placement, parts: Sequence[RowSource], I: int, format: str, share: ColumnShare | HeadShare | RowShare | None = None
) -> TileWeight:
    """The parts [O_i, I], one after the other, as one matrix in tiles of `format` on a GPU; their mapped pages are dropped.

    The GPU packs, and converts parts of one other float format, if it has a kernel for that; else the definition packs, on the host.
    FloatingPointError if the GPU converts and a finite number is beyond `format`.
    """
    if any(part.format != parts[0].format for part in parts) or not is_convertible(parts[0].format, format):
        parts = [in_format(part, format) for part in parts]
    rows = joined(parts)
    kernel = select("pack_tiles", placement, f"{format} {rows.O}x{I}", ShapeFacts(placement, inputs=I, outputs=rows.O, format=format))
    if kernel is None:
        tensor = place_bytes(pack_tiles(format, in_format(rows, format).gathered()), placement.device)
    else:
        tensor = kernel.backend.pack_tiles(kernel.variant, placement, rows, format, I)
    for block in (block for part in parts for block in part.blocks):
        drop_pages(block)
    return TileWeight(tensor, format, rows.O, I, share)


def is_convertible(source: str, format: str) -> bool:
    """Whether rows become another format by rounding their numbers one by one."""
    return source == format or (source in FLOATS and format in FLOATS)


def in_format(rows: RowSource, format: str) -> RowSource:
    """The same rows, converted or quantized on the host if they are in another format. FloatingPointError for numbers beyond float16."""
    if rows.format == format:
        return rows
    data = rows.gathered()
    if format == "F16" and rows.format in FLOATS:
        check_fits_float16(data.view(NUMPY_DTYPES[rows.format]))
    return RowSource.of(format, Rows(rows.format, data).converted(format).data)
