"""Calls of the CUDA kernels of ranks that divide matrices: where their GPUs meet, and what is added or gathered there.

GPUs meet in each other's memory where all of them reach it (peers.py), and otherwise in memory of the host that each of them maps.
"""

from __future__ import annotations

import functools
import os

import numpy as np
from tinygrad import Tensor

from tinyvllm.backends.buffers import empty, present
from tinyvllm.backends.by_expert import sizes_of
from tinyvllm.backends.collecting import collecting
from tinyvllm.backends.cuda import expert_plan, plan
from tinyvllm.backends.cuda.driver import gpu_count, register_host_memory
from tinyvllm.backends.cuda.launch import launch
from tinyvllm.backends.cuda.peers import HEADER, SITE_HEADER, peer_sites
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.operands import NormWeights, Routing
from tinyvllm.backends.policies import bias_pitch
from tinyvllm.bridge import copied
from tinyvllm.config.switches import environment
from tinyvllm.errors import ArgumentError
from tinyvllm.placement import Placement, RankGroup
from tinyvllm.quant.slices import RowShare

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Meeting:
    """Where a rank meets the others (kernels/cuda/include/meeting.cuh); made with its first kernel, in the same step as theirs.

    turns   uint32 [2]
    sites   uint8 [N] of each rank
    shared  uint8 [N], memory of the host
    """

    def __init__(self, device: str, memory: np.ndarray, rank: int, count: int, site_bytes: int):
        self._device, self._memory, self._rank, self._count, self._site_bytes = device, memory, rank, count, site_bytes

    @functools.cached_property
    def tensors(self) -> tuple[list[Tensor], Tensor]:
        """turns and the sites, which kernels write; shared. KernelError if the GPU cannot have the memory, or another rank has ended."""
        turns, sites = copied(np.zeros(2, np.uint32), self._device), None
        if environment(os.environ).get("TINYVLLM_PEER_ACCESS") is not False:
            sites = peer_sites(self._device, self._memory[:HEADER], self._rank, self._count, self._site_bytes)
        if sites is not None:
            return [turns, *sites], register_host_memory(self._device, self._memory[:HEADER], [(0, HEADER)])[0]
        parts = [(0, HEADER), *((HEADER + rank * self._site_bytes, self._site_bytes) for rank in range(self._count))]
        shared, *sites = register_host_memory(self._device, self._memory, parts)
        return [turns, *sites], shared


def places_of(group: RankGroup, like: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """turns, sites and shared of a group. What only finds out which kernels there are meets no rank: then `like`, in place of each."""
    if collecting():
        return like, [like] * group.world_size, like
    (turns, *sites), shared = group.memory.tensors
    return turns, sites, shared


def launch_with(group: RankGroup, kernel: Kernel, out: Tensor, ins: list[Tensor]) -> Tensor:
    """`out` after a kernel in which the group meets."""
    turns, sites, shared = places_of(group, out)
    return launch(kernel, [out, turns, *sites], [shared, *ins])[0]


class RankKernels:
    """The methods of `CudaBackend` for ranks."""

    def rank_environments(self, ranks: int, share: bool) -> list[dict[str, str]]:
        count, named = gpu_count(), os.environ.get(_VISIBLE, "")
        if count < ranks and not share:
            visible = f" ({_VISIBLE}={named})" if named else ""
            raise ArgumentError(f"{ranks} ranks need as many GPUs, and there are {count}{visible}; use fewer ranks, or make more visible")
        names = named.split(",") if named else [str(number) for number in range(count)]
        return [{_VISIBLE: names[rank % count]} for rank in range(ranks)]

    def rank_group(self, placement: Placement, rank: int, world_size: int, memory: np.ndarray, place: int, logits: int) -> RankGroup:
        meeting = Meeting(placement.device, memory, rank, world_size, 8 * place)
        return RankGroup(rank, world_size, meeting, place - SITE_HEADER // 8, logits)

    def all_reduce(
        self, variant: str, part: Tensor, group: RankGroup, rows: Tensor, bias: Tensor | None, residual: Tensor | None,
        output_norm: NormWeights | None = None, output_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        assert output_norm is None and output_scale == 1.0, "limits.py"
        T, O = (int(d) for d in part.shape)
        kernel = plan.all_reduce(variant, T, O, group, bias is not None, residual is not None, bias_pitch(bias))
        return launch_with(group, kernel, empty(part, T, O), [part, *present(bias, residual), rows])

    def gather_logits(self, variant: str, part: Tensor, share: RowShare, count: Tensor) -> Tensor:
        (N, columns), group, V = (int(d) for d in part.shape), share.group, share.all_rows
        kernel = plan.gather_logits(variant, N, V, columns, group)
        return launch_with(group, kernel, empty(part, N, V), [part, count])

    def experts_all_reduce(
        self, variant: str, part: Tensor, group: RankGroup, routing: Routing, rows: Tensor, residual: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """A row's experts are added by each rank, then the ranks' sums; the first rank's have the biases."""
        lists, E = expert_plan.Lists(*sizes_of(routing.chosen, 1)), int(part.shape[1])
        own = bias if group.rank == 0 else None
        kernel = expert_plan.experts_sum(variant, lists, E, False, own is not None)
        ins = [part, *present(own), routing.shares, *([] if own is None else [routing.chosen]), rows]
        total = launch(kernel, [empty(part, lists.T, E)], ins)[0]
        return self.all_reduce(variant, total, group, rows, None, residual)
