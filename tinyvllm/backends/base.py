"""How each backend's kernels are called: the record of a kernel, its grid and its arguments, and what shapes it cannot take.

One module a backend, all with the same functions, which the ops call once `registry.pick` has chosen a row of that backend.
"""

from __future__ import annotations

from types import ModuleType


def calls_of(device: str) -> ModuleType:
    """The module for a device of tinygrad's ("CPU", "CUDA:1", ...); the CPU's for one that has no kernels, whose refusals are as good."""
    from tinyvllm.backends.cpu import call as cpu
    from tinyvllm.backends.cuda import call as cuda
    from tinyvllm.backends.metal import call as metal

    return {"CUDA": cuda, "METAL": metal}.get(device.split(":")[0], cpu)
