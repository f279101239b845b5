"""A captured step on a CUDA device."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any

from tinygrad import UOp

from tinyvllm.backends.cuda import nvrtc
from tinyvllm.backends.cuda.driver import driver_version
from tinyvllm.bridge import EdgeData, GraphKernel, Launch, StepGraph, architecture, cuda_driver, cuda_runtime, kernel_timer, opened_device

PROGRAMMATIC = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC and CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC


def overlaps(device: str) -> bool:
    """Whether our kernels wait for the one before by themselves, and the driver knows such edges."""
    return nvrtc.waits(architecture(device)) and driver_version() >= 12030


class CudaGraph(StepGraph):
    """A captured step on a CUDA device: one graph whose kernels form a straight line.

    tinygrad's own graph gives no kernel dynamic shared memory, sets every node that has an argument again at each replay, and derives
    edges from buffers, which are nearly all dependent in a step that the memory planner has packed into one arena. Since CUDA 12.6 the
    driver launches a straight line in constant time ("Constant Time Launch for Straight-Line CUDA Graphs", NVIDIA 2024).

    From Hopper on our own kernels overlap (CUDA's programmatic dependent launch): one begins when all blocks of the one before have nearly
    ended (`begin_next` in kernels/cuda/include/gpu.cuh), requests its weights, and waits in `await_previous`. tinygrad's kernels do not.
    """

    def __init__(self, linear: UOp | Sequence[Launch], input_uops: tuple[UOp, ...] = ()):
        super().__init__(linear, input_uops)
        runtime = cuda_runtime()
        self._cuda, self._check, self._timed = cuda_driver(), runtime.check, runtime.cu_time_execution
        self._context = opened_device(self.device_name).context
        self._check(self._cuda.cuCtxSetCurrent(self._context))
        self._graph, self._instance = self._cuda.CUgraph(), self._cuda.CUgraphExec()
        self._check(self._cuda.cuGraphCreate(ctypes.byref(self._graph), 0))
        self._overlaps = overlaps(self.device_name)
        self._nodes: list[tuple[Any, Any, Any]] = []  # of each kernel: its node, how it is launched, its arguments
        for kernel in self.kernels:
            arguments, packed = runtime.encode_args(kernel.arguments, kernel.integers)
            self._append(kernel, arguments, packed)
        instantiated = self._cuda.cuGraphInstantiate_v2(ctypes.byref(self._instance), self._graph, None, None, 0)
        self._check(instantiated)
        self._addresses = [memory.value for memory in self.memory_of(input_uops)]
        self._values: dict[str, int] | None = {} if not self.vars else None

    def _append(self, kernel: GraphKernel, arguments: Any, packed: Any) -> None:
        grid, block = kernel.info.launch_dims(dict.fromkeys(self.vars, 1))
        no_list = ctypes.cast(0, ctypes.POINTER(ctypes.c_void_p))
        launch = self._cuda.CUDA_KERNEL_NODE_PARAMS_v1(kernel.runtime.prg, *grid, *block, kernel.runtime.smem, no_list, packed)
        node, before = self._cuda.CUgraphNode(), [node for node, _, _ in self._nodes[-1:]]
        edges = (self._cuda.CUgraphNode * 1)(*before) if before else None
        early = bool(before) and self._overlaps and kernel.is_ours
        count = 0 if early else len(before)
        self._check(self._cuda.cuGraphAddKernelNode(ctypes.byref(node), self._graph, edges, count, ctypes.byref(launch)))
        if early:
            to, when = (self._cuda.CUgraphNode * 1)(node), ctypes.byref(EdgeData(from_port=PROGRAMMATIC, type=PROGRAMMATIC))
            self._check(self._cuda.cuGraphAddDependencies_v2(self._graph, edges, to, when, 1))
        self._nodes.append((node, launch, arguments))

    def __call__(self, input_uops: tuple[UOp, ...], var_vals: dict[str, int], wait: bool = False) -> float | None:
        self._check(self._cuda.cuCtxSetCurrent(self._context))
        if (timer := kernel_timer()) is not None:
            self.run_alone(input_uops, var_vals, timer)
            return None
        addresses = [memory.value for memory in self.memory_of(input_uops)]
        self._bind(addresses, {name: var_vals[name] for name in self.vars})
        seconds: float | None = self._timed(lambda: self._check(self._cuda.cuGraphLaunch(self._instance, None)), enable=wait)
        return seconds

    def _bind(self, addresses: list[int], values: dict[str, int]) -> None:
        """Set the nodes again whose arguments have moved or whose variables have changed; usually none."""
        changed = set()
        if addresses != self._addresses:
            for j, replace in enumerate(self.uop_replace):
                for position, i in replace:
                    argument = self.kernels[j].argument_at(position)
                    if addresses[i] != self._addresses[i] and argument >= 0:
                        setattr(self._nodes[j][2], f"f{argument}", addresses[i])
                        changed.add(j)
            self._addresses = addresses
        if values != self._values:
            changed |= self._set(values)
        for j in sorted(changed):
            node, launch, _ = self._nodes[j]
            self._check(self._cuda.cuGraphExecKernelNodeSetParams(self._instance, node, ctypes.byref(launch)))

    def _set(self, values: dict[str, int]) -> set[int]:
        """Put the variables' values into the launches; which kernels they change."""
        changed = set()
        for j, i, value in self.updated_vars(values):
            setattr(self._nodes[j][2], f"v{i}", value)
            changed.add(j)
        for j, grid, block in self.updated_launch_dims(values):
            launch = self._nodes[j][1]
            launch.gridDimX, launch.gridDimY, launch.gridDimZ = (int(d) for d in grid)
            launch.blockDimX, launch.blockDimY, launch.blockDimZ = (int(d) for d in block)
            changed.add(j)
        self._values = values
        return changed

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # not made; or the driver's library is gone, as when the interpreter ends
            self._cuda.cuGraphExecDestroy(self._instance)
            self._cuda.cuGraphDestroy(self._graph)
