"""A captured step on a CUDA device."""

from __future__ import annotations

import ctypes
from typing import Any

from tinygrad import Device, UOp
from tinygrad.engine.jit import GraphRunner

from tinyvllm.bridge.memory import buffer_of


class CudaGraph(GraphRunner):
    """A captured step on a CUDA device: one graph whose kernels stand in line, each behind the one before it.

    tinygrad's own gives no kernel dynamic shared memory, sets every node with an argument again at each replay, and lets edges follow
    from buffers, of which a step that the memory planner has packed into one arena has nearly all. Since CUDA 12.6 the driver launches a
    straight line in constant time ("Constant Time Launch for Straight-Line CUDA Graphs", NVIDIA 2024).
    """

    def __init__(self, linear: UOp, input_uops: tuple[UOp, ...] = ()):
        super().__init__(linear, input_uops)
        from tinygrad.runtime import ops_cuda

        self._cuda, self._check, self._timed = ops_cuda.cuda, ops_cuda.check, ops_cuda.cu_time_execution
        self._context = Device[self.calls[0][2][0].device].context  # type: ignore[attr-defined]
        self._check(self._cuda.cuCtxSetCurrent(self._context))
        self._graph, self._instance = self._cuda.CUgraph(), self._cuda.CUgraphExec()
        self._check(self._cuda.cuGraphCreate(ctypes.byref(self._graph), 0))
        self._nodes: list[tuple[Any, Any, Any]] = []  # of each kernel: its node, how it is launched, its arguments
        self._places: list[list[int]] = []  # of each kernel: which argument a position among the call's buffers is
        for (_, program, bufs, _), runtime in zip(self.calls, self.runtimes, strict=True):
            arguments, packed = ops_cuda.encode_args([bufs[i]._buf for i in program.arg.globals], [0] * len(program.arg.vars))
            self._places.append([program.arg.globals.index(i) if i in program.arg.globals else -1 for i in range(len(bufs))])
            self._append(runtime, program.arg.launch_dims(dict.fromkeys(self.vars, 1)), arguments, packed)
        made = self._cuda.cuGraphInstantiate_v2(ctypes.byref(self._instance), self._graph, None, None, 0)
        self._check(made)
        self._addresses = [buffer_of(u)._buf.value for u in input_uops]
        self._values: dict[str, int] | None = {} if not self.vars else None

    def _append(self, runtime: Any, dims: tuple[Any, Any], arguments: Any, packed: Any) -> None:
        no_list = ctypes.cast(0, ctypes.POINTER(ctypes.c_void_p))
        launch = self._cuda.CUDA_KERNEL_NODE_PARAMS_v1(runtime.prg, *dims[0], *dims[1], runtime.smem, no_list, packed)
        node, before = self._cuda.CUgraphNode(), [node for node, _, _ in self._nodes[-1:]]
        edges = (self._cuda.CUgraphNode * 1)(*before) if before else None
        self._check(self._cuda.cuGraphAddKernelNode(ctypes.byref(node), self._graph, edges, len(before), ctypes.byref(launch)))
        self._nodes.append((node, launch, arguments))

    def __call__(self, input_uops: tuple[UOp, ...], var_vals: dict[str, int], wait: bool = False) -> float | None:
        self._check(self._cuda.cuCtxSetCurrent(self._context))
        self._bind([buffer_of(u)._buf.value for u in input_uops], {name: var_vals[name] for name in self.vars})
        return self._timed(lambda: self._check(self._cuda.cuGraphLaunch(self._instance, None)), enable=wait)

    def _bind(self, addresses: list[int], values: dict[str, int]) -> None:
        """Set again the nodes whose arguments have moved or whose variables have changed; mostly none."""
        changed = set()
        if addresses != self._addresses:
            for j, replace in enumerate(self.uop_replace):
                for position, i in replace:
                    if addresses[i] != self._addresses[i] and self._places[j][position] >= 0:
                        setattr(self._nodes[j][2], f"f{self._places[j][position]}", addresses[i])
                        changed.add(j)
            self._addresses = addresses
        if values != self._values:
            for j, i, value in self.updated_vars(values):
                setattr(self._nodes[j][2], f"v{i}", value)
                changed.add(j)
            for j, grid, block in self.updated_launch_dims(values):
                launch = self._nodes[j][1]
                launch.gridDimX, launch.gridDimY, launch.gridDimZ = (int(d) for d in grid)
                launch.blockDimX, launch.blockDimY, launch.blockDimZ = (int(d) for d in block)
                changed.add(j)
            self._values = values
        for j in sorted(changed):
            node, launch, _ = self._nodes[j]
            self._check(self._cuda.cuGraphExecKernelNodeSetParams(self._instance, node, ctypes.byref(launch)))

    def __del__(self) -> None:
        if hasattr(self, "_instance"):
            self._cuda.cuGraphExecDestroy(self._instance)
            self._cuda.cuGraphDestroy(self._graph)
