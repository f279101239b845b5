"""Launch plans of the CUDA kernels that only Hopper has, as plan.py has those of the others: products of more than a few rows with 16-bit
weights (matmul_hopper.cu, and quantize_cores.cu, which prepares its x), and attention of prompts (attention_prefill_hopper.cu).
"""

from __future__ import annotations

import functools

from tinyvllm.backends.cuda.plan import (
    BAND,
    GPU,
    MAX_STAGES,
    PIECE,
    handed_over,
    k_blocks,
    prepared_bytes,
    splits_of,
)
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.policies import row_bias
from tinyvllm.backends.shapes import Attention, Product
from tinyvllm.batch import PACKED_KV
from tinyvllm.integers import ceil_div, round_up
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.quant.formats import FORMATS
from tinyvllm.quant.layouts import panel_bytes

HOPPER = "sm_90a"
LEAST_ROWS = 72  # of x: up to 64 matmul.cu is as fast, or faster
GROUPS_MULTIPLE = 48  # prepared groups of eight tokens are a multiple of this: whole tiles of any size


def computes(variant: str, p: Product) -> bool:
    """Whether matmul_hopper computes the product; all else of that variant is the base variant's."""
    return variant == HOPPER and FORMATS[p.format].is_float and p.T >= LEAST_ROWS and not p.gate and not p.bias_first


def core_groups(T: int) -> int:
    """Groups of eight tokens that quantize_cores lays out for T tokens."""
    return round_up(T // 8, GROUPS_MULTIPLE)


def quantize_cores(variant: str, format: str, T: int, I: int, eps: str | None = None, gather: bool = False) -> Kernel:
    """The same in the layout that matmul_hopper reads, for weights of 16 bits."""
    most = min(ceil_div(I, 256), 4 if eps is not None else 8)  # a norm reads the whole row in each
    parts = max(1, min(most, 256 // (T // 8)))
    return Kernel.cuda(
        "quantize_cores", variant, 1, 2 + (eps is not None) + gather, (T // 8, parts, 1), 256, 0,
        3 * T * I, 4 * T * I + prepared_bytes(format, T, I),
        I=I, WEIGHT=format, NORM=int(eps is not None), EPS=eps or "0.0f", GATHER=int(gather), GROUPS_MULTIPLE=GROUPS_MULTIPLE,
    )  # fmt: skip


# --- the choice of a cut. The figures are fitted to what an H100 takes for each cut (benchmarks/results/gpu_cuts.jsonl).

# A cycle of a multiprocessor: multiply-adds; bytes of the L2 cache; bytes that blocks of threads hand over; bytes of memory.
_MULTIPLIED, _COPIED, _HANDED, _MEMORY = 1450, 40, 11.5, 9.4
_STAGE, _WRITTEN, _LATENCY = 4.2, 0.275, 1900  # cycles of a column, of an output, and until blocks of threads have handed over their sums


@dataclass(frozen=True)
class Cut:
    """A block of threads of matmul_hopper.cu: its tile, and how many such blocks a multiprocessor should hold."""

    tile_o: int
    tile_t: int
    resident: int

    @property
    def threads(self) -> int:
        return 2 * self.tile_o + 128

    @property
    def splits(self) -> bool:
        """Whether several blocks of threads may share a product's columns: not where a warpgroup has given its registers away."""
        return self.tile_t <= 128


CUTS = (
    Cut(64, 64, 2),
    Cut(128, 64, 1),
    Cut(64, 128, 1),
    Cut(128, 128, 1),
    Cut(128, 192, 1),
)


def stages_of(cut: Cut, silu: bool, gpu: GPU) -> int:
    """How many stages of a cut fit into shared memory."""
    room = min(gpu.shared, gpu.shared_of_one // cut.resident) - 1024 - _ups(cut, silu)
    return min(MAX_STAGES, room // _stage(cut))


def _stage(cut: Cut) -> int:
    return k_blocks("BF16") * 64 * (cut.tile_o + cut.tile_t)


def _ups(cut: Cut, silu: bool) -> int:
    return 2 * cut.tile_o * cut.tile_t * silu


def cycles_of(cut: Cut, split: int, rows: int, T: int, I: int, gpu: GPU) -> float:
    """About what a product with `rows` rows of 16-bit weight costs, as `cycles_of`."""
    pieces, blocks, numbers = ceil_div(I, PIECE), ceil_div(rows, cut.tile_o) * ceil_div(T, cut.tile_t), cut.tile_o * cut.tile_t
    columns = ceil_div(pieces, split) / pieces * I
    copied = 2 * (cut.tile_o + cut.tile_t) / _COPIED
    one = max(numbers / _MULTIPLIED, copied, _STAGE / cut.resident) * columns + _WRITTEN * numbers
    handed = 8 * (pieces - ceil_div(pieces, split)) * blocks * numbers / gpu.multiprocessors / _HANDED
    memory = 2 * rows * I / gpu.multiprocessors / _MEMORY
    waves = ceil_div(blocks * split, gpu.multiprocessors * cut.resident) * cut.resident
    return max(waves * one, memory) + handed + (_LATENCY if split > 1 else 0)


def known_cuts(I: int, silu: bool, gpu: GPU) -> list[tuple[Cut, int]]:
    """The cuts and splits that are possible."""
    return [(cut, n) for cut in CUTS if stages_of(cut, silu, gpu) >= 2 for n in splits_of(I) if n == 1 or cut.splits]


@functools.cache
def choice_of_cut(rows: int, T: int, I: int, silu: bool, gpu: GPU) -> tuple[Cut, int]:
    """The cut of a product, and the number of blocks of threads that share its columns."""
    return min(known_cuts(I, silu, gpu), key=lambda known: cycles_of(known[0], known[1], rows, T, I, gpu))


def matmul_hopper(variant: str, p: Product, gpu: GPU, chosen: tuple[Cut, int] | None = None) -> tuple[Kernel, int, int]:
    """A product with 16-bit weights, as `matmul`; x is prepared by quantize_cores."""
    format, T, O, I, rows = p.format, p.T, p.O, p.I, p.rows
    cut, split = chosen or choice_of_cut(rows, T, I, p.silu, gpu)
    blocks, stages = ceil_div(rows, cut.tile_o) * ceil_div(T, cut.tile_t), stages_of(cut, p.silu, gpu)
    kernel = Kernel.cuda(
        "matmul_hopper", variant, 1 + 2 * (split > 1), 3 + p.bias + p.residual, (blocks, split, 1), cut.threads,
        stages * _stage(cut) + _ups(cut, p.silu),
        2 * T * rows * I, panel_bytes(format, rows, I) + prepared_bytes(format, T, I) + 4 * T * O * (1 + p.residual),
        O=O, I=I, WEIGHT=format, BIAS=int(p.bias), RESIDUAL=int(p.residual), ACTIVATION=int(p.gelu), SILU=int(p.silu), SPLIT=split,
        TILE_O=cut.tile_o, TILE_T=cut.tile_t, K_BLOCKS=k_blocks(format), STAGES=stages, BAND=BAND, RESIDENT=cut.resident,
        **row_bias(p.bias_pitch),
    ).passing(core_groups(T))  # fmt: skip
    return kernel, handed_over(split, blocks, cut.tile_o, cut.tile_t, I), blocks if split > 1 else 0


# --- attention


def attends(variant: str, a: Attention) -> bool:
    """Whether attention_prefill_hopper computes this shape."""
    return variant == HOPPER and a.D in (64, 128) and a.cache not in PACKED_KV.values() and 16 * _warps(a.D) >= a.H // a.K


def _warps(D: int) -> int:
    """Warps of a block of threads: wider heads leave registers for fewer."""
    return 12 if D == 64 else 8


def attention_prefill(variant: str, T: int, chunks: int, a: Attention) -> Kernel:
    """T rows of `chunks` sequences."""
    warps, keys = _warps(a.D), 128
    grid = (ceil_div(T, warps * 16 * a.K // a.H) + chunks, a.K, 1)
    return Kernel.cuda(
        "attention_prefill_hopper", variant, 1, 6 + a.sinks, grid, 32 * warps, 8 * keys * a.D,
        WARPS=warps, STAGE_KEYS=keys, **a.defines,  # type: ignore[arg-type]
    )  # fmt: skip
