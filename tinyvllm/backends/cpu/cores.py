"""Which cores the CPU kernels use: what affinity, control groups, hardware threads and kinds of cores leave to this process.

All threads of the pool meet at the end of every kernel, so the slowest one sets the pace. A second hardware thread of a core, a slow core,
or a thread that a quota stops costs more than it computes: each is left out.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tinyvllm.host_memory import control_group_folders
from tinyvllm.lazy_dataclass import dataclass

MAX_NODES = 1024  # memory nodes that a policy of Linux can name
SLOW = 0.75  # of the fastest core's capacity: below that a core is left out


@dataclass(frozen=True)
class Cores:
    """What this process may use.

    hardware_threads   processors as the system counts them
    physical           cores, each of which is one or more of them
    fast               cores without the slow ones of a processor that has two or three kinds
    quota              seconds of processor time a second that the control groups allow; None is no limit
    nodes              memory nodes that these cores belong to
    """

    hardware_threads: int
    physical: int
    fast: int
    quota: float | None = None
    nodes: int = 1

    @property
    def threads(self) -> int:
        """The number of threads that is best for kernels. A quota of 2.5 is 2: the half is what the rest of the process takes."""
        allowed = self.fast if self.quota is None else min(self.fast, int(self.quota))
        return max(1, allowed)

    @property
    def processes(self) -> int:
        """How many processes that compute may run at the same time."""
        return max(1, self.hardware_threads if self.quota is None else min(self.hardware_threads, int(self.quota)))

    def __str__(self) -> str:
        parts = [f"{self.physical} physical cores"]
        if self.hardware_threads > self.physical:
            parts.append(f"{self.hardware_threads} hardware threads")
        if self.fast < self.physical:
            parts.append(f"{self.fast} of them fast")
        if self.quota is not None:
            parts.append(f"the control group's quota is {self.quota:g} cores")
        if self.nodes > 1:
            parts.append(f"{self.nodes} memory nodes")
        return ", ".join(parts)


def cores(proc: Path = Path("/proc"), sysfs: Path = Path("/sys"), allowed: Iterable[int] | None = None) -> Cores:
    """The cores of this process. `allowed`: the processors it may run on; None asks the system."""
    if allowed is None:
        if sys.platform == "darwin":
            return _of_apple()
        if not hasattr(os, "sched_getaffinity"):
            count = os.cpu_count() or 1
            return Cores(count, count, count)
        allowed = os.sched_getaffinity(0)
    allowed = sorted(allowed)
    by_core: dict[str, list[int]] = {}
    for cpu in allowed:
        by_core.setdefault(_text(_topology(sysfs, cpu)) or str(cpu), []).append(cpu)
    capacities = _capacities(sysfs, allowed)
    most = max(capacities.values())
    fast = sum(max(capacities[cpu] for cpu in core) >= SLOW * most for core in by_core.values())
    return Cores(len(allowed), len(by_core), fast, quota(proc, sysfs / "fs" / "cgroup"), len(memory_nodes(sysfs, allowed)) or 1)


def quota(proc: Path, cgroups: Path) -> float | None:
    """The smallest quota of a control group around this process, in cores; None where there is none."""
    found = []
    for version, folder in control_group_folders("cpu", proc, cgroups):
        if version == 2:
            words = _text(folder / "cpu.max").split()
        else:
            words = [_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):  # not "max", not -1
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def _topology(sysfs: Path, cpu: int) -> Path:
    return sysfs / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list"


def _capacities(sysfs: Path, allowed: list[int]) -> dict[int, float]:
    """How much each processor computes, in any unit.

    Arm, and x86 from Linux 6.12 on, say it for each; Intel's two kinds of cores are also two devices of counters, which are older.
    """
    found = {cpu: _number(_text(sysfs / "devices" / "system" / "cpu" / f"cpu{cpu}" / "cpu_capacity")) for cpu in allowed}
    if all(found.values()):
        return {cpu: float(number or 1) for cpu, number in found.items()}
    efficient = _listed(_text(sysfs / "devices" / "cpu_atom" / "cpus"))
    return {cpu: 0.5 if cpu in efficient else 1.0 for cpu in allowed}


def memory_nodes(sysfs: Path, allowed: Iterable[int]) -> dict[int, list[int]]:
    """Which of these processors belong to each memory node, by its number; none where the system does not say."""
    places = {
        int(place.name[4:]): place for place in (sysfs / "devices" / "system" / "node").glob("node[0-9]*") if place.name[4:].isdecimal()
    }
    found = {node: sorted(_listed(_text(places[node] / "cpulist")) & {*allowed}) for node in sorted(places) if node < MAX_NODES}
    return {node: cpus for node, cpus in found.items() if cpus}


def _of_apple() -> Cores:
    """macOS has neither affinity nor quotas. The first level of performance is that of the fast cores; Intel's have one."""
    names = ("hw.logicalcpu", "hw.physicalcpu", "hw.perflevel0.physicalcpu")
    said = subprocess.run(["sysctl", *names], capture_output=True, text=True).stdout
    values = dict(line.split(": ", 1) for line in said.splitlines() if ": " in line)
    count = os.cpu_count() or 1
    logical, physical = (_number(values.get(name, "")) or count for name in names[:2])
    fast = _number(values.get(names[2], "")) if platform.machine() == "arm64" else None
    return Cores(logical, physical, fast or physical)


def _listed(text: str) -> set[int]:
    """The numbers of a list such as "0-3,8"; empty if it is none."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            found.update(range(int(first), min(int(last or first), 1 << 16) + 1))
    return found


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 10 else None


def _text(path: Path) -> str:
    """A small file of the system without the space around; empty where there is none."""
    try:
        with open(path, errors="replace") as file:
            return file.read(4096).strip()
    except OSError:
        return ""
