"""What the checks look at: folders of the system and functions that ask it, which tests replace; and what a check finds."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tinyvllm.backends.cpu.cores import Cores, cores
from tinyvllm.runner.device import choose_device


class Status(StrEnum):
    """`WARNING`: an engine runs, slower or with less than it could have. `ERROR`: it does not start, or not as asked."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One line: what was checked, how it is, and what to do about it."""

    name: str
    status: Status
    text: str
    advice: str = ""


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


@dataclass(frozen=True)
class Machine:
    """`device` is what `--device` says, `every_format` whether the self-test has no limit of time, `began` when the checks could begin."""

    device: str = "auto"
    every_format: bool = False
    began: float = field(default_factory=time.monotonic)
    proc: Path = Path("/proc")
    sysfs: Path = Path("/sys")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    system: str = sys.platform
    macos: str = platform.mac_ver()[0]
    python: tuple[int, ...] = tuple(sys.version_info[:3])
    version_of: Callable[[str], str] = importlib.metadata.version
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit
    load: Callable[[str], object] = ctypes.CDLL
    cores: Callable[[Path, Path], Cores] = cores
    choose: Callable[[str], str] = choose_device
    free_bytes: Callable[[Path], int] = _free_bytes

    @property
    def cgroups(self) -> Path:
        return self.sysfs / "fs" / "cgroup"

    def text(self, path: Path) -> str | None:
        """A file of the kernel; None where there is none."""
        try:
            with open(path, errors="replace") as file:
                return file.read(1 << 16)
        except OSError:
            return None
