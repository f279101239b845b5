"""Launch plans of the CUDA kernels of ranks that divide contexts, as plan.py has those of the others."""

from __future__ import annotations

from dataclasses import replace

from tinyvllm.backends import policies
from tinyvllm.backends.cuda import attention_plan
from tinyvllm.backends.cuda.plan import GPU, MEETING_BLOCKS
from tinyvllm.backends.kernel import Constant, Kernel
from tinyvllm.backends.shapes import Attention
from tinyvllm.integers import ceil_div
from tinyvllm.placement import RankGroup


def sequences_at_once(a: Attention, group: RankGroup) -> int:
    """Decodes whose results a place has room for (kernels/cuda/include/rank_results.cuh)."""
    return group.place // (a.H * (a.D + 2)) // a.M


def attention_decode_ranks(variant: str, first: int, count: int, a: Attention, gpu: GPU, group: RankGroup) -> Kernel:
    """`count` sequences from `first` on, at most `sequences_at_once`."""
    grid, shared = attention_plan.decode_warps(a, gpu, count * a.K * ceil_div(a.H // a.K, 16) * a.M)
    halves = attention_plan.halves_of(a.D)
    kernel = Kernel.cuda("attention_decode_ranks", variant, 1, 7, (grid, halves, 1), 32, shared, 0, 0, **_constants(a, group))
    return kernel.passing(first, count)


def merge_ranks(variant: str, first: int, count: int, a: Attention, group: RankGroup) -> Kernel:
    blocks = min(MEETING_BLOCKS, ceil_div(count * a.H * a.D, 1024))
    kernel = Kernel.cuda("merge_ranks", variant, 2 + group.world_size, 3 + a.sinks, (blocks, 1, 1), 256, 0, 0, 0, **_constants(a, group))
    return kernel.passing(first, count)


def gather_blocks(variant: str, a: Attention, block_bytes: int, group: RankGroup) -> Kernel:
    return Kernel.cuda(
        "gather_blocks", variant, 1 + 2 * group.world_size, 6, (MEETING_BLOCKS, 1, 1), 256, 0, 0, 0,
        BLOCK_WORDS=block_bytes // 16, M=a.M, S=a.S, WINDOW=a.window, **policies.ranks(group), PLACE=group.place,
    )  # fmt: skip


def attention_prefill(variant: str, T: int, chunks: int, a: Attention, gpu: GPU, group: RankGroup) -> Kernel:
    """With the blocks of each rank, and the number of rows."""
    kernel = attention_plan.attention_prefill(variant, T, chunks, a, gpu)
    return replace(kernel, ins=kernel.ins + group.world_size, defines=(*kernel.defines, *policies.ranks(group).items()))


def own_rows(variant: str, T: int, E: int, group: RankGroup) -> Kernel:
    own = ceil_div(T, group.world_size)
    return Kernel.cuda("own_rows", variant, 2, 2, (own, 1, 1), 256, 0, 0, 8 * own * E, E=E, **policies.ranks(group))


def gather_rows(variant: str, T: int, E: int, group: RankGroup) -> Kernel:
    blocks = min(MEETING_BLOCKS, ceil_div(T * E, 1024 * group.world_size))
    return Kernel.cuda(
        "gather_rows", variant, 2 + group.world_size, 3, (blocks, 1, 1), 256, 0, 0, 12 * T * E, E=E, **policies.ranks(group),
        PLACE=group.place,
    )  # fmt: skip


def _constants(a: Attention, group: RankGroup) -> dict[str, Constant]:
    return a.defines | policies.ranks(group) | dict(PLACE=group.place)
