"""Processes of an engine on the memory nodes of a machine that is files, by system calls that are recorded, and once by real ones."""

from __future__ import annotations

import errno
import os
import sys
import threading
from pathlib import Path

import pytest

from tests.backends.cpu.test_cores import write
from tinyvllm.backends.cpu import binding as module
from tinyvllm.backends.cpu import nodes, threads
from tinyvllm.backends.cpu.binding import bind, bound, divide, release, unbound
from tinyvllm.config.engine import DEFAULT_MODEL, EngineConfig, resolve
from tinyvllm.placement import CoreShare
from tinyvllm.runner.grid import core_share


class System:
    """The folder /sys of a machine with eight processors, and where each thread runs."""

    def __init__(self, folder: Path):
        self.sysfs, self.threads, self.refusal = folder, {}, 0

    def nodes(self, *cpus: str) -> System:
        for number, each in enumerate(cpus):
            write(self.sysfs / "devices" / "system" / "node" / f"node{number}" / "cpulist", each)
        return self

    def get(self, thread: int) -> set[int]:
        return set(self.threads.get(thread or threading.get_native_id(), range(8)))

    def set(self, thread: int, cpus: set[int]) -> None:
        if self.refusal:
            raise OSError(self.refusal, os.strerror(self.refusal))
        self.threads[thread or threading.get_native_id()] = set(cpus)

    @property
    def own(self) -> set[int]:
        return self.get(0)


@pytest.fixture
def system(tmp_path, monkeypatch):
    made = System(tmp_path)
    monkeypatch.setattr(module.sys, "platform", "linux")
    monkeypatch.setattr(module.os, "sched_getaffinity", made.get, raising=False)
    monkeypatch.setattr(module.os, "sched_setaffinity", made.set, raising=False)
    monkeypatch.delenv("TINYVLLM_BIND", raising=False)
    yield made
    release()


def share(count: int, index: int, *same_weights: int) -> CoreShare:
    return CoreShare(count, index, same_weights or (index,))


@pytest.mark.parametrize(
    ("count", "numbers", "expected"),
    [
        (2, [0, 1], [(0,), (1,)]),
        (4, [0, 1], [(0,), (0,), (1,), (1,)]),
        (2, [0, 1, 2, 3], [(0, 1), (2, 3)]),
        (2, [1, 5], [(1,), (5,)]),
        (6, [0, 1, 2], [(0,), (0,), (1,), (1,), (2,), (2,)]),
    ],
)
def test_neighbours_are_together(count, numbers, expected):
    assert divide({number: [2 * number, 2 * number + 1] for number in numbers}, count) == expected


@pytest.mark.parametrize(
    ("nodes", "count", "why"), [(("0-3", "4-5"), 2, "from 2 to 4 processors"), (("0-1", "2-3", "4-5"), 2, "2 processes on 3 nodes")]
)
def test_what_cannot_be_divided_equally_stays_unbound_and_is_said(system, caplog, nodes, count, why):
    bind(share(count, 0), system.nodes(*nodes).sysfs)
    assert bound() is None and system.threads == {}
    assert "cores: processes are not bound to memory nodes: " in caplog.text and why in caplog.text


def test_a_thread_has_its_nodes_until_it_is_released(system):
    system.nodes("0-1,4-5", "2-3,6-7")
    bind(share(2, 1), system.sysfs)
    assert system.own == {2, 3, 6, 7}
    with unbound():
        assert system.own == set(range(8))
    assert system.own == {2, 3, 6, 7}
    bind(share(2, 0), system.sysfs)
    assert system.own == {0, 1, 4, 5}, "all is divided again, and not what was left"
    release()
    assert system.own == set(range(8)) and bound() is None


def test_affinity_that_the_process_has_is_divided(system):
    system.nodes("0-3", "4-7")
    system.threads[threading.get_native_id()] = {1, 2, 5, 6}
    bind(share(2, 1), system.sysfs)
    assert system.own == {5, 6}
    release()
    assert system.own == {1, 2, 5, 6}


@pytest.mark.parametrize("why", ["one node", "one process", "a GPU", "switched off", "another system"])
def test_nothing_is_bound(system, monkeypatch, why, caplog):
    system.nodes(*(["0-7"] if why == "one node" else ["0-3", "4-7"]))
    if why == "switched off":
        monkeypatch.setenv("TINYVLLM_BIND", "0")
    if why == "another system":
        monkeypatch.setattr(module.sys, "platform", "darwin")
    bind({"one process": CoreShare(), "a GPU": CoreShare(2)}.get(why, share(2, 0)), system.sysfs)
    assert system.threads == {} and bound() is None and caplog.text == ""


def test_a_refusal_is_one_line(system, caplog):
    system.refusal = errno.EPERM
    bind(share(2, 0), system.nodes("0-3", "4-7").sysfs)
    assert bound() is None and "Operation not permitted; in a container, allow sched_setaffinity" in caplog.text


def test_only_the_bound_thread_is_let_loose(system):
    bind(share(2, 0), system.nodes("0-3", "4-7").sysfs)
    seen = []

    def other() -> None:
        with unbound():
            seen.append(system.threads)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert [{*map(frozenset, found.values())} for found in seen] == [{frozenset({0, 1, 2, 3})}]


def test_a_thread_that_has_ended_is_left_alone(system):
    system.nodes("0-3", "4-7")
    thread = threading.Thread(target=lambda: bind(share(2, 0), system.sysfs))
    thread.start()
    thread.join()
    before = dict(system.threads)
    assert bound() is not None
    release()
    assert system.threads == before and bound() is None


@pytest.mark.parametrize(("same_weights", "expected"), [((0,), []), ((0, 1), []), ((0, 2), [0, 1]), ((0, 1, 2, 3), [0, 1])])
def test_weights_are_on_the_nodes_of_all_that_map_them(system, monkeypatch, same_weights, expected):
    calls = []
    monkeypatch.setattr(nodes, "_spread", lambda numbers: calls.append([*numbers]) or False)
    bind(share(4, 0, *same_weights), system.nodes("0-3", "4-7").sysfs)
    with nodes.over_memory_nodes(system.sysfs):
        pass
    assert calls == ([expected] if expected else [])


def test_threads_are_counted_over_all_nodes(system, monkeypatch):
    monkeypatch.delenv("TINYVLLM_THREADS", raising=False)
    monkeypatch.setattr(threads, "_share", [CoreShare()])
    monkeypatch.setattr(threads, "bind", lambda share: bind(share, system.nodes("0-3", "4-7").sysfs))
    threads.share_cores(share(4, 3))
    assert system.own == {4, 5, 6, 7} and threads.num_threads_wanted() == 2
    assert threads.threads_in_words().endswith("shared by 4 ranks, bound to memory node 1)")


def config(**given: object) -> EngineConfig:
    return resolve(DEFAULT_MODEL, environ={}, **given)


SIZES = "tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size", "data_parallel_size", "data_parallel_rank"


@pytest.mark.parametrize(
    ("sizes", "rank", "expected"),
    [
        ((2, 1, 1, 1, None), 1, share(2, 1, 1)),
        ((2, 2, 1, 1, None), 2, share(4, 2, 2, 3)),
        ((1, 2, 2, 1, None), 3, share(4, 3, 2, 3)),
        ((1, 1, 1, 2, None), 0, share(2, 0, 0, 1)),
        ((2, 1, 1, 2, 1), 1, share(4, 3, 1, 3)),
        ((1, 1, 1, 1, None), 0, CoreShare()),
    ],
)
def test_the_place_of_a_rank(sizes, rank, expected):
    assert core_share(config(device="CPU", **dict(zip(SIZES, sizes, strict=True))), rank) == expected


def test_ranks_on_gpus_have_no_place():
    assert core_share(config(device="CUDA", tensor_parallel_size=2)) == CoreShare(2)


@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="two processors of Linux")
def test_the_system_binds_a_thread_and_what_it_starts(monkeypatch):
    """The real calls, as if two processors were two nodes."""
    before = os.sched_getaffinity(0)
    first, second = sorted(before)[:2]
    monkeypatch.setattr(module, "memory_nodes", lambda sysfs, allowed: {0: [first], 1: [second]})
    found = []

    def thread() -> None:
        worker = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        worker.start()
        worker.join()

    bind(share(2, 1))
    thread()
    with unbound():
        thread()
    release()
    assert found == [{second}, before] and os.sched_getaffinity(0) == before
