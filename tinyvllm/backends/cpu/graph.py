"""A captured step on the CPU device."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from tinygrad import UOp

from tinyvllm.backends.cpu.launch import solo_team
from tinyvllm.backends.cpu.threads import ALONE, CORES, MAX_ARGUMENTS, TEAM, ThreadPool, thread_pool
from tinyvllm.bridge import (
    GraphKernel,
    JobGraph,
    KernelTimer,
    Launch,
    code_address,
    host_address,
    kernel_timer,
    release_deferred,
    synchronize,
)


class CpuGraph(JobGraph):
    """A captured step on the CPU device: one list of kernels, hand-written and generated ones, that the thread pool runs as one job.

    tinygrad's own graph launches them from its Python worker thread one by one, 6 to 9 us each, and 67 us if a kernel uses several cores.
    """

    def __init__(self, linear: UOp | Sequence[Launch], input_uops: tuple[UOp, ...] = ()):
        super().__init__(linear, input_uops)
        team, words = host_address(solo_team()), []
        self._inputs: list[tuple[int, int]] = []  # (place in the list, number of the input there)
        self._values: dict[str, list[int]] = {}  # where the list has each variable
        for j, kernel in enumerate(self.kernels):
            header, arguments = _encoded(kernel, team)
            words += header
            start = len(words)
            self._inputs += [(start + position, i) for position, i in self.uop_replace[j]]
            for i, v in self.var_vals_replace.get(j, ()):
                self._values.setdefault(self.vars[v], []).append(start + len(kernel.info.globals) + i)
            words += arguments
        self._list = np.array(words, np.int64)
        self._pool = thread_pool()

    def __call__(self, input_uops: tuple[UOp, ...], var_vals: dict[str, int], wait: bool = False) -> float | None:
        self.bind(input_uops, var_vals)
        start = time.perf_counter()
        self.run([self], 1)
        return time.perf_counter() - start if wait else None

    def bind(self, input_uops: tuple[UOp, ...], var_vals: dict[str, int]) -> None:
        memory = self.memory_of(input_uops) if self._inputs else []
        for place, i in self._inputs:  # no loop over the kernels: 0.1 ms at 290
            self._list[place] = memory[i].va_addr
        for name, places in self._values.items():
            self._list[places] = var_vals[name]

    @staticmethod
    def run(graphs: Sequence[CpuGraph], times: int) -> None:
        """Run the graphs' lists as one, `times` times, once tinygrad's own queue is empty."""
        words = graphs[0]._list if len(graphs) == 1 else np.concatenate([graph._list for graph in graphs])
        synchronize(graphs[0].device_name)
        release_deferred()
        pool = graphs[0]._pool
        timer = kernel_timer() if times == 1 else None
        if timer is None:
            pool.run(words, sum(len(graph.kernels) for graph in graphs), times)
        else:
            run_timed(pool, words, [launch for graph in graphs for launch in graph.launches], timer)


def run_timed(pool: ThreadPool, words: np.ndarray, launches: Sequence[Launch], timer: KernelTimer) -> None:
    """Run a list once, and time its kernels: each from the end of the one before to the barrier after it."""
    marks, before = np.zeros(len(launches) + 1, np.int64), pool.clock()
    pool.run(words, len(launches), 1, marks)
    (ticks, seconds), (end_ticks, end_seconds) = before, pool.clock()
    starts = seconds + (marks - ticks) * ((end_seconds - seconds) / max(1, end_ticks - ticks))
    timer.times += [
        launch.timed(start, end - start) for launch, start, end in zip(launches, starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ]
    timer.spent += pool.clock()[1] - end_seconds


def _encoded(kernel: GraphKernel, team: int) -> tuple[list[int], list[int]]:
    """A kernel in the list of thread_pool.c: its header, and its arguments. `team` is the address that marks a hand-written kernel."""
    info, arguments = kernel.info, [memory.va_addr for memory in kernel.arguments]
    hand_written = bool(arguments) and arguments[-1] == team
    if hand_written:
        arguments.pop()
    place = len(arguments) + info.runtimevars["core_id"] if "core_id" in info.runtimevars else 0
    cores = int(info.global_size[0]) if "core_id" in info.runtimevars else 1
    kind = TEAM if hand_written else CORES if cores > 1 else ALONE
    arguments += [0] * len(info.vars)
    limit = MAX_ARGUMENTS - 1
    assert len(arguments) <= limit, f"{info.name} takes {len(arguments)} arguments, the thread pool passes up to {limit}"
    return [code_address(kernel.runtime), kind, len(arguments), place, cores], arguments
