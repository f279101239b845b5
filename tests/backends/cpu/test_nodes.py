"""Weights over the memory nodes of a machine that is files, by system calls that are recorded."""

from __future__ import annotations

import ctypes
import errno
import sys
import threading
from pathlib import Path

import pytest

from tinyvllm.backends.cpu import nodes as module
from tinyvllm.backends.cpu.nodes import over_memory_nodes


class System:
    """The folder /sys of a machine with four processors, and what it was asked to do with memory."""

    def __init__(self, folder: Path):
        self.sysfs, self.calls = folder, []
        self.policy, self.refusal = 0, 0

    def node(self, number: int, cpus: str) -> None:
        place = self.sysfs / "devices" / "system" / "node" / f"node{number}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(cpus + "\n")

    def call(self, which: int, *arguments) -> int:
        if which == 1:
            arguments[0]._obj.value = self.policy
            return self.refusal
        policy, mask, bits = arguments
        self.calls.append(
            (policy, [] if mask is None else [64 * i + b for i, word in enumerate(mask) for b in range(64) if word >> b & 1], bits)
        )
        return self.refusal


@pytest.fixture
def system(tmp_path, monkeypatch):
    made = System(tmp_path)
    monkeypatch.setattr(module, "_call", made.call)
    monkeypatch.setattr(module.sys, "platform", "linux")
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    return made


def test_pages_are_taken_from_the_nodes_of_the_cores_in_turn(system):
    for number, cpus in ((0, "0-1"), (2, "2-3"), (3, ""), (70, "8-9")):
        system.node(number, cpus)
    with over_memory_nodes(system.sysfs):
        assert system.calls == [(3, [0, 2], 1025)]
    assert system.calls[1:] == [(0, [], 0)]


def test_an_error_while_loading_ends_it_too(system):
    system.node(0, "0-1"), system.node(1, "2-3")
    with pytest.raises(MemoryError), over_memory_nodes(system.sysfs):
        raise MemoryError
    assert [policy for policy, *_ in system.calls] == [3, 0]


@pytest.mark.parametrize("cpus", [[], ["0-3"], ["0-3", "4-7"]])
def test_one_node_changes_nothing(system, cpus):
    for number, each in enumerate(cpus):
        system.node(number, each)
    with over_memory_nodes(system.sysfs):
        pass
    assert system.calls == []


def test_a_policy_of_the_process_stays(system, caplog):
    system.node(0, "0-1"), system.node(1, "2-3")
    system.policy = 2
    with over_memory_nodes(system.sysfs):
        pass
    assert system.calls == [] and caplog.text == ""


def test_a_refusal_is_one_line(system, caplog):
    system.node(0, "0-1"), system.node(1, "2-3")
    system.refusal = errno.EPERM
    with over_memory_nodes(system.sysfs):
        pass
    assert system.calls == [] and "one of 2: Operation not permitted; in a container, allow set_mempolicy" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="policies of Linux")
def test_the_system_takes_the_policy(tmp_path, monkeypatch):
    """The real calls, as if this machine's node were two."""
    found = []

    def policy() -> int:
        held = ctypes.c_int(-1)
        assert module._call(1, ctypes.byref(held), None, 0, None, 0) == 0
        return held.value

    if module._call(1, ctypes.byref(ctypes.c_int()), None, 0, None, 0):
        pytest.skip("this system does not tell its policy")
    monkeypatch.setattr(module, "memory_nodes", lambda sysfs, allowed: (0, 1))
    with over_memory_nodes():
        found.append(policy())
        worker = threading.Thread(target=lambda: found.append(policy()))
        worker.start()
        worker.join()
    assert [*found, policy()] == [3, 3, 0]
