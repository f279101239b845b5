"""Launch plans of the CUDA kernels: constants, grid, threads and shared memory for a shape on a GPU.

No tensors here. Each kernel's file states and explains its formula; a plan only decides how work is divided, on which no bit of a result
depends.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.policies import ranks, row_bias
from tinyvllm.backends.shapes import Heads, Product, cached_bytes
from tinyvllm.batch import NO_SLOT
from tinyvllm.integers import ceil_div, round_up
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.placement import RankGroup
from tinyvllm.quant.formats import FORMATS, Activations, Layout, activations_of
from tinyvllm.quant.layouts import PANEL, panel_bytes, row_bytes, source_unit, tile_unit

BASE = "sm_80"  # the variant that all kernels have
PIECE = 512  # columns of a product that are summed before they are added to others
FEW = 8  # rows up to which a product streams its weights past all of them at once: columns of one mma


@dataclass(frozen=True)
class GPU:
    """What a launch is planned for: multiprocessors, and bytes of shared memory, of a block of threads at most and of a multiprocessor."""

    multiprocessors: int
    shared: int
    shared_of_one: int


# --- ranks: kernels/cuda/include/meeting.cuh

MEETING_BLOCKS = 64  # resident at once on any GPU; the grid is the same in all ranks, whatever their GPUs


def all_reduce(variant: str, T: int, O: int, group: RankGroup, bias: bool, residual: bool, bias_pitch: int) -> Kernel:
    return Kernel.cuda(
        "all_reduce", variant, 2 + group.world_size, 3 + bias + residual, (min(MEETING_BLOCKS, ceil_div(T * O, 1024)), 1, 1), 256, 0,
        0, 4 * T * O * (group.world_size + 3),
        O=O, WORLD=group.world_size, RANK=group.rank, PLACE=group.place, BIAS=int(bias), RESIDUAL=int(residual), **row_bias(bias_pitch),
    )  # fmt: skip


def gather_logits(variant: str, N: int, V: int, columns: int, group: RankGroup) -> Kernel:
    blocks = min(MEETING_BLOCKS, ceil_div(N * V, 1024 * group.world_size))
    return Kernel.cuda(
        "gather_logits", variant, 2 + group.world_size, 3, (blocks, 1, 1), 256, 0, 0, 8 * N * V,
        V=V, COLUMNS=columns, WORLD=group.world_size, RANK=group.rank, PLACE=group.place,
    )  # fmt: skip


# --- products of up to FEW rows: kernels/cuda/include/stream.cuh


def _is_int8(format: str) -> bool:
    """Whether products with this format round x to int8."""
    return activations_of(format, Layout.TILES) is Activations.INT8


def _is_table(format: str) -> bool:
    """Whether products with this format multiply two numbers of 16 bits for one: those of a table, and x."""
    return FORMATS[format].float_values


def _x_bytes(format: str) -> int:
    """Bytes of 32 columns of a row of x, without their scale."""
    return 32 if _is_int8(format) else 128 if _is_table(format) else 64


def _scale_bytes(format: str) -> int:
    """Bytes of the scale and sum of 32 columns of a row of x."""
    return 8 if _is_int8(format) or _is_table(format) else 0


def _columns_bytes(format: str, steps: int, T: int) -> int:
    return steps * (T * _x_bytes(format) + round_up(T, 2) * _scale_bytes(format))


def _sums_bytes(I: int, T: int, tiles: int) -> int:
    return 4 * ceil_div(I, PIECE) * tiles * T * 20


def _normed_bytes(format: str, T: int, E: int, tiles: int) -> int:
    """x of a whole block of threads with its norm's weights and sums, and the sums of all pieces."""
    staged = 4 * T * E if T * E <= 8192 else 0
    return _columns_bytes(format, E // 32, T) + 4 * E + staged + _sums_bytes(E, T, tiles) + 36 * T


def _evenly(pieces: int, max_warps: int) -> int:
    """Warps for `pieces`, so that all have the same number of them."""
    return ceil_div(pieces, ceil_div(pieces, max_warps))


def matvec(variant: str, p: Product, gpu: GPU) -> Kernel:
    T, O, I = p.T, p.O, p.I
    pieces, tiles = ceil_div(I, PIECE), ceil_div(O, 16)
    each = 2 if T > 2 and tiles >= 1.5 * gpu.multiprocessors and I <= 16384 else 1
    grid = ceil_div(tiles, each)
    warps = _evenly(pieces, min(pieces, max(4, 16 // ceil_div(grid, gpu.multiprocessors))))
    steps = min(16, I // 32)
    own = _columns_bytes(p.format, steps, T) + (128 * T * steps if T <= 2 else 0)
    while warps > 1 and warps * own + _sums_bytes(I, T, each) > gpu.shared:  # NF4, eight rows of 14336 columns
        warps = _evenly(pieces, warps - 1)
    shared = warps * own + _sums_bytes(I, T, each)
    return Kernel.cuda(
        "matvec", variant, 1, 3 + p.bias + p.residual, (grid, 1, 1), 32 * warps, shared,
        2 * T * O * I, panel_bytes(p.format, O, I) + 4 * T * (O + I),
        O=O, I=I, TOKENS=T, WEIGHT=p.format, BIAS=int(p.bias), RESIDUAL=int(p.residual), ACTIVATION=int(p.gelu), TILES=each, TILE_WARPS=1,
        PIECE_WARPS=warps, **row_bias(p.bias_pitch),
    )  # fmt: skip


def norm_gate_up_silu(
    variant: str, format: str, T: int, E: int, F: int, gpu: GPU, eps: str, bias: bool = False, bias_pitch: int = 0
) -> Kernel:
    warps = _evenly(ceil_div(E, PIECE), 8)
    tiles = 4 if warps <= 4 and T > 2 else 2
    block = 32 * warps * tiles
    grid = min(ceil_div(F // 16, tiles // 2), gpu.multiprocessors * max(1, 512 // block))
    return Kernel.cuda(
        "norm_gate_up_silu", variant, 1, 4 + bias, (grid, 1, 1), block,
        _normed_bytes(format, T, E, tiles), 4 * T * F * E, panel_bytes(format, 2 * F, E) + 4 * T * (E + F),
        E=E, F=F, TOKENS=T, WEIGHT=format, BIAS=int(bias), EPS=eps, TILES=tiles, TILE_WARPS=tiles, PIECE_WARPS=warps,
        **row_bias(bias_pitch),
    )  # fmt: skip


def norm_qkv_rope_store(variant: str, format: str, T: int, E: int, heads: Heads, gpu: GPU, eps: str) -> Kernel:
    """The heads of the first matrix are computed, those of `heads.others` are taken from other products."""
    D, outputs, pieces = heads.D, heads.main * heads.D, ceil_div(E, PIECE)
    paired = not heads.whole and D % 32 == 0
    tiles = 2 if paired else D // 16
    grid = outputs // 16 // tiles
    tile_warps = min(tiles, max(1, 16 // min(pieces, 16)))
    warps = _evenly(pieces, max(1, min(pieces, 16 // min(ceil_div(grid, gpu.multiprocessors), 4) // tile_warps)))
    shared = _normed_bytes(format, T, E, tiles) + (0 if paired and not heads.others else 4 * T * D)
    return Kernel.cuda(
        "norm_qkv_rope_store", variant, 3, 5 + len(heads.others) + heads.optional(1), (grid + sum(heads.others), 1, 1),
        32 * warps * tile_warps, shared,
        2 * T * E * outputs, panel_bytes(format, outputs, E) + 4 * T * (E + heads.H * D),
        E=E, TOKENS=T, WEIGHT=format, EPS=eps, TILES=tiles, TILE_WARPS=tile_warps, PIECE_WARPS=warps, **heads.defines,
        **heads.parts,
    )  # fmt: skip


def norm_head(variant: str, format: str, N: int, V: int, E: int, gpu: GPU, eps: str, indexed: bool = True) -> Kernel:
    """Without `indexed` row n is row n of x."""
    warps = _evenly(ceil_div(E, PIECE), 8)
    tiles = min(4, 16 // warps)
    block = 32 * warps * tiles
    grid = min(ceil_div(V, 16 * tiles), gpu.multiprocessors * max(1, 512 // block))
    return Kernel.cuda(
        "norm_head", variant, 3, 4 + indexed, (grid, 1, 1), block, _normed_bytes(format, N, E, tiles),
        2 * N * V * E, panel_bytes(format, V, E) + 4 * N * (V + E),
        E=E, V=V, TOKENS=N, WEIGHT=format, EPS=eps, TILES=tiles, TILE_WARPS=tiles, PIECE_WARPS=warps,
        **({} if indexed else {"INDEXED": 0}),
    )  # fmt: skip


# --- products of more rows


def prepared_bytes(format: str, T: int, I: int) -> int:
    """Bytes of T rows, T a multiple of 8, as quantize_input.cu writes them."""
    return T * I // 32 * (_x_bytes(format) + _scale_bytes(format))


def quantize_input(variant: str, format: str, T: int, I: int, eps: str | None = None, gather: bool = False) -> Kernel:
    """`eps` is the norm's, None if there is no norm."""
    return Kernel.cuda(
        "quantize_input", variant, 1, 2 + (eps is not None) + gather, (T, 1, 1), 256, 0,
        3 * T * I, 4 * T * I + prepared_bytes(format, T, I),
        I=I, WEIGHT=format, NORM=int(eps is not None), EPS=eps or "0.0f", GATHER=int(gather),
    )  # fmt: skip


def rope_store(variant: str, T: int, heads: Heads) -> Kernel:
    outputs = heads.outputs
    return Kernel.cuda(
        "rope_store", variant, 3, 3 + len(heads.others) + heads.optional(1), (T, ceil_div(heads.H + 2 * heads.K, 8), 1), 256, 0,
        8 * T * outputs, 8 * T * outputs, **heads.defines, **heads.parts,
    )  # fmt: skip


def argmax(variant: str, rows: int, V: int, gpu: GPU) -> Kernel:
    parts = max(1, min(ceil_div(gpu.multiprocessors, rows), ceil_div(V, 4096)))
    return Kernel.cuda("argmax", variant, 3, 2, (parts, rows, 1), 256, 0, rows * V, 4 * rows * V, V=V)


# --- matmul.cu: the choice of a cut. The figures are fitted to what an H100 takes for each cut (benchmarks/results/gpu_cuts.jsonl).


@dataclass(frozen=True)
class Cut:
    """A block of threads of matmul.cu: its tile, its warps, and how many such blocks a multiprocessor should hold."""

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
    Cut(128, 192, 2, 4, 1, 1),
)
MAX_STAGES, BAND = 6, 8
_MULTIPLY, _CACHE, _SHARED, _MEMORY = 1200, 44, 128, 13  # a cycle of a multiprocessor: multiply-adds; bytes of each kind of memory
_ISSUED, _BARRIER = 1.8, 80  # instructions of a warp a cycle; cycles that a stage's barrier costs
_LATENCY = 4000  # cycles until blocks of threads have handed over their sums


def k_blocks(format: str) -> int:
    """Runs of 32 columns of a stage: at least two, and whole blocks of the format."""
    return max(2, FORMATS[format].elements // 32)


def _steps(format: str) -> tuple[int, int]:
    """Bytes of 32 columns: of sixteen rows of weight, and of eight rows of x."""
    blocks = k_blocks(format)
    return PANEL * row_bytes(format, 32 * blocks) // blocks, 8 * (_x_bytes(format) + _scale_bytes(format))


def _stage(cut: Cut, format: str) -> int:
    w, x = _steps(format)
    return cut.warps_k * k_blocks(format) * (cut.tile_o // 16 * w + cut.tile_t // 8 * x)


def _merge(cut: Cut) -> int:
    return (cut.warps_k - 1) * cut.tile_o * cut.tile_t * 4


def stages_of(cut: Cut, format: str, gpu: GPU) -> int:
    """How many stages of a cut fit into shared memory."""
    room = min(gpu.shared, gpu.shared_of_one // cut.resident) - 1024 - _merge(cut)  # the source declares up to 1 KiB
    return min(MAX_STAGES, room // _stage(cut, format))


def cycles_of(cut: Cut, split: int, rows: int, T: int, I: int, format: str, gpu: GPU) -> float:
    """About what a product with `rows` rows of weight costs: the busiest multiprocessor's part, or reading the weights."""
    w, x = _steps(format)
    pieces, blocks = ceil_div(I, PIECE), ceil_div(rows, cut.tile_o) * ceil_div(T, cut.tile_t)
    share = ceil_div(pieces, split) / pieces * I / 32
    read = (cut.tile_o // 16 * w + cut.tile_t // 8 * x) * share
    fragments = (cut.tile_o // 16 * w * cut.warps_t + cut.tile_t // 8 * x * cut.warps_o) * share
    tiles = cut.tile_o // 16 * (cut.tile_t // 8)
    issued = (12 * tiles + 10 * cut.tile_o // 16 * cut.warps_t) * share / _ISSUED if _scale_bytes(format) else 0  # scales, nibbles
    one = max(tiles * 4096 * share / _MULTIPLY, issued, (read + fragments) / _SHARED, read / _CACHE) + _BARRIER * share / k_blocks(format)
    handed = 2 * (pieces - ceil_div(pieces, split)) * blocks * cut.tile_o * cut.tile_t * 4 / gpu.multiprocessors / _CACHE
    memory = rows * I / 512 * w / gpu.multiprocessors / _MEMORY
    return max(ceil_div(blocks * split, gpu.multiprocessors) * one, memory) + handed + (_LATENCY if split > 1 else 0)


def has_registers(cut: Cut, split: int, format: str) -> bool:
    """Whether the kernel compiles without spills."""
    sums, known = cut.tile_o * cut.tile_t // cut.threads * cut.warps_k, FORMATS[format]  # sums of a thread
    if _is_table(format):
        return sums < 32 or (sums == 32 and cut.resident == 1)
    if sums > 64:
        return split == 1 and known.is_float
    needs_more = known.elements >= 256 or known.scales is not None or known.e4m3  # would spill 8 to 192 bytes
    return split == 1 or sums < 64 or not needs_more


def splits_of(I: int) -> list[int]:
    """Into how many blocks of threads the pieces of a product may be divided."""
    pieces = ceil_div(I, PIECE)
    return [n for n in range(1, min(pieces, 16) + 1) if (n - 1) * ceil_div(pieces, n) < pieces]


def handed_over(split: int, blocks: int, tile_o: int, tile_t: int, I: int) -> int:
    """How many float32 the blocks of threads of a split product store for the last of them."""
    pieces = ceil_div(I, PIECE)
    return 0 if split == 1 else (pieces - ceil_div(pieces, split) + 1) * blocks * tile_o * tile_t


def known_cuts(I: int, format: str, silu: bool, gpu: GPU) -> list[tuple[Cut, int]]:
    """The cuts and splits that are possible."""
    fit = [c for c in CUTS if stages_of(c, format, gpu) >= 2 and not (silu and c.tile_o // c.warps_o % 32)]  # a warp has gate and up
    return [(c, n) for c in fit for n in splits_of(I) if has_registers(c, n, format)]


@functools.cache
def choice_of_cut(rows: int, T: int, I: int, format: str, silu: bool, gpu: GPU) -> tuple[Cut, int]:
    """The cut of a product, and the number of blocks of threads that share its columns."""
    return min(known_cuts(I, format, silu, gpu), key=lambda known: cycles_of(known[0], known[1], rows, T, I, format, gpu))


@functools.cache
def cut_of_experts(rows: int, places: int, task: int, I: int, format: str, silu: bool, gpu: GPU) -> Cut:
    """The cut of a product whose x has `places` rows, in tasks of at most `task` with one matrix [rows, I] each."""
    every = [c for c in CUTS if task % c.tile_t == 0 and has_registers(c, 1, format) and not (silu and c.tile_o // c.warps_o % 32)]
    fit = [c for c in (*every, *(replace(c, resident=1) for c in every)) if stages_of(c, format, gpu) >= 2]
    return min(fit, key=lambda cut: (cut not in every, cycles_of(cut, 1, rows, places, I, format, gpu)))


def matmul(variant: str, p: Product, gpu: GPU, chosen: tuple[Cut, int] | None = None) -> tuple[Kernel, int, int]:
    """The kernel, how many float32 its blocks of threads hand over, and how many counters (zeros) they do it with; both 0 for none.

    p.T % 8 == 0. `chosen`: another cut and split than the best known.
    """
    format, T, O, I, rows = p.format, p.T, p.O, p.I, p.rows
    cut, split = chosen or choice_of_cut(rows, T, I, format, p.silu, gpu)
    blocks, stages = ceil_div(rows, cut.tile_o) * ceil_div(T, cut.tile_t), stages_of(cut, format, gpu)
    kernel = Kernel.cuda(
        "matmul", variant, 1 + 2 * (split > 1), 3 + p.bias + p.residual, (blocks, split, 1), cut.threads,
        stages * _stage(cut, format) + _merge(cut),
        2 * T * rows * I, panel_bytes(format, rows, I) + prepared_bytes(format, T, I) + 4 * T * O * (1 + p.residual),
        O=O, I=I, WEIGHT=format, BIAS=int(p.bias), RESIDUAL="GATE" if p.gate else int(p.residual), ACTIVATION=int(p.gelu),
        SILU=int(p.silu), SPLIT=split,
        TILE_O=cut.tile_o, TILE_T=cut.tile_t, WARPS_O=cut.warps_o, WARPS_T=cut.warps_t, WARPS_K=cut.warps_k, K_BLOCKS=k_blocks(format),
        STAGES=stages, BAND=BAND, RESIDENT=cut.resident, **({"BIAS_FIRST": p.bias_first} if p.bias_first else {}),
        **row_bias(p.bias_pitch),
    ).passing(T)  # fmt: skip
    return kernel, handed_over(split, blocks, cut.tile_o, cut.tile_t, I), blocks if split > 1 else 0


# --- tokens


def advance(variant: str, B: int, M: int, S: int, rounds: int) -> Kernel:
    return Kernel.cuda(
        "advance", variant, 6, 3, (1, 1, 1), min(1024, 32 * ceil_div(B, 32)), M=M, S=S, ROUNDS=rounds, NO_SLOT=NO_SLOT
    ).passing(B)


def embed(variant: str, format: str, T: int, V: int, E: int, tiles: bool) -> Kernel:
    work = T * (4 * E + panel_bytes(format, 1, E) // 16)
    return Kernel.cuda(
        "embed", variant, 1, 3, (T, 1, 1), min(256, 32 * ceil_div(E // 4, 32)), bytes=work, V=V, E=E, WEIGHT=format, TILES=int(tiles)
    )


def kv_append(variant: str, T: int, K: int, S: int, D: int, cache: str, group: RankGroup | None = None) -> Kernel:
    work = 2 * T * K * (4 * D + cached_bytes(cache, D))
    return Kernel.cuda(
        "kv_append", variant, 2, 4, (T, 1, 1), min(256, 32 * ceil_div(K * D // 4, 32)), 0, 0, work, K=K, S=S, D=D, CACHE_TYPE=cache,
        **ranks(group),
    )  # fmt: skip


def kv_copy(variant: str, pairs: int, block_bytes: int) -> Kernel:
    grid = ceil_div(block_bytes, 16384), pairs, 1
    return Kernel.cuda("kv_copy", variant, 1, 2, grid, 256, bytes=2 * pairs * block_bytes, BLOCK_BYTES=block_bytes)


def pack_tiles(variant: str, source: str, format: str, gpu: GPU) -> Kernel:
    """One kernel for all matrices of a format: their sizes are read at run time. Rows of another float format are converted."""
    unit, converts = tile_unit(format), source != format
    quants = " ".join(f"QUANT({start}, {nbytes})" for start, nbytes in unit.quants)
    fields = " ".join(f"FIELD({start}, {nbytes}, {word})" for start, nbytes, word in unit.record)
    return Kernel.cuda(
        "pack_tiles", variant, 1 + converts, 2, (8 * gpu.multiprocessors, 1, 1), 256,
        UNIT=source_unit(source, format), QUANTS=quants, QUANT_BYTES=sum(nbytes for _, nbytes in unit.quants), FIELDS=fields,
        RECORD_BYTES=sum(nbytes for _, nbytes, _ in unit.record), CONVERTS=int(converts), SOURCE=source, TARGET=format,
    )  # fmt: skip


SAMPLE_THREADS, SAMPLE_CAPACITY = 1024, 4095


def sample(variant: str, B: int, V: int, neutral_row: int, features: dict[str, bool], gpu: GPU) -> tuple[list[Kernel], int]:
    """The launches, one or two, and bytes of scratch, all zero before the first of all."""
    filtered = features["TOP_K"] or features["TOP_P"] or features["MIN_P"]
    max_parts, parts = max(1, min(32, gpu.multiprocessors // B, V // 4096)), 1
    while 2 * parts <= max_parts:
        parts *= 2
    stages = ["LOOK", "DRAW"] if filtered and parts > 1 else ["WHOLE"]
    scratch = 0 if parts == 1 else B * (32 + (4 * SAMPLE_THREADS + 8 * (SAMPLE_CAPACITY + 1) if filtered else 0))
    outs, ins = 3 + features["PENALIZED"], 2 + features["PENALIZED"] + features["BIASED"]
    defines = {name: int(on) for name, on in features.items()}
    kernels = [
        Kernel.cuda(
            "sample", variant, outs, ins, (parts, B, 1), SAMPLE_THREADS, bytes=4 * B * V * (1 + sum(defines.values())),
            V=V, NEUTRAL_ROW=neutral_row, STAGE=stage, **defines,
        )
        for stage in stages
    ]  # fmt: skip
    return kernels, scratch


def read(variant: str, words: int, blocks: int) -> Kernel:
    return Kernel.cuda("read", variant, 1, 1, (blocks, 1, 1), 512, bytes=16 * words, WORDS=words, BLOCKS=blocks)


def copy(variant: str, words: int, blocks: int) -> Kernel:
    return Kernel.cuda("copy", variant, 1, 1, (blocks, 1, 1), 512, bytes=32 * words, WORDS=words, BLOCKS=blocks)
