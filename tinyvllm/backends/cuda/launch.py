"""Launches of CUDA kernels as nodes of the lazy graph."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tinygrad import Tensor

from tinyvllm.backends.cuda import nvrtc
from tinyvllm.backends.kernel import Kernel
from tinyvllm.bridge import Program, architecture, launch_program
from tinyvllm.placement import Placement


def launch(kernel: Kernel, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> list[Tensor]:
    """The kernel as a node of the lazy graph: `outs` after it has written them (backends/launch.py)."""
    kernel.check_counts(len(outs), len(ins))
    code = machine_code(kernel, Placement.of(outs[0].device).device)
    program = Program(
        kernel.name, kernel.stem, code, kernel.outs, kernel.ins, kernel.flops, kernel.bytes,
        kernel.grid, (kernel.block, 1, 1), (kernel.shared, *kernel.integers),
    )  # fmt: skip
    return launch_program(program, [*outs, *ins])


@functools.cache
def machine_code(kernel: Kernel, device: str) -> bytes:
    """The kernel compiled for the device's GPU."""
    return nvrtc.cubin(kernel, architecture(device))
