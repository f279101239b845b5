"""Launches of a kernel record on its own backend, for measurements and tests; a backend's ops use the module of their own folder."""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad import Tensor

from tinyvllm.backends.cpu import launch as cpu
from tinyvllm.backends.cpu.launch import run_alone, run_now
from tinyvllm.backends.kernel import Kernel

__all__ = ["launch", "run_alone", "run_now"]


def launch(kernel: Kernel, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> list[Tensor]:
    """The hand-written kernel as a node of the lazy graph: `outs` after it has written them, in their order.

    Tensors are passed as they are in memory, so all must be contiguous; `outs` must be buffers (Tensor.empty, or what is changed in
    place). What reads a returned tensor runs after the kernel, also in a captured step.
    """
    if kernel.backend == "cuda":
        from tinyvllm.backends.cuda import launch as cuda  # 4 ms of a start with another device

        return cuda.launch(kernel, outs, ins)
    if kernel.backend == "metal":
        from tinyvllm.backends.metal import launch as metal

        return metal.launch(kernel, outs, ins)
    return cpu.launch(kernel, outs, ins)
