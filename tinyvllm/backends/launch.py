"""Launches of a kernel record on its own backend, for measurements and tests; a backend's ops use the module of their own folder."""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad import Tensor

from tinyvllm.backends.cpu import launch as cpu
from tinyvllm.backends.cpu.launch import run_now
from tinyvllm.backends.cuda import launch as cuda
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.metal import launch as metal

__all__ = ["launch", "run_now"]


def launch(kernel: Kernel, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> list[Tensor]:
    """The hand-written kernel as a node of the lazy graph: `outs` after it has written them, in their order.

    Tensors are passed as they are in memory, so all must be contiguous; `outs` must be buffers (Tensor.empty, or what is changed in
    place). What reads a returned tensor runs after the kernel, also in a captured step.
    """
    return {"cpu": cpu.launch, "cuda": cuda.launch, "metal": metal.launch}[kernel.backend](kernel, outs, ins)
