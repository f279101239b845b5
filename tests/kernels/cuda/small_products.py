"""The CUDA kernels that multiply up to eight rows, as records: how each is cut for a GPU of so many multiprocessors, and its constants."""

from __future__ import annotations

from tests.kernels.cuda.tiles import FLOATS
from tinyvllm.ops.kernel import Kernel

PITCH = 20  # of stream.cuh


def pieces_of(I: int) -> int:
    return -(-I // 512)


def columns_bytes(format: str, T: int, steps: int) -> int:
    """COLUMNS_BYTES of stream.cuh."""
    return steps * T * 64 if format in FLOATS else steps * (T * 32 + -(-T // 2) * 16)


def _even(pieces: int, most: int) -> int:
    """At most so many warps for the pieces, none of which gets more than it must."""
    return -(-pieces // -(-pieces // most))


def _sums_bytes(pieces: int, tiles: int, T: int) -> int:
    return 4 * pieces * tiles * T * PITCH


def _normed_bytes(format: str, T: int, E: int, tiles: int) -> int:
    staged = 4 * T * E if T * E <= 8192 else 0
    return columns_bytes(format, T, E // 32) + 4 * E + staged + _sums_bytes(pieces_of(E), tiles, T) + 36 * T


def _cut(tiles: int, tile_warps: int, piece_warps: int) -> dict[str, int]:
    return {"TILES": tiles, "TILE_WARPS": tile_warps, "PIECE_WARPS": piece_warps}


def matvec(
    T: int, O: int, I: int, format: str, bias: int = 0, residual: int = 0, activation: int = 0, processors: int = 132, row: str = "sm_90"
) -> Kernel:
    pieces, tiles = pieces_of(I), -(-O // 16)
    wide = 2 if T > 2 and tiles >= 1.5 * processors and I <= 16384 else 1
    grid = -(-tiles // wide)
    piece_warps = _even(pieces, min(pieces, max(4, 16 // -(-grid // processors))))
    room = min(16, I // 32)
    own = columns_bytes(format, T, room) + (128 * T * room if T <= 2 else 0)
    shared = piece_warps * own + _sums_bytes(pieces, wide, T)
    return Kernel.cuda(
        "matvec", row, 1, 3 + bias + residual, (grid, 1, 1), 32 * piece_warps, shared,
        O=O, I=I, TOKENS=T, WEIGHT=format, BIAS=bias, RESIDUAL=residual, ACTIVATION=activation, **_cut(wide, 1, piece_warps),
    )  # fmt: skip


def norm_gate_up_silu(T: int, E: int, F: int, format: str, bias: int = 0, processors: int = 132, row: str = "sm_90") -> Kernel:
    piece_warps = _even(pieces_of(E), 8)
    tiles = 4 if piece_warps <= 4 and T > 2 else 2
    block = 32 * piece_warps * tiles
    grid = min(-(-F // 16 // (tiles // 2)), processors * max(1, 512 // block))
    return Kernel.cuda(
        "norm_gate_up_silu", row, 1, 4 + bias, (grid, 1, 1), block, _normed_bytes(format, T, E, tiles),
        E=E, F=F, TOKENS=T, WEIGHT=format, BIAS=bias, EPS="1e-5f", **_cut(tiles, tiles, piece_warps),
    )  # fmt: skip


def norm_qkv_rope_store(
    T: int, E: int, H: int, K: int, D: int, R: int, S: int, format: str, cache: str = "BF16", bias: int = 0, qk_norm: int = 0,
    processors: int = 132, row: str = "sm_90",
) -> Kernel:  # fmt: skip
    pieces = pieces_of(E)
    paired = not qk_norm and D % 32 == 0 and R in (0, D)
    tiles = 2 if paired else D // 16
    grid = (H + 2 * K) * D // 16 // tiles
    tile_warps = min(tiles, max(1, 16 // min(pieces, 16)))
    residents = min(-(-grid // processors), 4)
    piece_warps = _even(pieces, max(1, min(pieces, 16 // residents // tile_warps)))
    shared = _normed_bytes(format, T, E, tiles) + (0 if paired else 4 * T * D)
    return Kernel.cuda(
        "norm_qkv_rope_store", row, 3, 5 + bias + 2 * qk_norm + (R > 0), (grid, 1, 1), 32 * tile_warps * piece_warps, shared,
        H=H, K=K, D=D, R=R, S=S, E=E, TOKENS=T, WEIGHT=format, CACHE_TYPE=cache, BIAS=bias, QK_NORM=qk_norm, EPS="1e-5f",
        QK_EPS="1e-6f", **_cut(tiles, tile_warps, piece_warps),
    )  # fmt: skip


def norm_head(T: int, E: int, V: int, format: str, processors: int = 132, row: str = "sm_90") -> Kernel:
    piece_warps = _even(pieces_of(E), 8)
    tiles = min(4, 16 // piece_warps)
    block = 32 * piece_warps * tiles
    grid = min(-(-V // (16 * tiles)), processors * max(1, 512 // block))
    return Kernel.cuda(
        "norm_head", row, 3, 5, (grid, 1, 1), block, _normed_bytes(format, T, E, tiles),
        E=E, V=V, TOKENS=T, WEIGHT=format, EPS="1e-5f", **_cut(tiles, tiles, piece_warps),
    )  # fmt: skip
