"""A captured step on a Metal device."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from math import prod
from typing import Any

from tinygrad import UOp, dtypes

from tinyvllm.backends.metal.launch import MAX_BUFFERS
from tinyvllm.backends.metal.queue import MAX_OFFSET, queue_of
from tinyvllm.bridge import (
    Launch,
    StepGraph,
    device_buffer,
    kernel_timer,
    metal_bindings,
    opened_device,
    tinygrad_setting,
)
from tinyvllm.errors import KernelError


class MetalGraph(StepGraph):
    """A captured step on a Metal device: one indirect command buffer whose commands run one after the other.

    It is encoded once; a replay names the memory that it uses and executes it, in a command buffer of a few words. tinygrad's own graph
    waits at every replay for the previous one, because it might change the commands; this one waits only if an argument has moved or a
    variable has changed. tinygrad's also takes all buffers of a call for arguments of its kernel, which may have fewer.
    """

    max_view_offset = MAX_OFFSET

    def __init__(self, linear: UOp | Sequence[Launch], input_uops: tuple[UOp, ...] = ()):
        super().__init__(linear, input_uops)
        name = self.device_name
        self._metal, self._queue = metal_bindings(), queue_of(name)
        self._opened = opened_device(name)
        self._last: list[Any] = []  # the command buffer of the last replay
        weakref.finalize(self, _wait_for, self._last).atexit = False
        self._commands = self._new_commands()
        self._numbers = device_buffer(name, max(1, len(self.vars)), dtypes.int32)
        self._values: dict[str, int] | None = {} if not self.vars else None
        # by Metal's handle: what commands use whatever the inputs are, and whether one of them writes it
        self._fixed: dict[int, Any] = {}
        self._written: set[int] = set()
        self._written_inputs: set[int] = set()
        if self.vars:
            self._fixed[self._numbers._buf.buf.value] = self._numbers._buf.buf
        for j in range(len(self.kernels)):
            self._encode(j)
        self._inputs = self.memory_of(input_uops)
        self._pipelines = list(dict.fromkeys(runtime.pipeline_state for runtime in self.runtimes if runtime is not None))
        self._used = self._resources()
        apple = self._opened.arch.removeprefix("Apple")
        self._needs_pipelines = not apple.isdecimal() or int(apple) < 9  # M1 and M2 lose pipelines that only indirect commands reference

    def _new_commands(self) -> Any:
        metal = self._metal
        descriptor = metal.MTLIndirectCommandBufferDescriptor.new()
        descriptor.setCommandTypes(metal.MTLIndirectCommandTypeConcurrentDispatch)
        descriptor.setInheritBuffers(False)
        descriptor.setInheritPipelineState(False)
        descriptor.setMaxKernelBufferBindCount(MAX_BUFFERS)
        count = len(self.kernels)
        commands = self._opened.sysdevice.newIndirectCommandBufferWithDescriptor_maxCommandCount_options(descriptor, count, 0)
        if commands.value is None:
            raise KernelError(f"launch: Metal refuses an indirect command buffer of {count} commands; try JIT=0")
        return commands

    def _encode(self, j: int) -> None:
        """Encode command j. Arguments that a replay may move are as at the capture."""
        kernel = self.kernels[j]
        info = kernel.info
        command = self._commands.indirectComputeCommandAtIndex(j).retained()
        command.setComputePipelineState(kernel.runtime.pipeline_state)
        inputs, written = dict(self.uop_replace[j]), set(info.outs)
        for place, (position, memory) in enumerate(zip(info.globals, kernel.arguments, strict=True)):
            self._bind(command, memory, place)
            if position in inputs:
                self._written_inputs |= {inputs[position]} if position in written else set()
                continue
            self._fixed[memory.buf.value] = memory.buf
            self._written |= {memory.buf.value} if position in written else set()
        for i, variable in enumerate(info.vars):
            place = len(info.globals) + i
            command.setKernelBuffer_offset_atIndex(self._numbers._buf.buf, 4 * self.vars.index(variable.expr), place)
        grid, threads = info.launch_dims(dict.fromkeys(self.vars, 1))
        self._dispatch(command, grid, threads, kernel.runtime)
        command.setBarrier()

    @staticmethod
    def _bind(command: Any, memory: Any, place: int) -> None:
        if memory.offset > MAX_OFFSET or place >= MAX_BUFFERS:
            raise KernelError(f"launch: argument {place} at byte {memory.offset} of its buffer; Metal takes {MAX_BUFFERS}, below 4 GiB")
        command.setKernelBuffer_offset_atIndex(memory.buf, memory.offset, place)

    def _dispatch(self, command: Any, grid: Any, threads: Any, runtime: Any) -> None:
        if prod(threads) > runtime.max_total_threads:
            limit = runtime.max_total_threads
            raise KernelError(f"launch: {runtime.name} has {prod(threads)} threads per threadgroup; this GPU runs at most {limit} of it")
        size = self._metal.MTLSize
        command.concurrentDispatchThreadgroups_threadsPerThreadgroup(size(*map(int, grid)), size(*map(int, threads)))

    def _resources(self) -> list[tuple[Any, int]]:
        """All memory that the commands use, each buffer once, as Metal takes it: what they only read, and the rest.

        Most of it is weights. Metal tracks hazards by buffer: work that only reads one does not wait for other work that only reads it.
        """
        every = self._fixed | {memory.buf.value: memory.buf for memory in self._inputs}
        written = self._written | {self._inputs[i].buf.value for i in self._written_inputs}
        read = self._metal.MTLResourceUsageRead
        groups = [([], read), ([], read | self._metal.MTLResourceUsageWrite)]  # type: list[tuple[list[Any], int]]
        for handle, buffer in every.items():
            groups[handle in written][0].append(buffer)
        return [((self._metal.MTLBuffer * len(buffers))(*buffers), usage) for buffers, usage in groups if buffers]

    def __call__(self, input_uops: tuple[UOp, ...], var_vals: dict[str, int], wait: bool = False) -> float | None:
        if (timer := kernel_timer()) is not None:
            self.run_alone(input_uops, var_vals, timer)
            return None
        self._update(self.memory_of(input_uops), {name: var_vals[name] for name in self.vars})
        work, metal = self._queue.command_buffer(f"batched {len(self.kernels)}"), self._metal
        encoder = work.computeCommandEncoder().retained()
        for buffers, usage in self._used:
            encoder.useResources_count_usage(ctypes.cast(buffers, ctypes.POINTER(metal.MTLResource)), len(buffers), usage)
        if tinygrad_setting("FIX_METAL_ICB", int(self._needs_pipelines)):  # tinygrad's switch, and its way to keep them: empty launches
            for pipeline in self._pipelines:
                encoder.setComputePipelineState(pipeline)
                encoder.dispatchThreadgroups_threadsPerThreadgroup(metal.MTLSize(0, 0, 0), metal.MTLSize(0, 0, 0))
        encoder.executeCommandsInBuffer_withRange(self._commands, metal.NSRange(0, len(self.kernels)))
        encoder.endEncoding()
        self._queue.commit(work)
        self._last[:] = [work]
        if not wait:
            return None
        self._queue.wait(work)
        return float(work.GPUEndTime() - work.GPUStartTime())

    def _update(self, inputs: list[Any], values: dict[str, int]) -> None:
        """Change what has moved or has another value; usually nothing. Commands that are being executed must not be changed."""
        places = [(memory.buf.value, memory.offset) for memory in inputs]
        moved = [place != (memory.buf.value, memory.offset) for place, memory in zip(places, self._inputs, strict=True)]
        if not any(moved) and values == self._values:
            return
        for work in self._last:
            self._queue.wait(work)
        if any(moved):
            for j, replace in enumerate(self.uop_replace):
                for position, i in replace:
                    if moved[i] and (argument := self.kernels[j].argument_at(position)) >= 0:
                        self._bind(self._commands.indirectComputeCommandAtIndex(j).retained(), inputs[i], argument)
            self._inputs = inputs
            self._used = self._resources()
        if values != self._values:
            self._set(values)

    def _set(self, values: dict[str, int]) -> None:
        memory = self._numbers._buf
        numbers = (ctypes.c_int32 * len(self.vars)).from_address(memory.buf.contents() + memory.offset)
        numbers[:] = [values[name] for name in self.vars]
        for j, grid, threads in self.updated_launch_dims(values):
            self._dispatch(self._commands.indirectComputeCommandAtIndex(j).retained(), grid, threads, self.kernels[j].runtime)
        self._values = values


def _wait_for(works: list[Any]) -> None:
    """Wait until these have completed: what they execute is freed with its graph.

    Not in a `__del__`: in a cycle of garbage the command buffer, or the commands, may have been released before it runs.
    """
    for work in works:
        work.waitUntilCompleted()
