"""Records of the CUDA kernels: constants, grid, threads and shared memory for a shape on a GPU of so many multiprocessors.

No tensors here. Every formula is said and reasoned at the top of the kernel's file; what is chosen here is only how work is cut, which no
bit of a result depends on.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.shapes import Attention, Heads, up
from tinyvllm.quant.layouts import panel_bytes

BASE = "sm_80"  # the row that all kernels have
PIECE = 512  # columns of a product that are summed before they meet others
FEW = 8  # rows up to which a product streams its weights past all of them at once: columns of one mma
_QUANTISED = ("Q8_0", "Q4_0")


@dataclass(frozen=True)
class GPU:
    """What a launch is cut for: multiprocessors, and bytes of shared memory that a block of threads may have, and that one of them has."""

    multiprocessors: int
    shared: int
    shared_of_one: int


# --- products of up to FEW rows: kernels/cuda/include/stream.cuh


def _columns_bytes(format: str, steps: int, T: int) -> int:
    return steps * (T * 32 + up(T, 2) * 16 if format in _QUANTISED else T * 64)


def _sums_bytes(I: int, T: int, tiles: int) -> int:
    return 4 * up(I, PIECE) * tiles * T * 20


def _normed_bytes(format: str, T: int, E: int, tiles: int) -> int:
    """x of a whole block of threads with what norms it, and the sums of all pieces."""
    staged = 4 * T * E if T * E <= 8192 else 0
    return _columns_bytes(format, E // 32, T) + 4 * E + staged + _sums_bytes(E, T, tiles) + 36 * T


def _evenly(pieces: int, most: int) -> int:
    """Warps for so many pieces, so that each has as many as the others."""
    return up(pieces, up(pieces, most))


def matvec(
    row: str, format: str, T: int, O: int, I: int, gpu: GPU, bias: bool = False, residual: bool = False, gelu: bool = False
) -> Kernel:
    pieces, tiles = up(I, PIECE), up(O, 16)
    each = 2 if T > 2 and tiles >= 1.5 * gpu.multiprocessors and I <= 16384 else 1
    grid = up(tiles, each)
    warps = _evenly(pieces, min(pieces, max(4, 16 // up(grid, gpu.multiprocessors))))
    room = min(16, I // 32)
    own = _columns_bytes(format, room, T) + (128 * T * room if T <= 2 else 0)
    shared = warps * own + _sums_bytes(I, T, each)
    return Kernel.cuda(
        "matvec", row, 1, 3 + bias + residual, (grid, 1, 1), 32 * warps, shared,
        2 * T * O * I, panel_bytes(format, O, I) + 4 * T * (O + I),
        O=O, I=I, TOKENS=T, WEIGHT=format, BIAS=int(bias), RESIDUAL=int(residual), ACTIVATION=int(gelu), TILES=each, TILE_WARPS=1,
        PIECE_WARPS=warps,
    )  # fmt: skip


def norm_gate_up_silu(row: str, format: str, T: int, E: int, F: int, gpu: GPU, eps: str, bias: bool = False) -> Kernel:
    warps = _evenly(up(E, PIECE), 8)
    tiles = 4 if warps <= 4 and T > 2 else 2
    block = 32 * warps * tiles
    return Kernel.cuda(
        "norm_gate_up_silu", row, 1, 4 + bias, (min(up(F // 16, tiles // 2), gpu.multiprocessors * max(1, 512 // block)), 1, 1), block,
        _normed_bytes(format, T, E, tiles), 4 * T * F * E, panel_bytes(format, 2 * F, E) + 4 * T * (E + F),
        E=E, F=F, TOKENS=T, WEIGHT=format, BIAS=int(bias), EPS=eps, TILES=tiles, TILE_WARPS=tiles, PIECE_WARPS=warps,
    )  # fmt: skip


def norm_qkv_rope_store(row: str, format: str, T: int, E: int, heads: Heads, gpu: GPU, eps: str) -> Kernel:
    D, outputs, pieces = heads.D, heads.outputs, up(E, PIECE)
    paired = not heads.whole and D % 32 == 0
    tiles = 2 if paired else D // 16
    grid = outputs // 16 // tiles
    tile_warps = min(tiles, max(1, 16 // min(pieces, 16)))
    warps = _evenly(pieces, max(1, min(pieces, 16 // min(up(grid, gpu.multiprocessors), 4) // tile_warps)))
    shared = _normed_bytes(format, T, E, tiles) + (0 if paired else 4 * T * D)
    return Kernel.cuda(
        "norm_qkv_rope_store", row, 3, 5 + heads.optional(1), (grid, 1, 1), 32 * warps * tile_warps, shared,
        2 * T * E * outputs, panel_bytes(format, outputs, E) + 4 * T * (E + heads.H * D),
        E=E, TOKENS=T, WEIGHT=format, EPS=eps, TILES=tiles, TILE_WARPS=tile_warps, PIECE_WARPS=warps, **heads.defines,
    )  # fmt: skip


def norm_head(row: str, format: str, N: int, V: int, E: int, gpu: GPU, eps: str) -> Kernel:
    warps = _evenly(up(E, PIECE), 8)
    tiles = min(4, 16 // warps)
    block = 32 * warps * tiles
    grid = min(up(V, 16 * tiles), gpu.multiprocessors * max(1, 512 // block))
    return Kernel.cuda(
        "norm_head", row, 3, 5, (grid, 1, 1), block, _normed_bytes(format, N, E, tiles),
        2 * N * V * E, panel_bytes(format, V, E) + 4 * N * (V + E),
        E=E, V=V, TOKENS=N, WEIGHT=format, EPS=eps, TILES=tiles, TILE_WARPS=tiles, PIECE_WARPS=warps,
    )  # fmt: skip


# --- products of more rows


def prepared_bytes(format: str, T: int, I: int) -> int:
    """Of T rows, T a multiple of 8, as quantize_input.cu lays them out."""
    return T * (I + I // 32 * 8 if format in _QUANTISED else 2 * I)


def quantize_input(row: str, format: str, T: int, I: int, eps: str | None = None, gather: bool = False, cores: bool = False) -> Kernel:
    """`eps` of the norm, None for none; `cores` for the layout that matmul_hopper reads."""
    return Kernel.cuda(
        "quantize_input", row, 1, 2 + (eps is not None) + gather, (T, 1, 1), 256, 0, 3 * T * I, 4 * T * I + prepared_bytes(format, T, I),
        T=T, I=I, WEIGHT=format, NORM=int(eps is not None), EPS=eps or "0.0f", GATHER=int(gather), CORES=int(cores),
    )  # fmt: skip


def rope_store(row: str, T: int, heads: Heads) -> Kernel:
    outputs = heads.outputs
    return Kernel.cuda(
        "rope_store", row, 3, 3 + heads.optional(1), (T, up(heads.H + 2 * heads.K, 8), 1), 256, 0, 8 * T * outputs, 8 * T * outputs,
        T=T, **heads.defines,
    )  # fmt: skip


def argmax(row: str, rows: int, V: int, gpu: GPU) -> Kernel:
    parts = max(1, min(up(gpu.multiprocessors, rows), up(V, 4096)))
    return Kernel.cuda("argmax", row, 3, 2, (parts, rows, 1), 256, 0, rows * V, 4 * rows * V, V=V, PARTS=parts)


# --- matmul.cu: which cut. The figures are an H200's, by its data sheet; only their ratios matter.


@dataclass(frozen=True)
class Cut:
    """A block of threads of matmul.cu: its tile, its warps, and how many such blocks a multiprocessor shall hold."""

    tile_o: int
    tile_t: int
    warps_o: int
    warps_t: int
    warps_k: int
    resident: int

    @property
    def threads(self) -> int:
        return 32 * self.warps_o * self.warps_t * self.warps_k


CUTS = (
    *(Cut(16, t, 1, 1, 4, 3) for t in (16, 24, 32)),
    *(Cut(32, t, 1, 1, 4, 2) for t in (16, 24, 32)),
    *(Cut(64, t, 2, 1, 2, 2) for t in (16, 24, 32)),
    *(Cut(128, t, 4, 1, 1, 2) for t in (16, 24, 32)),
    *(Cut(64, t, 2, 2, 2, 1) for t in (48, 64)),
    *(Cut(128, t, 4, 2, 1, 1) for t in (48, 64)),
    *(Cut(256, t, 4, 2, 1, 1) for t in (48, 64)),
    Cut(64, 128, 2, 4, 1, 1),
    Cut(128, 128, 2, 4, 1, 1),
    Cut(128, 192, 2, 4, 1, 1),  # has no registers left for scales or for handing over
)
K_BLOCKS, MOST_STAGES, BAND = 2, 6, 8
_MULTIPLY, _CACHE, _SHARED, _MEMORY = 1200, 34, 128, 19  # a cycle of a multiprocessor: multiply-adds; bytes of each kind of memory
_ISSUED, _BARRIER = 3.6, 50  # instructions of a warp a cycle; cycles that a stage's barrier costs
_LATENCY = 2500  # cycles until blocks of threads have handed over their sums


def _steps(format: str) -> tuple[int, int]:
    """Bytes of 32 columns: of sixteen rows of weight, and of eight rows of x."""
    return {"Q8_0": (544, 320), "Q4_0": (288, 320)}.get(format, (1024, 512))


def _stage(cut: Cut, format: str) -> int:
    w, x = _steps(format)
    return cut.warps_k * K_BLOCKS * (cut.tile_o // 16 * w + cut.tile_t // 8 * x)


def _merge(cut: Cut) -> int:
    return (cut.warps_k - 1) * cut.tile_o * cut.tile_t * 4


def _stages(cut: Cut, format: str, gpu: GPU) -> int:
    room = min(gpu.shared, gpu.shared_of_one // cut.resident - 1024) - _merge(cut)
    return min(MOST_STAGES, room // _stage(cut, format))


def _cycles(cut: Cut, split: int, rows: int, T: int, I: int, format: str, gpu: GPU) -> float:
    """What a product with `rows` rows of weight costs about: the busiest multiprocessor's part, or reading the weights."""
    w, x = _steps(format)
    pieces, blocks = up(I, PIECE), up(rows, cut.tile_o) * up(T, cut.tile_t)
    share = up(pieces, split) / pieces * I / 32
    read = (cut.tile_o // 16 * w + cut.tile_t // 8 * x) * share
    fragments = (cut.tile_o // 16 * w * cut.warps_t + cut.tile_t // 8 * x * cut.warps_o) * share
    tiles = cut.tile_o // 16 * (cut.tile_t // 8)
    issued = (12 * tiles + 10 * cut.tile_o // 16 * cut.warps_t) * share / _ISSUED if format in _QUANTISED else 0  # scales, nibbles
    one = max(tiles * 4096 * share / _MULTIPLY, issued, (read + fragments) / _SHARED, read / _CACHE) + _BARRIER * share / K_BLOCKS
    handed = 2 * (pieces - up(pieces, split)) * blocks * cut.tile_o * cut.tile_t * 4 / gpu.multiprocessors / _CACHE
    memory = rows * I / 512 * w / gpu.multiprocessors / _MEMORY
    return max(up(blocks * split, gpu.multiprocessors) * one, memory) + handed + (_LATENCY if split > 1 else 0)


@functools.cache
def _choice(rows: int, T: int, I: int, format: str, silu: bool, gpu: GPU) -> tuple[Cut, int]:
    """The cut of a product, and among how many blocks of threads its columns are shared out."""
    pieces = up(I, PIECE)
    splits = [n for n in range(1, min(pieces, 16) + 1) if (n - 1) * up(pieces, n) < pieces]
    fit = [c for c in CUTS if _stages(c, format, gpu) >= 2 and not (silu and c.tile_o // c.warps_o % 32)]  # a warp has gate and up
    known = [(c, n) for c in fit for n in splits if c.tile_t < 192 or (n == 1 and format not in _QUANTISED)]
    return min(known, key=lambda known: _cycles(known[0], known[1], rows, T, I, format, gpu))


def matmul(
    row: str, format: str, T: int, O: int, I: int, gpu: GPU, bias: bool = False, residual: bool = False, gelu: bool = False,
    silu: bool = False, chosen: tuple[Cut, int] | None = None,
) -> tuple[Kernel, int, int]:  # fmt: skip
    """The kernel, how many float32 its blocks of threads hand over, and how many counters (zeros) they do it with; both 0 for none.

    T % 8 == 0. O counts the outputs; with `silu` the weight has twice as many rows. `chosen`: another cut and split than the best known.
    """
    rows = O * (1 + silu)
    cut, split = chosen or _choice(rows, T, I, format, silu, gpu)
    blocks, pieces = up(rows, cut.tile_o) * up(T, cut.tile_t), up(I, PIECE)
    stages = _stages(cut, format, gpu)
    kernel = Kernel.cuda(
        "matmul", row, 1 + 2 * (split > 1), 3 + bias + residual, (blocks, split, 1), cut.threads,
        stages * _stage(cut, format) + _merge(cut),
        2 * T * rows * I, panel_bytes(format, rows, I) + prepared_bytes(format, T, I) + 4 * T * O * (1 + residual),
        O=O, I=I, T=T, WEIGHT=format, BIAS=int(bias), RESIDUAL=int(residual), ACTIVATION=int(gelu), SILU=int(silu), SPLIT=split,
        TILE_O=cut.tile_o, TILE_T=cut.tile_t, WARPS_O=cut.warps_o, WARPS_T=cut.warps_t, WARPS_K=cut.warps_k, K_BLOCKS=K_BLOCKS,
        STAGES=stages, BAND=BAND, RESIDENT=cut.resident,
    )  # fmt: skip
    if split == 1:
        return kernel, 0, 0
    return kernel, (pieces - up(pieces, split) + 1) * blocks * cut.tile_o * cut.tile_t, blocks


HOPPER = "sm_90a"
HOPPER_ROWS = 256  # of x, from which on its tiles are filled


def matmul_hopper(
    row: str, format: str, T: int, O: int, I: int, gpu: GPU, bias: bool = False, residual: bool = False, gelu: bool = False,
    silu: bool = False,
) -> Kernel:  # fmt: skip
    """16-bit weights and many rows: a tile is 128 rows of weight by 128 or 192 tokens. x is prepared with `cores`."""
    rows = O * (1 + silu)

    def waves(tile: int) -> int:
        return up(up(rows, 128) * up(T, tile), gpu.multiprocessors) * (tile + 16)  # 16: what a tile costs beside its tokens

    tile = min((192, 128), key=waves)
    ups = 256 * tile if silu else 0
    stage = K_BLOCKS * (8192 + 64 * tile)
    stages = min(MOST_STAGES, (gpu.shared - 1024 - ups) // stage)
    return Kernel.cuda(
        "matmul_hopper", row, 1, 3 + bias + residual, (up(rows, 128) * up(T, tile), 1, 1), 384, stages * stage + ups,
        2 * T * rows * I, panel_bytes(format, rows, I) + prepared_bytes(format, T, I) + 4 * T * O * (1 + residual),
        O=O, I=I, T=T, WEIGHT=format, BIAS=int(bias), RESIDUAL=int(residual), ACTIVATION=int(gelu), SILU=int(silu), TILE_T=tile,
        K_BLOCKS=K_BLOCKS, STAGES=stages, BAND=BAND,
    )  # fmt: skip


# --- attention


STRETCH = 4096  # keys whose chunks are merged before they meet others
CHUNK = 256
FOLLOWING = 256 << 20  # bytes at most of what sequences that others read for leave behind, a layer at a time


def attention_decode(row: str, B: int, a: Attention, gpu: GPU, cascade: bool = False) -> tuple[Kernel, int, int]:
    """The kernel, and numbers of its scratch: float32, and counters. With `cascade` it takes `alike`, unless nothing could come of it."""
    group, tokens = a.H // a.K, a.M * a.S
    parts = up(group, 16)
    heads, rows = a.K * parts, up(group, parts)
    chunks, stretches = up(tokens, CHUNK), up(tokens, STRETCH)
    shared_chunks = _shared_chunks(B, a, heads, rows) if cascade else 0
    ring = min(8, max(2, 512 // a.D))
    shared = ring * 32 * (2 * a.D + 16) + (0 if a.D <= 128 else 32 * a.D - 2048)
    resident = min(32, gpu.shared_of_one // (shared + 1024))
    grid = min(gpu.multiprocessors * max(1, resident), B * heads * chunks)
    kept = B * heads * (stretches + min(shared_chunks, chunks)) if shared_chunks else 0
    partial = (grid * 2 * (STRETCH // CHUNK + stretches) + kept) * rows * (a.D + 2)
    more = {"CASCADE": shared_chunks} if shared_chunks else {}
    kernel = Kernel.cuda("attention_decode", row, 3, 5 + len(more), (grid, 1, 1), 32, shared, B=B, **more, **a.defines)  # type: ignore[arg-type]
    return kernel, partial, grid * 2 + (B * heads if shared_chunks else 0)


def _shared_chunks(B: int, a: Attention, heads: int, rows: int) -> int:
    """Of a sequence, chunks that others may read for it: whole stretches, as many as FOLLOWING has room for."""
    if B == 1 or a.D > 192 or (a.D > 64 and rows > 8):  # nobody to share with, or no registers for a second sequence's rows
        return 0
    whole, stretches = STRETCH // CHUNK, up(a.M * a.S, STRETCH)
    room = FOLLOWING // (4 * B * heads * rows * (a.D + 2)) - stretches
    return max(0, min(room // whole, stretches)) * whole


def attention_prefill(row: str, T: int, chunks: int, a: Attention, gpu: GPU) -> Kernel:
    """T rows of `chunks` sequences."""
    warps = 8 if a.D <= 128 else 4
    span, stages = warps * 16 * a.K // a.H, 2 if prefill_shared(a.D, 2) <= gpu.shared else 1
    grid, shared = (up(T, span) + chunks, a.K, 1), prefill_shared(a.D, stages)
    return Kernel.cuda("attention_prefill", row, 1, 6, grid, 32 * warps, shared, STAGES=stages, **a.defines)  # type: ignore[arg-type]


def prefill_shared(D: int, stages: int) -> int:
    """Bytes of shared memory: keys and values of the stages, and of wide heads what has no room in registers."""
    return stages * 2 * (128 if D <= 128 else 64) * (2 * D + 16) + (0 if D <= 128 else 384 * D - 8192)


# --- tokens


def advance(row: str, B: int, M: int, S: int, rounds: int, scratch_slot: int) -> Kernel:
    return Kernel.cuda("advance", row, 6, 3, (1, 1, 1), min(1024, 32 * up(B, 32)), B=B, M=M, S=S, ROUNDS=rounds, SCRATCH_SLOT=scratch_slot)


def embed(row: str, format: str, T: int, V: int, E: int, tiles: bool) -> Kernel:
    work = T * (4 * E + panel_bytes(format, 1, E) // 16)
    return Kernel.cuda("embed", row, 1, 3, (T, 1, 1), min(256, 32 * up(E // 4, 32)), bytes=work, V=V, E=E, WEIGHT=format, TILES=int(tiles))


def kv_append(row: str, T: int, K: int, S: int, D: int, cache: str) -> Kernel:
    work = 2 * T * K * D * (8 if cache == "F32" else 6)
    return Kernel.cuda("kv_append", row, 2, 4, (T, 1, 1), min(256, 32 * up(K * D // 4, 32)), bytes=work, K=K, S=S, D=D, CACHE_TYPE=cache)


def kv_copy(row: str, pairs: int, block_bytes: int) -> Kernel:
    grid = up(block_bytes, 16384), pairs, 1
    return Kernel.cuda("kv_copy", row, 1, 2, grid, 256, bytes=2 * pairs * block_bytes, BLOCK_BYTES=block_bytes)


def accept_drafts(row: str, B: int, drafts: int) -> Kernel:
    return Kernel.cuda("accept_drafts", row, 2, 4, (up(B, 4), 1, 1), 128, bytes=8 * B * drafts, DRAFTS=drafts)


SAMPLE_THREADS, SAMPLE_CAPACITY = 1024, 4095


def sample(row: str, B: int, V: int, neutral_row: int, features: dict[str, bool], gpu: GPU) -> tuple[list[Kernel], int]:
    """The launches, one or two, and bytes of scratch, all zero before the first of all."""
    filtered = features["TOP_K"] or features["TOP_P"] or features["MIN_P"]
    most, parts = max(1, min(32, gpu.multiprocessors // B, V // 4096)), 1
    while 2 * parts <= most:
        parts *= 2
    stages = ["LOOK", "DRAW"] if filtered and parts > 1 else ["WHOLE"]
    scratch = 0 if parts == 1 else B * (32 + (4 * SAMPLE_THREADS + 8 * (SAMPLE_CAPACITY + 1) if filtered else 0))
    outs, ins = 3 + features["PENALIZED"], 2 + features["PENALIZED"] + features["BIASED"]
    defines = {name: int(on) for name, on in features.items()}
    kernels = [
        Kernel.cuda(
            "sample", row, outs, ins, (parts, B, 1), SAMPLE_THREADS, bytes=4 * B * V * (1 + sum(defines.values())),
            V=V, NEUTRAL_ROW=neutral_row, PARTS=parts, STAGE=stage, **defines,
        )
        for stage in stages
    ]  # fmt: skip
    return kernels, scratch


def read(row: str, words: int, blocks: int) -> Kernel:
    return Kernel.cuda("read", row, 1, 1, (blocks, 1, 1), 512, bytes=16 * words, WORDS=words, BLOCKS=blocks)


def copy(row: str, words: int, blocks: int) -> Kernel:
    return Kernel.cuda("copy", row, 1, 1, (blocks, 1, 1), 512, bytes=32 * words, WORDS=words, BLOCKS=blocks)
