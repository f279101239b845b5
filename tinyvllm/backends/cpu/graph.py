"""A captured step on the CPU device."""

from __future__ import annotations

import time

import numpy as np
from tinygrad import Device, UOp
from tinygrad.engine.jit import GraphRunner

from tinyvllm.backends.cpu.threads import ALONE, CORES, MAX_ARGUMENTS, TEAM, thread_pool
from tinyvllm.bridge.cpu_free import let_go
from tinyvllm.bridge.memory import buffer_of
from tinyvllm.bridge.node import code_address, solo_team


class CpuGraph(GraphRunner):
    """A captured step on the CPU device: one list of kernels, hand-written and generated alike, that the crew runs as one job.

    tinygrad's own graph goes through its Python worker kernel by kernel, 6 to 9 us each, and 67 us where one wants several cores.
    """

    def __init__(self, linear: UOp, input_uops: tuple[UOp, ...] = ()):
        super().__init__(linear, input_uops)
        team, words = buffer_of(solo_team().uop)._buf.va_addr, []
        self._starts = []  # of each kernel's arguments in the list
        for (_, program, bufs, _), runtime in zip(self.calls, self.runtimes, strict=True):
            info = program.arg
            arguments = [bufs[i]._buf.va_addr for i in info.globals]
            ours = bool(arguments) and arguments[-1] == team
            if ours:
                arguments.pop()
            place = len(arguments) + info.runtimevars["core_id"] if "core_id" in info.runtimevars else 0
            cores = int(info.global_size[0]) if "core_id" in info.runtimevars else 1
            kind = TEAM if ours else CORES if cores > 1 else ALONE
            arguments += [0] * len(info.vars)
            assert len(arguments) < MAX_ARGUMENTS, f"{info.name} takes {len(arguments)} arguments, the crew passes {MAX_ARGUMENTS - 1}"
            words += [code_address(runtime), kind, len(arguments), place, cores]
            self._starts.append(len(words))
            words += arguments
        self._list = np.array(words, np.int64)
        self._buffers = [[bufs[i] for i in program.arg.globals] for _, program, bufs, _ in self.calls]  # their addresses are in use
        self._pool = thread_pool()

    def __call__(self, input_uops: tuple[UOp, ...], var_vals: dict[str, int], wait: bool = False) -> float | None:
        self.bind(input_uops, var_vals)
        start = time.perf_counter()
        self.run([self], 1)
        return time.perf_counter() - start if wait else None

    def bind(self, input_uops: tuple[UOp, ...], var_vals: dict[str, int]) -> None:
        """Put the inputs' addresses and the variables' values into the list."""
        for j, replace in enumerate(self.uop_replace):
            for position, i in replace:
                self._list[self._starts[j] + position] = buffer_of(input_uops[i])._buf.va_addr
        for j, i, value in self.updated_vars(var_vals):
            self._list[self._starts[j] + len(self._buffers[j]) + i] = value

    @staticmethod
    def run(graphs: list[CpuGraph], times: int) -> None:
        """Run the graphs' lists as one, `times` times over, when tinygrad's own queue is empty."""
        words = graphs[0]._list if len(graphs) == 1 else np.concatenate([graph._list for graph in graphs])
        Device[graphs[0].calls[0][2][0].device].synchronize()
        let_go()
        graphs[0]._pool.run(words, sum(len(graph.calls) for graph in graphs), times)
