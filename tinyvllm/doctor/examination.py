"""All checks in their order. A check that fails itself is a finding, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tinyvllm.doctor import devices, kernels, system
from tinyvllm.doctor.machine import Finding, Machine, Status

Check = Callable[[Machine], Iterator[Finding]]
CHECKS: dict[str, Check] = {
    "Python": system.check_python,
    "tinygrad": system.check_tinygrad,
    "C compiler": devices.check_compiler,
    "CUDA": devices.check_cuda,
    "Metal": devices.check_metal,
    "cores": system.check_cores,
    "memory": system.check_memory,
    "open files": system.check_files,
    "huge pages": system.check_huge_pages,
    "cache folder": system.check_cache_folder,
    "device": devices.check_device,
    "speed": kernels.check_speed,
    "kernels": kernels.check_kernels,
}


def examine(machine: Machine, checks: dict[str, Check] | None = None) -> Iterator[Finding]:
    """The findings, one after the other."""
    for name, check in (CHECKS if checks is None else checks).items():
        try:
            yield from check(machine)
        except Exception as error:  # each library fails in its own way, and the other checks still say what they find
            cause = next(iter(str(error).splitlines()), "")
            yield Finding(
                name, Status.ERROR, f"the check failed: {type(error).__name__}: {cause}", "please report this line if no other explains it"
            )
