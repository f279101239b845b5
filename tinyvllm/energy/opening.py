"""Which counters this machine has for a device, and why others are missing."""

from __future__ import annotations

import sys
from pathlib import Path

from tinyvllm.energy.counters import Counters
from tinyvllm.energy.nvml import LIBRARY, open_gpus
from tinyvllm.energy.rapl import POWERCAP, open_packages

MAC_REASON = (
    "macOS has no documented energy counter that a process without root can read: powermetrics needs root, and IOReport is a private "
    "interface"
)


def open_counters(
    device: str, powercap: Path = POWERCAP, nvml: str = LIBRARY, platform: str = sys.platform, gpus: int = 1
) -> Counters:  # fmt: skip
    """The host's counters, and those of `gpus` GPUs from `device` ("CPU", "CUDA:1", ...) on if it is one. `nvml` is the path of NVIDIA's
    library.
    """
    kind, _, index = device.partition(":")
    packages, reasons = ([], {"cpu": MAC_REASON}) if platform == "darwin" else open_packages(powercap)
    counters = Counters([*packages], {**reasons})
    if kind in ("CUDA", "NV"):
        first = int(index or 0)
        for number in range(first, first + gpus):
            opened, reasons = open_gpus(number, nvml)
            counters.open += opened
            counters.not_measured |= reasons
    elif kind == "METAL":
        counters.not_measured["gpu"] = MAC_REASON
    elif kind != "CPU":
        counters.not_measured["gpu"] = f"no reader for the energy of a {kind} device; there are readers for CUDA"
    return counters
