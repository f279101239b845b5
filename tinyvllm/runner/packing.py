"""Packs rows of files into the layout that a device's kernels read: by compiled kernels where there is a C compiler, else by numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tinyvllm.backends.cpu.toolchain import has_compiler
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.launch import run_now
from tinyvllm.backends.registry import usable_variants
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import FLOATS, Layout
from tinyvllm.quant.layouts import PANEL, convert_rows, put_tiles, quantize_rows, unpack_rows
from tinyvllm.weights.mapping import drop_pages


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

    def converted(self, format: str) -> Rows:
        """Rounded to another float format, or quantized."""
        if self.format == format:
            return self
        if format in FLOATS:
            floats = self.floats()
            return Rows(format, convert_rows(floats.format, format, floats.data))
        return Rows(format, quantize_rows(format, unpack_rows(self.format, self.data)))


def common_format(parts: Sequence[Rows], otherwise: str) -> str:
    """The format of all parts, or `otherwise` where they differ."""
    formats = {part.format for part in parts}
    return formats.pop() if len(formats) == 1 else otherwise


def pack_matrix(layout: Layout, format: str, I: int, parts: Sequence[Rows], out: np.ndarray) -> None:
    """Write the parts [O_i, I], one after the other, as one matrix in panels or tiles, uint8 `out`; their mapped pages are dropped."""
    if layout is Layout.TILES:
        parts = [part.converted(format) for part in parts]
    else:  # the kernel converts floats on the way
        parts = [part if part.format == format else part.floats() for part in parts]
    if any(len(part.data) % PANEL for part in parts[:-1]):  # a panel with rows of two parts: make them one
        parts = [Rows(format, np.concatenate([part.converted(format).data for part in parts]))]
    total, first = sum(-(-len(part.data) // PANEL) for part in parts), 0
    for part in parts:
        end = first + -(-len(part.data) // PANEL)
        if layout is Layout.TILES:
            _pack_tiles(part, I, out, first, end, total)
        else:
            _pack_panels(part, format, I, out, first, end)
        drop_pages(part.data)
        first = end


def _pack_panels(part: Rows, format: str, I: int, out: np.ndarray, first: int, end: int) -> None:
    kernel = Kernel.cpu("pack", _variant(), 1, 2, SOURCE=part.format, FORMAT=format, I=I)
    run_now(kernel, out, np.ascontiguousarray(part.data), np.array([first, end, len(part.data)], np.int32))


def _pack_tiles(part: Rows, I: int, out: np.ndarray, first: int, end: int, total: int) -> None:
    if not has_compiler():  # a GPU machine need not have a C compiler; numpy takes several times as long
        put_tiles(part.format, I, out, part.data, first, total)
        return
    kernel = Kernel.cpu("pack_tiles", _variant(), 1, 2, FORMAT=part.format, I=I)
    run_now(kernel, out, np.ascontiguousarray(part.data), np.array([first, end, len(part.data), total], np.int32))


def _variant() -> str:
    """The best CPU variant of this processor, also where another device runs the products."""
    return usable_variants(Placement("CPU"))[0]
