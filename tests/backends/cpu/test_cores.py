"""The cores of machines that are files: hardware threads, affinity, quotas of both control groups, kinds of cores, memory nodes."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tinyvllm.backends.cpu import cores as module
from tinyvllm.backends.cpu.cores import Cores, cores


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


class Machine:
    """Folders /proc and /sys of a machine, whose cores are lists of its processors."""

    def __init__(self, folder: Path, by_core: Sequence[Sequence[int]]):
        self.proc, self.sysfs, self._all = folder / "proc", folder / "sys", [cpu for core in by_core for cpu in core]
        write(self.proc / "self" / "cgroup", "0::/box/app")
        for core in by_core:
            for cpu in core:
                self.of_cpu(cpu, "topology/thread_siblings_list", ",".join(map(str, core)))

    def of_cpu(self, cpu: int, name: str, text: str) -> None:
        write(self.sysfs / "devices" / "system" / "cpu" / f"cpu{cpu}" / name, text)

    def group(self, name: str, text: str) -> None:
        write(self.sysfs / "fs" / "cgroup" / name, text)

    def cores(self, *allowed: int) -> Cores:
        return cores(self.proc, self.sysfs, allowed or self._all)


def pairs(count: int) -> list[tuple[int, int]]:
    """Cores of two hardware threads, numbered as Linux does: the second ones after all the first."""
    return [(core, core + count) for core in range(count)]


def test_two_hardware_threads_of_a_core_count_once(tmp_path):
    found = Machine(tmp_path, pairs(4)).cores()
    assert found == Cores(8, 4, 4) and found.threads == 4
    assert str(found) == "4 physical cores, 8 hardware threads"


def test_affinity_leaves_the_cores_it_names(tmp_path):
    machine = Machine(tmp_path, pairs(8))
    assert machine.cores(0, 1, 2, 10) == Cores(4, 3, 3)
    assert machine.cores(5) == Cores(1, 1, 1)


def test_a_machine_that_says_nothing_has_a_core_for_each_processor(tmp_path):
    assert cores(tmp_path / "proc", tmp_path / "sys", [3, 4]) == Cores(2, 2, 2)


@pytest.mark.parametrize(
    ("text", "quota", "threads"), [("max 100000", None, 8), ("250000 100000", 2.5, 2), ("40000 100000", 0.4, 1), ("1200000 100000", 12, 8)]
)
def test_a_quota_leaves_whole_cores_and_at_least_one(tmp_path, text, quota, threads):
    machine = Machine(tmp_path, pairs(8))
    machine.group("box/app/cpu.max", text)
    assert (machine.cores().quota, machine.cores().threads) == (quota, threads)
    assert (f"the control group's quota is {quota} cores" in str(machine.cores())) == (quota is not None)


def test_the_smallest_quota_of_all_groups_around_counts(tmp_path):
    machine = Machine(tmp_path, pairs(8))
    for folder, text in (("box/app/", "600000 100000"), ("box/", "300000 100000"), ("", "max 100000")):
        machine.group(f"{folder}cpu.max", text)
    assert machine.cores().threads == 3


def test_control_groups_of_version_1(tmp_path):
    machine = Machine(tmp_path, pairs(8))
    write(machine.proc / "self" / "cgroup", "4:memory:/a\n3:cpu,cpuacct:/a")
    machine.group("cpu/a/cpu.cfs_quota_us", "350000")
    machine.group("cpu/a/cpu.cfs_period_us", "100000")
    assert machine.cores().threads == 3
    machine.group("cpu/a/cpu.cfs_quota_us", "-1")
    assert machine.cores().quota is None


@pytest.mark.parametrize("text", ["", "100000", "-5 100000", "200000 0", "many 100000", "1e5 1e5"])
def test_a_quota_that_is_none_is_no_limit(tmp_path, text):
    machine = Machine(tmp_path, pairs(2))
    machine.group("cpu.max", text)
    assert machine.cores().quota is None


def test_efficient_cores_of_intel_are_left_out(tmp_path):
    """Six fast cores of two hardware threads, eight slow ones of one."""
    machine = Machine(tmp_path, [(2 * core, 2 * core + 1) for core in range(6)] + [(cpu,) for cpu in range(12, 20)])
    write(machine.sysfs / "devices" / "cpu_core" / "cpus", "0-11")
    write(machine.sysfs / "devices" / "cpu_atom" / "cpus", "12-19")
    assert machine.cores() == Cores(20, 14, 6)
    assert str(machine.cores()) == "14 physical cores, 20 hardware threads, 6 of them fast"
    assert machine.cores(12, 13, 14, 15).threads == 4, "only slow cores are allowed: all of them count"


def test_capacities_of_arm_leave_out_slow_cores_but_not_all_others(tmp_path):
    """A phone's one prime core, three large and four small ones: the large ones are near enough."""
    machine = Machine(tmp_path, [(cpu,) for cpu in range(8)])
    for cpu, capacity in enumerate((1024, 900, 900, 900, 280, 280, 280, 280)):
        machine.of_cpu(cpu, "cpu_capacity", str(capacity))
    assert machine.cores() == Cores(8, 8, 4)


def test_memory_nodes_are_those_of_the_allowed_cores(tmp_path):
    machine = Machine(tmp_path, [(cpu,) for cpu in range(8)])
    for node, cpus in enumerate(("0-3", "4-7", "")):  # the third one has memory only
        write(machine.sysfs / "devices" / "system" / "node" / f"node{node}" / "cpulist", cpus)
    assert (machine.cores().nodes, machine.cores(4, 5).nodes) == (2, 1)
    assert str(machine.cores()).endswith("2 memory nodes")


@pytest.mark.parametrize("text", ["1-", "-3", "a-b", "0-99999999999", ","])
def test_a_malformed_list_of_processors_is_bounded(text):
    assert len(module._listed(text)) <= 1 + (1 << 16)


def test_fast_cores_of_a_mac(monkeypatch):
    said = "hw.logicalcpu: 10\nhw.physicalcpu: 10\nhw.perflevel0.physicalcpu: 4\n"
    monkeypatch.setattr(module.sys, "platform", "darwin")
    monkeypatch.setattr(module.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(module.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, said, ""))
    assert cores() == Cores(10, 10, 4)
