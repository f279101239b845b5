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


def open_counters(device: str, powercap: Path = POWERCAP, nvml: str = LIBRARY, platform: str = sys.platform) -> Counters:
    """The host's counters, and the GPU's if `device` ("CPU", "CUDA:1", ...) is one. `nvml` is the path of NVIDIA's library."""
    kind, _, index = device.partition(":")
    packages, reasons = ([], {"cpu": MAC_REASON}) if platform == "darwin" else open_packages(powercap)
    counters = Counters([*packages], {**reasons})
    if kind in ("CUDA", "NV"):
        gpus, reasons = open_gpus(int(index or 0), nvml)
        counters.open += gpus
        counters.not_measured |= reasons
    elif kind == "METAL":
        counters.not_measured["gpu"] = MAC_REASON
    elif kind != "CPU":
        counters.not_measured["gpu"] = f"no reader for the energy of a {kind} device; there are readers for CUDA"
    return counters
