"""Weight matrices in memory: rows as in files, panels for CPU vectors, tiles for GPU matrix instructions.

Each layout is defined by numpy functions and read back by a class in plain tinygrad, which is the reference of the kernels. The bytes of a
block are placed field by field as the format's row of quant/formats.py describes them; no layout knows a format by name.
"""

from tinyvllm.quant.layouts.panels import MixedWeight, PackedWeight, pack_panels, packable, panel_bytes, unpack_panels
from tinyvllm.quant.layouts.rows import BLOCK, PANEL, RowWeight, StoredWeight, convert_rows, quantize_rows, row_bytes, unpack_rows
from tinyvllm.quant.layouts.sources import RowPiece, RowSource, joined
from tinyvllm.quant.layouts.tiles import TileUnit, TileWeight, pack_tile_regions, pack_tiles, source_unit, tile_unit, unpack_tiles

__all__ = [
    "BLOCK",
    "PANEL",
    "MixedWeight",
    "PackedWeight",
    "RowPiece",
    "RowSource",
    "RowWeight",
    "StoredWeight",
    "TileUnit",
    "TileWeight",
    "convert_rows",
    "joined",
    "pack_panels",
    "pack_tile_regions",
    "pack_tiles",
    "packable",
    "panel_bytes",
    "quantize_rows",
    "row_bytes",
    "source_unit",
    "tile_unit",
    "unpack_panels",
    "unpack_rows",
    "unpack_tiles",
]
