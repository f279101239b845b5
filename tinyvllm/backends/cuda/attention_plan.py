"""Launch plans of the CUDA kernels of attention, as plan.py has those of the others."""

from __future__ import annotations

import functools

from tinyvllm.backends.cuda.plan import GPU
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.shapes import Attention
from tinyvllm.batch import PACKED_KV
from tinyvllm.integers import ceil_div
from tinyvllm.lazy_dataclass import dataclass

STRETCH = 4096  # keys whose partitions are merged before they are merged with others
PARTITION = 256  # keys
FOLLOWING = 256 << 20  # bytes at most of the results that shared reads keep for other sequences, a layer at a time


def attention_decode(variant: str, B: int, a: Attention, gpu: GPU, cascade: bool = False) -> tuple[Kernel, int, int]:
    """The kernel, and the size of its scratch: float32 numbers, and counters.

    With `cascade` its last array is `shared_prefix_lens`, unless no sharing is possible.
    """
    group, tokens = a.H // a.K, a.M * a.S
    parts = ceil_div(group, 16)
    heads, rows = a.K * parts, ceil_div(group, parts)
    partitions, stretches = ceil_div(tokens, PARTITION), ceil_div(tokens, STRETCH)
    shared_partitions = _shared_partitions(B, a, heads, rows) if cascade else 0
    if has_team(B, a, gpu) and not shared_partitions:
        return _attention_of_team(variant, B, a, gpu, B * heads * partitions, rows)
    halves, values = halves_of(a.D), a.D // halves_of(a.D)
    grid, shared = decode_warps(a, gpu, B * heads * partitions, shared_partitions > 0 and a.D <= 64)
    kept = B * heads * (stretches + min(shared_partitions, partitions)) if shared_partitions else 0
    partial = halves * (grid * 2 * (STRETCH // PARTITION + stretches) + kept) * rows * (values + 2)
    more = {"CASCADE": 1} if shared_partitions else {}
    ins = 5 + a.sinks + len(more)
    kernel = Kernel.cuda("attention_decode", variant, 3, ins, (grid, halves, 1), 32, shared, **more, **a.defines)  # type: ignore[arg-type]
    return kernel.passing(B, shared_partitions), partial, halves * grid * 2 + (B * heads if shared_partitions else 0)


def decode_warps(a: Attention, gpu: GPU, units: int, twice: bool = False) -> tuple[int, int]:
    """Warps of a launch of attention_decode that has up to `units`, and the shared memory of each. `twice`: with queries of a second pass,
    which are in the padding of rows of floats.
    """
    ring = min(8, max(2, 512 // a.D))
    stage = side_bytes(a.cache, a.D, 32) + (512 if twice and a.cache in PACKED_KV.values() else 0)
    shared = ring * stage + (0 if a.D <= 128 else _query_bytes(a.D))
    resident = min(32, gpu.shared_of_one // (shared + 1024))
    return min(max(1, gpu.multiprocessors * max(1, resident) // halves_of(a.D)), units), shared


TEAM, TEAM_SEQUENCES = 4, 4  # warps for a partition, and the most sequences for which they are worth it


def has_team(B: int, a: Attention, gpu: GPU) -> bool:
    """Whether attention_decode_team.cu computes this shape: so few sequences that one warp a partition would leave the GPU idle."""
    return B <= TEAM_SEQUENCES and a.D in (64, 128) and a.cache not in PACKED_KV.values() and _team_bytes(a.D) + 1024 <= gpu.shared


def _team_bytes(D: int) -> int:
    """Shared memory: keys and values of a partition; weights, as operands and as chains; the largest scores, and the sums."""
    return 2 * PARTITION * (2 * D + 16) + 2 * 16 * PARTITION + 4 * TEAM * 64 * 20 + 64 * TEAM + 64


def _attention_of_team(variant: str, B: int, a: Attention, gpu: GPU, units: int, rows: int) -> tuple[Kernel, int, int]:
    shared = _team_bytes(a.D)
    grid = min(gpu.multiprocessors * (gpu.shared_of_one // (shared + 1024)), units)
    partial = grid * 2 * (STRETCH // PARTITION + ceil_div(a.M * a.S, STRETCH)) * rows * (a.D + 2)
    kernel = Kernel.cuda(
        "attention_decode_team", variant, 3, 5 + a.sinks, (grid, 1, 1), 32 * TEAM, shared, TEAM=TEAM, **a.defines,  # type: ignore[arg-type]
    )  # fmt: skip
    return kernel.passing(B), partial, 2 * grid


def halves_of(D: int) -> int:
    """Thread blocks that share the columns of a head's values: a warp has registers for 256."""
    return 2 if D > 256 else 1


def _query_bytes(D: int) -> int:
    """Shared memory of a warp for the queries of wide heads, without the steps of sixteen features that are in registers."""
    return 32 * D - 512 * (4 if D <= 256 else 0)


def _shared_partitions(B: int, a: Attention, heads: int, rows: int) -> int:
    """Partitions of a sequence that other sequences may read for it: whole stretches, as many as FOLLOWING has room for."""
    if B == 1 or a.D > 192 or (a.D > 64 and rows > 8):  # no other sequence, or no registers for a second sequence's rows
        return 0
    whole, stretches = STRETCH // PARTITION, ceil_div(a.M * a.S, STRETCH)
    room = FOLLOWING // (4 * B * heads * rows * (a.D + 2)) - stretches
    return max(0, min(room // whole, stretches)) * whole


def attention_prefill(variant: str, T: int, chunks: int, a: Attention, gpu: GPU) -> Kernel:
    """T rows of `chunks` sequences."""
    block = prefill_block(a.D, a.H // a.K, a.cache, gpu.shared)
    assert block is not None, "limits.py"
    span = block.warps * 16 * a.K // a.H
    grid, shared = (ceil_div(T, span) + chunks, a.K * halves_of(a.D), 1), prefill_shared(block, a.D, a.cache)
    return Kernel.cuda(
        "attention_prefill", variant, 1, 6 + a.sinks, grid, 32 * block.warps, shared,
        WARPS=block.warps, STAGES=block.stages, STAGE_KEYS=block.keys, **a.defines,  # type: ignore[arg-type]
    )  # fmt: skip


@dataclass(frozen=True)
class PrefillBlock:
    """A block of threads of attention_prefill: its warps of sixteen rows, and the stages of `keys` keys and values that it reads through.

    A stage of fewer keys than a tile's 64 has keys or values.
    """

    warps: int
    stages: int
    keys: int

    @property
    def in_parts(self) -> bool:
        return self.keys < 64


@functools.cache
def prefill_block(D: int, group: int, cache: str, shared: int) -> PrefillBlock | None:
    """The best that fits `shared` bytes, for `group` query heads of a KV head; None if none does.

    Whole tiles where they fit: they need fewest barriers. Otherwise the most warps; those that wait for copies of their only stage count
    as two thirds, which by arithmetic is the part of the time that is left for products.
    """
    fit = [block for block in prefill_blocks(D, group, cache) if prefill_shared(block, D, cache) <= shared]
    return max(fit, key=lambda block: (not block.in_parts, block.warps * (1 + block.stages), block.keys), default=None)


def prefill_blocks(D: int, group: int, cache: str) -> list[PrefillBlock]:
    """All that the kernel has for such heads."""
    most, tiles = 8 if D <= 128 else 4 if D <= 256 else 2, 128 if D <= 128 else 64
    parts = () if D <= 128 else (32,) if cache in PACKED_KV.values() else (32, 16)
    blocks = [PrefillBlock(most, stages, tiles) for stages in (2, 1)]
    blocks += [PrefillBlock(warps, stages, keys) for warps in range(1, most + 1) for stages in (2, 1) for keys in parts]
    return [block for block in blocks if 16 * block.warps >= group]


def prefill_shared(block: PrefillBlock, D: int, cache: str) -> int:
    """Bytes of shared memory: the stages, and for wide heads what does not fit in registers."""
    values = D // halves_of(D)
    wide = 0 if D <= 128 else block.warps * (64 * values + _query_bytes(D))
    stage = side_bytes(cache, D, block.keys)
    if not block.in_parts:
        stage += side_bytes(cache, D if cache in PACKED_KV.values() else values, block.keys)
    return block.stages * stage + wide


def side_bytes(cache: str, D: int, keys: int) -> int:
    """Shared memory for this number of keys, or of values: padded rows, or the words of packed_cache.cuh with their scales."""
    if cache not in PACKED_KV.values():
        return keys * (2 * D + 16)
    row = D // 2 if cache == "KV_INT4" else D
    return keys // 32 * (max(40 * row, 32 * (row + 8)) + 64)
