"""A captured step on a Metal device."""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any

from tinygrad import UOp, dtypes, helpers
from tinygrad.device import Buffer, Device
from tinygrad.engine.jit import GraphRunner
from tinygrad.uop.ops import Ops

from tinyvllm.backends.metal.queue import queue_of
from tinyvllm.bridge.memory import buffer_of
from tinyvllm.errors import KernelError

MOST_BUFFERS = 31
_FARTHEST = 0xFFFFFFFF  # an offset of more than 32 bits is cut off in a replay


class MetalGraph(GraphRunner):
    """A captured step on a Metal device: one indirect command buffer, each command behind the one before it.

    It is encoded once; a replay names the memory that it touches and executes it, in a command buffer of a few words. tinygrad's own waits
    at every replay for the one before, as it might change the commands; this one waits only where an argument has moved or a variable has
    changed. tinygrad's also takes the buffers of a call for the arguments of its kernel, which may have fewer.
    """

    def __init__(self, linear: UOp, input_uops: tuple[UOp, ...] = ()):
        super().__init__(linear, input_uops)
        from tinygrad.runtime.autogen import metal

        name = self.calls[0][2][0].device
        self._metal, self._queue = metal, queue_of(name)
        self._opened: Any = Device[name]
        self._last: Any = None  # the command buffer of the last replay
        self._commands = self._new_commands()
        self._numbers = Buffer(name, max(1, len(self.vars)), dtypes.int32, preallocate=True)
        self._values: dict[str, int] | None = {} if not self.vars else None
        self._fixed = [self._numbers._buf.buf] if self.vars else []
        for j in range(len(self.calls)):
            self._encode(j)
        self._inputs = [buffer_of(u)._buf for u in input_uops]
        self._pipelines = list(dict.fromkeys(runtime.pipeline_state for runtime in self.runtimes if runtime is not None))
        self._used = self._resources()
        apple = self._opened.arch.removeprefix("Apple")
        self._needs_pipelines = not apple.isdecimal() or int(apple) < 9  # M1 and M2 lose pipelines that only indirect commands name

    def _new_commands(self) -> Any:
        metal = self._metal
        wanted = metal.MTLIndirectCommandBufferDescriptor.new()
        wanted.setCommandTypes(metal.MTLIndirectCommandTypeConcurrentDispatch)
        wanted.setInheritBuffers(False)
        wanted.setInheritPipelineState(False)
        wanted.setMaxKernelBufferBindCount(MOST_BUFFERS)
        made = self._opened.sysdevice.newIndirectCommandBufferWithDescriptor_maxCommandCount_options(wanted, len(self.calls), 0)
        if made.value is None:
            raise KernelError(f"launch: Metal refuses an indirect command buffer of {len(self.calls)} commands; try JIT=0")
        return made

    def _encode(self, j: int) -> None:
        """Command j, from nothing. Arguments that a replay may move stand as they are at the capture."""
        _, program, bufs, _ = self.calls[j]
        info = program.arg
        runtime: Any = self.runtimes[j]
        command = self._commands.indirectComputeCommandAtIndex(j).retained()
        command.setComputePipelineState(runtime.pipeline_state)
        for place, i in enumerate(info.globals):
            self._bind(command, bufs[i]._buf, place)
            self._fixed.append(bufs[i]._buf.buf)
        for i, variable in enumerate(info.vars):
            place = len(info.globals) + i
            command.setKernelBuffer_offset_atIndex(self._numbers._buf.buf, 4 * self.vars.index(variable.expr), place)
        grid, threads = info.launch_dims(dict.fromkeys(self.vars, 1))
        self._dispatch(command, grid, threads, runtime)
        command.setBarrier()

    @staticmethod
    def _bind(command: Any, memory: Any, place: int) -> None:
        if memory.offset > _FARTHEST or place >= MOST_BUFFERS:
            raise KernelError(f"launch: argument {place} at byte {memory.offset} of its buffer; Metal takes {MOST_BUFFERS}, below 4 GiB")
        command.setKernelBuffer_offset_atIndex(memory.buf, memory.offset, place)

    def _dispatch(self, command: Any, grid: Any, threads: Any, runtime: Any) -> None:
        if prod(threads) > runtime.max_total_threads:
            most = runtime.max_total_threads
            raise KernelError(f"launch: {runtime.name} has {prod(threads)} threads a group, and this GPU runs at most {most} of it")
        size = self._metal.MTLSize
        command.concurrentDispatchThreadgroups_threadsPerThreadgroup(size(*map(int, grid)), size(*map(int, threads)))

    def _resources(self) -> Any:
        """All memory that the commands touch, each buffer once, as Metal takes it."""
        every = list(dict.fromkeys([*self._fixed, *(memory.buf for memory in self._inputs)]))
        return (self._metal.MTLBuffer * len(every))(*every)

    def __call__(self, input_uops: tuple[UOp, ...], var_vals: dict[str, int], wait: bool = False) -> float | None:
        self._update([buffer_of(u)._buf for u in input_uops], {name: var_vals[name] for name in self.vars})
        work, metal = self._queue.command_buffer(f"batched {len(self.calls)}"), self._metal
        encoder = work.computeCommandEncoder().retained()
        resources = ctypes.cast(self._used, ctypes.POINTER(metal.MTLResource))
        encoder.useResources_count_usage(resources, len(self._used), metal.MTLResourceUsageRead | metal.MTLResourceUsageWrite)
        if helpers.getenv("FIX_METAL_ICB", int(self._needs_pipelines)):  # tinygrad's switch, and its way to hold them: launches of nothing
            for pipeline in self._pipelines:
                encoder.setComputePipelineState(pipeline)
                encoder.dispatchThreadgroups_threadsPerThreadgroup(metal.MTLSize(0, 0, 0), metal.MTLSize(0, 0, 0))
        encoder.executeCommandsInBuffer_withRange(self._commands, metal.NSRange(0, len(self.calls)))
        encoder.endEncoding()
        self._queue.commit(work)
        self._last = work
        if not wait:
            return None
        self._queue.wait(work)
        return float(work.GPUEndTime() - work.GPUStartTime())

    def _update(self, inputs: list[Any], values: dict[str, int]) -> None:
        """Change what has moved or has another value; mostly nothing. Commands that are being executed must not be touched."""
        places = [(memory.buf.value, memory.offset) for memory in inputs]
        moved = [place != (memory.buf.value, memory.offset) for place, memory in zip(places, self._inputs, strict=True)]
        if not any(moved) and values == self._values:
            return
        if self._last is not None:
            self._queue.wait(self._last)
        if any(moved):
            for j, replace in enumerate(self.uop_replace):
                taken = self.calls[j][1].arg.globals
                for position, i in replace:
                    if moved[i] and position in taken:
                        self._bind(self._commands.indirectComputeCommandAtIndex(j).retained(), inputs[i], taken.index(position))
            self._inputs = inputs
            self._used = self._resources()
        if values != self._values:
            self._set(values)

    def _set(self, values: dict[str, int]) -> None:
        memory = self._numbers._buf
        numbers = (ctypes.c_int32 * len(self.vars)).from_address(memory.buf.contents() + memory.offset)
        numbers[:] = [values[name] for name in self.vars]
        for j, grid, threads in self.updated_launch_dims(values):
            self._dispatch(self._commands.indirectComputeCommandAtIndex(j).retained(), grid, threads, self.runtimes[j])
        self._values = values

    @staticmethod
    def supports_uop(batch_devs: list[Any], new_call: UOp) -> bool:
        """Whether a call can be a command: a kernel of one device whose arguments lie within 4 GiB of their buffers' beginning."""
        far = (u.op is Ops.BUFFER_VIEW and u.arg[1] * u.dtype.itemsize > _FARTHEST for u in new_call.src[1:])
        return not any(far) and GraphRunner.supports_uop(batch_devs, new_call)

    @helpers.suppress_finalizing
    def __del__(self) -> None:
        if getattr(self, "_last", None) is not None:
            self._last.waitUntilCompleted()  # what it executes goes with this object
