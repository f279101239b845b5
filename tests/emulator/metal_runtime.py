"""Apple's Metal on the emulator: tinygrad's Metal device, our launch code and the kernels run here unchanged, on host memory.

Within `metal_device()` a `Runtime` replaces the libraries that send Objective-C messages and compile, below tinygrad's own bindings: it
checks selectors, argument types, ownership of objects and the request to the compiler as tinygrad makes them. A Runtime records what is
encoded (pipelines, buffers with offsets, grids, barriers, resources) and runs it: when a caller waits for it (even seeds) or at any moment
until then (odd seeds), so that code that reads too early, or changes what is being executed, fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import itertools
import mmap
import os
import random
import re
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests.emulator.emulate import Memory, build, emulate_source, uncollected
from tests.emulator.metal import Signature, signatures, without_comments
from tinyvllm.backends import autotune

MAX_BINDINGS, MAX_THREADS = 31, 1024
COMMITTED, COMPLETED, FAILED = 2, 4, 5  # MTLCommandBufferStatus
_CONCURRENT_DISPATCH = 32  # MTLIndirectCommandTypeConcurrentDispatch
_MODULES = ("tinygrad.runtime.support.objc", "tinygrad.runtime.autogen.metal", "tinygrad.runtime.ops_metal", "tinygrad.runtime.graph.metal")


class MetalError(AssertionError):
    """An error of Metal's validation layer, or a crash: an invalid message, object or state."""


# --- records of encoded work


@dataclass
class Binding:
    """An argument of a launch: `buffer` as `Runtime.buffers` numbers it, or bytes in place of a buffer."""

    buffer: int | None
    offset: int = 0
    data: bytes = b""


@dataclass
class Dispatch:
    """One launch: the function's name, threadgroups, threads of each, arguments by index, and whether a barrier precedes it."""

    name: str
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    bindings: dict[int, Binding]
    barrier: bool = False


@dataclass
class Execute:
    """Commands `first`, `first` + 1, .. of indirect command buffer number `commands`, with the buffers that were declared for it."""

    commands: int
    first: int
    count: int
    resources: tuple[int, ...] = ()
    read_only: tuple[int, ...] = ()  # of these, the ones that were declared for reading


@dataclass
class Copy:
    source: int
    source_offset: int
    to: int
    to_offset: int
    size: int


@dataclass
class Submission:
    """A command buffer that was committed."""

    label: str
    entries: list[Dispatch | Execute | Copy] = field(default_factory=list)


# --- objects. A method's name is its selector, with _ for :.


class Object:
    """An Objective-C object with a reference count, 1 at first."""

    def __init__(self, runtime: Runtime):
        self.runtime, self.count = runtime, 1
        self.handle = runtime.register(self)

    def release(self) -> None:
        self.count -= 1
        if self.count == 0:
            self.runtime.unregister(self)
            self.freed()

    def freed(self) -> None:
        """Called when the reference count is 0."""


class Text(Object):
    def __init__(self, runtime: Runtime, text: bytes):
        super().__init__(runtime)
        self.text = ctypes.create_string_buffer(text)

    def release(self) -> None:
        """Texts are never freed: tinygrad keeps some of them."""

    def UTF8String(self) -> bytes:
        return self.text.value


class Failure(Object):
    def __init__(self, runtime: Runtime, text: str):
        super().__init__(runtime)
        self.text = text

    def localizedDescription(self) -> Text:
        return Text(self.runtime, self.text.encode())


class Data(Object):
    def __init__(self, runtime: Runtime, data: bytes):
        super().__init__(runtime)
        self.data = data


class Class(Object):
    """An Objective-C class that tinygrad instantiates by name."""

    def __init__(self, runtime: Runtime, name: str):
        super().__init__(runtime)
        self.name = name

    def new(self) -> Object:
        kinds: dict[str, Callable[[Runtime], Object]] = {
            "MTLComputePipelineDescriptor": PipelineDescriptor, "MTLIndirectCommandBufferDescriptor": CommandsDescriptor, "NSError": Object,
        }  # fmt: skip
        return kinds[self.name](self.runtime)

    def stringWithUTF8String_(self, text: bytes) -> Text:
        assert self.name == "NSString"
        return Text(self.runtime, text)


class Device(Object):
    def name(self) -> Text:
        return Text(self.runtime, self.runtime.name.encode())

    def supportsFamily_(self, family: int) -> int:
        own = self.runtime.family
        return int(1001 <= family <= 1000 + own or family in (2002, 3001, 3002, 3003, 5001))

    def recommendedMaxWorkingSetSize(self) -> int:
        return self.runtime.capacity

    def maxBufferLength(self) -> int:
        return self.runtime.longest_buffer

    def currentAllocatedSize(self) -> int:
        return self.runtime.allocated()

    def newCommandQueueWithMaxCommandBufferCount_(self, count: int) -> CommandQueue:
        return CommandQueue(self.runtime)

    def newSharedEvent(self) -> Object:
        return Object(self.runtime)

    def newBufferWithLength_options_(self, size: int, options: int) -> Buffer | None:
        if size <= 0 or size > self.runtime.capacity - self.runtime.allocated():
            return None
        raw = np.full(size + mmap.PAGESIZE, 0xFF, np.uint8)
        return Buffer(self.runtime, raw[-raw.ctypes.data % mmap.PAGESIZE :][:size], True)

    def newBufferWithBytesNoCopy_length_options_deallocator_(self, address: int, size: int, options: int, free: Any) -> Buffer | None:
        if address % mmap.PAGESIZE or size % mmap.PAGESIZE or size <= 0 or size > self.runtime.longest_buffer:
            return None
        return Buffer(self.runtime, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)), False)

    def newLibraryWithData_error_(self, data: Any, error: Any) -> Library | None:
        binary: Data = self.runtime.object(data)
        if binary.data[:4] != b"MTLB":
            self.runtime.put(error, Failure(self.runtime, "Invalid library file"))
            return None
        return Library(self.runtime, binary.data[4:-4].decode())

    def newComputePipelineStateWithDescriptor_options_reflection_error_(self, wanted: Any, options: int, out: Any, error: Any) -> Pipeline:
        descriptor: PipelineDescriptor = self.runtime.object(wanted)
        assert descriptor.function is not None
        return Pipeline(self.runtime, descriptor.function, descriptor.indirect)

    def newIndirectCommandBufferWithDescriptor_maxCommandCount_options_(self, wanted: Any, count: int, options: int) -> Commands | None:
        descriptor: CommandsDescriptor = self.runtime.object(wanted)
        if descriptor.types != _CONCURRENT_DISPATCH or descriptor.inherits != [0, 0] or not 0 < count <= 16384:
            return None
        return Commands(self.runtime, count, descriptor.bindings)


class PipelineDescriptor(Object):
    function: Function | None = None
    indirect = False

    def setComputeFunction_(self, function: Any) -> None:
        self.function = self.runtime.object(function)

    def setSupportIndirectCommandBuffers_(self, yes: int) -> None:
        self.indirect = bool(yes)


class CommandsDescriptor(Object):
    def __init__(self, runtime: Runtime):
        super().__init__(runtime)
        self.types, self.inherits, self.bindings = 0, [1, 1], 0

    def setCommandTypes_(self, types: int) -> None:
        self.types = types

    def setInheritBuffers_(self, yes: int) -> None:
        self.inherits[0] = int(yes)

    def setInheritPipelineState_(self, yes: int) -> None:
        self.inherits[1] = int(yes)

    def setMaxKernelBufferBindCount_(self, count: int) -> None:
        self.bindings = count


class Library(Object):
    def __init__(self, runtime: Runtime, text: str):
        super().__init__(runtime)
        self.text = text

    def newFunctionWithName_(self, name: Any) -> Function | None:
        wanted = self.runtime.object(name).text.value.decode()
        matches = [signature for signature in signatures(self.text) if signature.name == wanted]
        return Function(self.runtime, self.text, matches[0]) if matches else None


class Function(Object):
    def __init__(self, runtime: Runtime, text: str, signature: Signature):
        super().__init__(runtime)
        self.text, self.signature = text, signature


class Pipeline(Object):
    def __init__(self, runtime: Runtime, function: Function, indirect: bool):
        super().__init__(runtime)
        self.text, self.signature, self.indirect = function.text, function.signature, indirect

    def maxTotalThreadsPerThreadgroup(self) -> int:
        return min(self.runtime.max_threads, build(self.text, "metal").bounds[self.signature.name])

    def threadExecutionWidth(self) -> int:
        return 32

    def staticThreadgroupMemoryLength(self) -> int:
        return build(self.text, "metal").static_shared


class Buffer(Object):
    def __init__(self, runtime: Runtime, memory: np.ndarray, own: bool):
        super().__init__(runtime)
        self.memory, self.own = memory, own
        runtime.buffers[self.handle] = self

    def freed(self) -> None:
        del self.runtime.buffers[self.handle]

    def contents(self) -> int:
        return self.memory.ctypes.data

    def length(self) -> int:
        return self.memory.nbytes


class Commands(Object):
    """An indirect command buffer."""

    def __init__(self, runtime: Runtime, count: int, bindings: int):
        super().__init__(runtime)
        self.commands: list[Dispatch | None] = [None] * count
        self.pipelines: list[Pipeline | None] = [None] * count
        self.bindings = [dict[int, Binding]() for _ in range(count)]
        self.max_bindings, self.in_flight = bindings, 0
        runtime.indirect.append(self)
        self.number = len(runtime.indirect) - 1

    def freed(self) -> None:
        if self.in_flight:
            raise MetalError("an indirect command buffer is freed while it is executed")

    def indirectComputeCommandAtIndex_(self, index: int) -> Command:
        if not 0 <= index < len(self.commands):
            raise MetalError(f"command {index} of {len(self.commands)}")
        return Command(self.runtime, self, index)


class Command(Object):
    """One command of an indirect command buffer."""

    def __init__(self, runtime: Runtime, commands: Commands, index: int):
        super().__init__(runtime)
        self.commands, self.index = commands, index

    def _change(self) -> None:
        self.runtime.encoded += 1
        if self.commands.in_flight:
            raise MetalError(f"command {self.index} of an indirect command buffer is changed while it is executed")

    def setComputePipelineState_(self, pipeline: Any) -> None:
        self._change()
        state: Pipeline = self.runtime.object(pipeline)
        if not state.indirect:
            raise MetalError("a pipeline in an indirect command buffer that does not support indirect command buffers")
        self.commands.pipelines[self.index] = state

    def setKernelBuffer_offset_atIndex_(self, buffer: Any, offset: int, index: int) -> None:
        self._change()
        if index >= min(self.commands.max_bindings, MAX_BINDINGS):
            raise MetalError(f"buffer {index} of a command; there are {min(self.commands.max_bindings, MAX_BINDINGS)}")
        self.commands.bindings[self.index][index] = self.runtime.binding(buffer, offset)

    def concurrentDispatchThreadgroups_threadsPerThreadgroup_(self, grid: Any, threads: Any) -> None:
        self._change()
        pipeline = self.commands.pipelines[self.index]
        if pipeline is None:
            raise MetalError("a dispatch in an indirect command buffer before its pipeline")
        before = self.commands.commands[self.index]
        bindings, barrier = self.commands.bindings[self.index], before is not None and before.barrier
        self.commands.commands[self.index] = Dispatch(pipeline.signature.name, dims(grid), dims(threads), bindings, barrier)

    def setBarrier(self) -> None:
        self._change()
        command = self.commands.commands[self.index]
        if command is None:
            raise MetalError("a barrier for a command without a dispatch")
        command.barrier = True


class CommandQueue(Object):
    def commandBuffer(self) -> CommandBuffer:
        return CommandBuffer(self.runtime)


class CommandBuffer(Object):
    def __init__(self, runtime: Runtime):
        super().__init__(runtime)
        self.state, self.failure, self.open = 0, None, False
        self.held: list[Object] = []  # objects that it retains until it has run; not those of indirect commands
        self.work: list[Callable[[], None]] = []
        self.record = Submission("")

    def freed(self) -> None:
        if self.open:
            raise MetalError("a command buffer is freed while it is encoded")

    def _encoder(self, kind: Any) -> Any:
        if self.open or self.state:
            raise MetalError("a command buffer is encoded twice at a time, or after it was committed")
        self.open = True
        return kind(self.runtime, self)

    def computeCommandEncoder(self) -> ComputeEncoder:
        return self._encoder(ComputeEncoder)

    def blitCommandEncoder(self) -> BlitEncoder:
        return self._encoder(BlitEncoder)

    def setLabel_(self, label: Any) -> None:
        self.record.label = self.runtime.object(label).text.value.decode()

    def label(self) -> Text:
        return Text(self.runtime, self.record.label.encode())

    def commit(self) -> None:
        if self.open or self.state:
            raise MetalError("a command buffer is committed twice, or before its encoder has ended")
        self.state = COMMITTED
        self.count += 1  # Metal retains it until it has run
        self.runtime.enqueue(self)

    def status(self) -> int:
        self.runtime.poll()
        return self.state

    def waitUntilCompleted(self) -> None:
        if not self.state:
            raise MetalError("a wait for a command buffer that was never committed")
        self.runtime.run_until(self)

    def error(self) -> Failure | None:
        return None if self.failure is None else Failure(self.runtime, self.failure)

    def GPUStartTime(self) -> float:
        return 1.0

    def GPUEndTime(self) -> float:
        return 1.0 + self.runtime.seconds_of(self.record)

    def run(self) -> None:
        self.failure = self.runtime.next_failure
        self.runtime.next_failure = None
        try:
            for work in self.work if self.failure is None else ():
                work()
        except AssertionError as error:
            self.failure = str(error)
            raise
        finally:
            self.state = FAILED if self.failure else COMPLETED
            for held in self.held:
                held.release()
            self.release()


class Encoder(Object):
    def __init__(self, runtime: Runtime, within: CommandBuffer):
        super().__init__(runtime)
        self.within, self.ended = within, False

    def put(self, entry: Dispatch | Execute | Copy, work: Callable[[], None] | None = None) -> None:
        if self.ended:
            raise MetalError("an encoder is used after its end")
        self.within.record.entries.append(entry)
        if work is not None:
            self.within.work.append(work)

    def hold(self, pointer: Any) -> Any:
        """The object at a pointer, retained by the command buffer."""
        target = self.runtime.object(pointer)
        target.count += 1
        self.within.held.append(target)
        return target

    def endEncoding(self) -> None:
        self.ended, self.within.open = True, False


class ComputeEncoder(Encoder):
    def __init__(self, runtime: Runtime, within: CommandBuffer):
        super().__init__(runtime, within)
        self.pipeline: Pipeline | None = None
        self.bindings: dict[int, Binding] = {}
        self.resources: tuple[int, ...] = ()
        self.read_only: tuple[int, ...] = ()

    def setComputePipelineState_(self, pipeline: Any) -> None:
        self.pipeline = self.runtime.object(pipeline)

    def setBuffer_offset_atIndex_(self, buffer: Any, offset: int, index: int) -> None:
        if index >= MAX_BINDINGS:
            raise MetalError(f"buffer {index}; there are {MAX_BINDINGS}")
        self.bindings[index] = self.runtime.binding(self.hold(buffer), offset)

    def setBytes_length_atIndex_(self, data: Any, size: int, index: int) -> None:
        self.bindings[index] = Binding(None, 0, ctypes.string_at(data, size))

    def useResources_count_usage_(self, resources: Any, count: int, usage: int) -> None:
        if usage not in (1, 3):
            raise MetalError(f"usage {usage} of resources; expected 1 for what kernels read, 3 for what they read and write")
        handles = tuple(self.runtime.object(resources[i]).handle for i in range(count))
        if not count or len(set(handles)) < count or set(handles) & set(self.resources):
            raise MetalError("resources that are declared twice, or none")
        self.resources += handles
        self.read_only += handles if usage == 1 else ()

    def dispatchThreadgroups_threadsPerThreadgroup_(self, grid: Any, threads: Any) -> None:
        if self.pipeline is None:
            raise MetalError("a dispatch before its pipeline")
        dispatch = Dispatch(self.pipeline.signature.name, dims(grid), dims(threads), dict(self.bindings))
        empty = dispatch.grid == dispatch.threads == (0, 0, 0)
        self.put(dispatch, None if empty else partial(self.runtime.execute, self.pipeline, dispatch, None))

    def executeCommandsInBuffer_withRange_(self, commands: Any, span: Any) -> None:
        target: Commands = self.runtime.object(commands)
        if span.location + span.length > len(target.commands):
            raise MetalError(f"commands {span.location} to {span.location + span.length} of {len(target.commands)}")
        target.in_flight += 1
        execute = Execute(target.number, span.location, span.length, self.resources, self.read_only)
        self.put(execute, partial(self.runtime.execute_commands, target, execute))


class BlitEncoder(Encoder):
    def copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_(self, source: Any, start: int, to: Any, at: int, size: int) -> None:
        if start % 4 or at % 4 or size % 4:
            raise MetalError(f"a blit of {size} bytes from {start} to {at}; macOS needs multiples of 4")
        a, b = self.hold(source), self.hold(to)
        if start + size > a.memory.nbytes or at + size > b.memory.nbytes:
            raise MetalError(f"a blit of {size} bytes from {start} of {a.memory.nbytes} to {at} of {b.memory.nbytes}")
        self.put(Copy(a.handle, start, b.handle, at, size), lambda: np.copyto(b.memory[at : at + size], a.memory[start : start + size]))


# --- the runtime


class Runtime:
    """One GPU with `capacity` bytes and this name, of the family Apple`family`, in a Mac with this macOS.

    `submissions` are the committed command buffers, in order; `indirect` the indirect command buffers; `counts` how often each message was
    sent; `launched` the name of each kernel that has run; `encoded` how often a command of an indirect command buffer was changed.
    `next_failure` is the error of the next command buffer that runs. `seconds_of` gives the duration of one, by the GPU's clock.
    With `races` every kernel is checked for races; without, kernels run faster.
    """

    _numbers = itertools.count(0x1000, 16)  # handles, unique over all runtimes
    objects: dict[int, Object] = {}  # of all runtimes

    def __init__(self, seed: int = 0, capacity: int = 1 << 30, family: int = 7, macos: str = "14.5", max_threads: int = MAX_THREADS,
                 longest_buffer: int = 1 << 30, races: bool = True, name: str = "Emulated M"):  # fmt: skip
        self.name = name
        self.capacity, self.family, self.macos = capacity, family, macos
        self.max_threads, self.longest_buffer = max_threads, longest_buffer
        self.counts: Counter[str] = Counter()
        self.submissions: list[Submission] = []
        self.indirect: list[Commands] = []
        self.launched: list[str] = []
        self.buffers: dict[int, Buffer] = {}
        self.encoded, self.next_failure = 0, None
        self.seconds_of: Callable[[Submission], float] = lambda record: 0.001
        self.lock = threading.RLock()
        self._queue: list[CommandBuffer] = []
        self._random, self._seed, self._races = random.Random(seed), seed, races
        self.sysdevice = Device(self)

    # --- objects

    def register(self, target: Object) -> int:
        handle = next(self._numbers)
        self.objects[handle] = target
        return handle

    def unregister(self, target: Object) -> None:
        del self.objects[target.handle]

    def object(self, pointer: Any) -> Any:
        """The object at a pointer. Raises MetalError if it was freed."""
        value = address(pointer)
        if value not in self.objects:
            raise MetalError(f"a message with the object {value:#x}, which does not exist or was freed")
        return self.objects[value]

    def put(self, out: Any, target: Object) -> None:
        """Stores an object through a pointer to a pointer."""
        ctypes.memmove(out, struct.pack("@P", target.handle), struct.calcsize("P"))

    def binding(self, buffer: Any, offset: int) -> Binding:
        target: Buffer = buffer if isinstance(buffer, Buffer) else self.object(buffer)
        if not 0 <= offset < target.memory.nbytes:
            raise MetalError(f"byte {offset} of a buffer of {target.memory.nbytes}")
        return Binding(target.handle, offset)

    def allocated(self) -> int:
        """Bytes of all buffers that own their memory."""
        return sum(buffer.memory.nbytes for buffer in self.buffers.values() if buffer.own)

    # --- the queue

    def enqueue(self, work: CommandBuffer) -> None:
        self.submissions.append(work.record)
        self._queue.append(work)
        if self._seed % 2:
            self._run(self._random.choice((0, 1, 2, len(self._queue))))

    def poll(self) -> None:
        """A caller asks for a status: repeated calls eventually run all work."""
        self._run(self._random.random() < (0.5 if self._seed % 2 else 0.1))

    def run_until(self, work: CommandBuffer) -> None:
        if work in self._queue:
            self._run(self._queue.index(work) + 1)

    def _run(self, count: int) -> None:
        with uncollected():
            for _ in range(min(count, len(self._queue))):
                self._queue.pop(0).run()

    def idle(self) -> None:
        """Runs everything that was committed."""
        with self.lock:
            self._run(len(self._queue))

    def execute_commands(self, commands: Commands, execute: Execute) -> None:
        commands.in_flight -= 1
        for i in range(execute.first, execute.first + execute.count):
            pipeline, command = commands.pipelines[i], commands.commands[i]
            if pipeline is None or command is None:
                raise MetalError(f"command {i} of an indirect command buffer is empty")
            if i > execute.first and not command.barrier:
                raise MetalError(f"command {i}, {command.name}, has no barrier after the one before it")
            self.execute(pipeline, command, execute.resources, execute.read_only)

    def execute(self, pipeline: Pipeline, dispatch: Dispatch, resources: tuple[int, ...] | None, read_only: tuple[int, ...] = ()) -> None:
        """Runs a launch; an indirect one may only use the declared `resources`, and not write those that are `read_only`."""
        signature, arguments, memory, numbers = pipeline.signature, [], {}, []
        for index in range(max(signature.buffers, default=-1) + 1):
            binding = dispatch.bindings.get(index)
            if binding is None:
                raise MetalError(f"{signature.name}: buffer {index} is not set")
            if binding.buffer is None:
                numbers.append(np.frombuffer(bytearray(binding.data), np.uint8))
                arguments.append(numbers[-1].ctypes.data)
                memory[arguments[-1]] = Memory(arguments[-1], len(binding.data), f"number {index}", False)
                continue
            if binding.buffer not in self.buffers or (resources is not None and binding.buffer not in resources):
                raise MetalError(f"{signature.name}: buffer {index} was freed, or is not a declared resource of the indirect commands")
            buffer = self.buffers[binding.buffer]
            start = buffer.memory.ctypes.data
            arguments.append(start + binding.offset)
            name = f"{memory[start].name} and {index}" if start in memory else f"buffer {index}"
            memory[start] = Memory(start, buffer.memory.nbytes, name, buffer.own and binding.buffer not in read_only)
        self.launched.append(signature.name)
        emulate_source(
            pipeline.text, signature.name, dispatch.grid, dispatch.threads, 0, arguments, merged(list(memory.values())),
            seed=self._random.getrandbits(32), races=self._races, language="metal",
        )  # fmt: skip


def merged(memory: list[Memory]) -> list[Memory]:
    """Merges overlapping memory under one name: two buffers may cover the same page of a file."""
    out: list[Memory] = []
    for m in sorted(memory, key=lambda m: m.address):
        if out and m.address < out[-1].address + out[-1].size:
            end = max(out[-1].address + out[-1].size, m.address + m.size)
            out[-1] = Memory(out[-1].address, end - out[-1].address, f"{out[-1].name} and {m.name}", out[-1].writable or m.writable)
        else:
            out.append(m)
    return out


def dims(size: Any) -> tuple[int, int, int]:
    return int(size.width), int(size.height), int(size.depth)


def address(pointer: Any) -> int:
    """A pointer of any type as an integer; 0 for nil."""
    return int(pointer or 0) if pointer is None or isinstance(pointer, int) else int(pointer.value or 0)


# --- replacements of the libraries that tinygrad opens


_current: list[Runtime] = []  # the last one receives messages


class _Sender:
    """objc_msgSend, with the types that its caller sets."""

    restype: Any = None
    argtypes: list[Any] = []

    def __call__(self, receiver: Any, selector: str, *arguments: Any) -> Any:
        target = address(receiver)
        for kind, argument in zip(self.argtypes[2:], arguments):
            kind.from_param(argument)  # a TypeError where it does not fit
        if self.argtypes and len(self.argtypes) != len(arguments) + 2:
            raise MetalError(f"{selector} takes {len(self.argtypes) - 2} arguments, got {len(arguments)}")
        if selector.count(":") != len(arguments):
            raise MetalError(f"{selector} with {len(arguments)} arguments")
        if target == 0:
            return self._result(None)  # a message to nil has no effect
        if target not in Runtime.objects:
            raise MetalError(f"{selector} is sent to the object {target:#x}, which does not exist or was freed")
        receiving = Runtime.objects[target]
        with receiving.runtime.lock:
            receiving.runtime.counts[selector] += 1
            method = getattr(receiving, selector.replace(":", "_"), None)
            if method is None:
                raise MetalError(f"the emulated {type(receiving).__name__} has no {selector}")
            return self._result(method(*arguments))

    def _result(self, value: Any) -> Any:
        if hasattr(self.restype, "retained"):  # an object
            return self.restype(value.handle if isinstance(value, Object) else 0)
        return value


class _ObjectiveC:
    """libobjc and libSystem."""

    def __init__(self) -> None:
        self.classes: dict[bytes, int] = {}

        def sel_registerName(name: bytes) -> str:
            return name.decode()

        def objc_getClass(name: bytes) -> int:
            if name not in self.classes:
                self.classes[name] = Class(_current[-1], name.decode()).handle
            return self.classes[name]

        def dispatch_data_create(data: bytes, size: int, queue: Any, free: Any) -> Any:
            return dispatch_data_create.restype(Data(_current[-1], data[:size]).handle)  # type: ignore[attr-defined]

        self.sel_registerName, self.objc_getClass, self.dispatch_data_create = sel_registerName, objc_getClass, dispatch_data_create

    def __getitem__(self, name: str) -> _Sender:
        assert name == "objc_msgSend"
        return _Sender()


class _CompilerService:
    """libMTLCompiler: the binary is the source, if the emulator's compiler accepts it."""

    def __init__(self) -> None:
        def MTLCodeGenServiceCreate(name: bytes) -> int:
            return 1

        def MTLCodeGenServiceBuildRequest(service: Any, unused: Any, kind: int, request: bytes, size: int, block: Any) -> None:
            source_size, options_size = struct.unpack("<QQ", request[:16])
            assert kind == 13 and size == len(request) == 16 + source_size + options_size and source_size % 4 == 0, "an invalid request"
            source, options = request[16 : 16 + source_size], request[16 + source_size :]
            errors = compiler_errors(source.rstrip(b"\0").decode(), options.rstrip(b"\0").decode())
            answer = b"\0" * 8 + struct.pack("<LL", 16, 0) + b"MTLB" + source.rstrip(b"\0") + b"ENDT"
            kept = ctypes.create_string_buffer(answer, len(answer))
            block._obj(None, 1 if errors else 0, ctypes.addressof(kept), len(answer), errors.encode())

        self.MTLCodeGenServiceCreate, self.MTLCodeGenServiceBuildRequest = MTLCodeGenServiceCreate, MTLCodeGenServiceBuildRequest


def compiler_errors(text: str, options: str) -> str:
    """The errors of a program, or an empty string."""
    version = float(re.search(r"-std=(?:macos-)?metal([\d.]+)", options)[1])  # type: ignore[index]
    assert "-fno-fast-math" in options
    if version < 3.1 and re.search(r"\bbfloat\b", without_comments(text)):
        return "program_source:1:1: error: unknown type name 'bfloat'"
    try:
        build(text, "metal")
    except AssertionError as error:
        return str(error)
    return ""


# --- installing and removing it


@contextlib.contextmanager
def metal_device(**options: Any) -> Iterator[Runtime]:
    """Within it, tinygrad's device METAL is emulated, and was opened by `open_device`; `options` are those of Runtime.

    Afterwards the process has no trace of it: no device, no program in a cache; and nothing was written to disk.
    """
    from tinygrad import Device as tinygrad_device
    from tinygrad import codegen, schedule
    from tinygrad.engine import realize

    from tests.emulator.driver import _InMemory, _replaced, default_kept
    from tinyvllm.backends.registry import open_device
    from tinyvllm.bridge import arena
    from tinyvllm.placement import Placement

    os.environ.setdefault("TINYVLLM_KEEP_STEPS", "0")  # a Mac would load the source as a library
    runtime, opened = Runtime(**options), dict[str, Any]()
    original = type(tinygrad_device).__dict__["_Device__get_canonicalized_item"]

    def device(self: Any, name: str) -> Any:
        if not name.startswith("METAL"):
            return original(self, name)
        if name not in opened:
            opened[name] = sys.modules["tinygrad.runtime.ops_metal"].MetalDevice(name)
        return opened[name]

    with contextlib.ExitStack() as undo:
        _current.append(runtime)
        undo.callback(_current.pop)
        undo.enter_context(_untuned())
        modules = undo.enter_context(_fresh_modules())
        metal, ops_metal = (modules[f"tinygrad.runtime.{name}"] for name in ("autogen.metal", "ops_metal"))
        metal.MTLCreateSystemDefaultDevice = lambda: metal.MTLDevice(runtime.sysdevice.handle)
        ops_metal.platform = SimpleNamespace(mac_ver=lambda: (runtime.macos, ("", "", ""), "arm64"))
        ops_metal.MetalCompiler.compile_cached = ops_metal.MetalCompiler.compile  # not cached on disk
        undo.enter_context(_replaced(type(tinygrad_device), "_Device__get_canonicalized_item", device))
        undo.enter_context(_replaced(codegen, "to_program_cache", _InMemory("programs")))
        undo.enter_context(_replaced(schedule, "schedule_cache", _InMemory("schedules")))
        undo.enter_context(default_kept())
        undo.callback(gc.collect)
        undo.callback(arena._arenas.clear)  # what a test still holds is memory of this device: the next one must not take it
        undo.callback(_forget, realize.runtime_cache)
        _forget(realize.runtime_cache)
        open_device(Placement("METAL"))
        runtime.idle()
        runtime._random.seed(runtime._seed)  # whatever opening it takes
        yield runtime
        runtime.idle()


@contextlib.contextmanager
def _untuned() -> Iterator[None]:
    """Disables tuning: times mean nothing here, and a search would take as long as on a GPU."""
    kept = os.environ.get("TINYVLLM_AUTOTUNE")
    os.environ["TINYVLLM_AUTOTUNE"] = "0"
    autotune.tuner.cache_clear()
    try:
        yield
    finally:
        del os.environ["TINYVLLM_AUTOTUNE"]
        if kept is not None:
            os.environ["TINYVLLM_AUTOTUNE"] = kept
        autotune.tuner.cache_clear()


@contextlib.contextmanager
def _fresh_modules() -> Iterator[dict[str, ModuleType]]:
    """tinygrad's modules for Metal, imported with the emulated libraries; afterwards the modules from before are restored."""
    kept = {name: sys.modules.pop(name) for name in _MODULES if name in sys.modules}
    parents = {name: importlib.import_module(name.rpartition(".")[0]) for name in _MODULES}
    attributes = {name: vars(parents[name]).pop(name.rpartition(".")[2], None) for name in _MODULES}
    try:
        yield _import_over_emulated_libraries()
    finally:
        for name in _MODULES:
            sys.modules.pop(name, None)
            vars(parents[name]).pop(name.rpartition(".")[2], None)
            if attributes[name] is not None:
                setattr(parents[name], name.rpartition(".")[2], attributes[name])
        sys.modules.update(kept)


def _import_over_emulated_libraries() -> dict[str, ModuleType]:
    from tinygrad.runtime.autogen import llvm  # noqa: F401  ops_metal imports it
    from tinygrad.runtime.support import c

    open_library, open_named = ctypes.CDLL, c.DLL
    objective_c = _ObjectiveC()
    ctypes.CDLL = lambda *names, **options: objective_c  # type: ignore[misc,assignment]

    class Named(open_named):
        def __new__(cls, name: str, *rest: Any, **options: Any) -> Any:
            return _CompilerService() if name == "MTLCompiler" else super().__new__(cls)

    c.DLL = Named  # type: ignore[misc]
    try:
        return {name: importlib.import_module(name) for name in _MODULES}
    finally:
        ctypes.CDLL, c.DLL = open_library, open_named  # type: ignore[misc]


def _forget(programs: dict[tuple[bytes, str], Any]) -> None:
    """Frees everything that would use the device later, while it exists."""
    from tinyvllm.backends.metal import queue as metal_queue
    from tinyvllm.backends.metal.call import MetalBackend
    from tinyvllm.backends.metal.launch import machine_code, require_runnable
    from tinyvllm.backends.registry import BACKENDS
    from tinyvllm.bridge import forget_zeros, opened_device, remove_hooks

    for key in [key for key in programs if key[1].startswith("METAL")]:
        del programs[key]
    for kept in (metal_queue.queue_of, machine_code, require_runnable):
        kept.cache_clear()
    forget_zeros("METAL")
    getattr(opened_device("METAL").runtime, "cache_clear", lambda: None)()  # share_programs
    remove_hooks("METAL")
    backend = BACKENDS["METAL"]
    assert isinstance(backend, MetalBackend)
    backend.forget_devices()
