"""A CUDA driver on top of the emulator: tinygrad's CUDA device, the launch code and the kernels run unchanged, on host memory.

Within `cuda_device()` the functions of `tinygrad.runtime.autogen.cuda` are those of a `Driver`, and compilers return the source in place of
machine code. Work in the stream runs when the host waits for it (even seeds) or at any time before (odd seeds), so that code which reuses
pinned memory too early, or reads before it has waited, fails. Nodes of a graph run in any order that its edges allow.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import math
import mmap
import os
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad.device import Compiler

from tests.emulator.emulate import Memory, awaits_previous, emulate_source, uncollected
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.source import kernel_text
from tinyvllm.bridge.programs import DiskTable

INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, NO_PEER, INVALID_HANDLE, NOT_FOUND, NOT_READY = 1, 2, 201, 217, 400, 500, 600
ERRORS = {
    1: "invalid argument", 2: "out of memory", 201: "invalid device context", 217: "peer access is not supported",
    400: "invalid resource handle", 500: "not found",
    200: "device kernel image is invalid", 209: "no kernel image is available for execution on the device",
    719: "unspecified launch failure",
}  # fmt: skip
DEFAULT_SHARED, MAX_SHARED_BYTES = 48 << 10, 227 << 10  # bytes a block: without and with the function's attribute
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
MULTIPROCESSORS, MULTIPROCESSOR_SHARED, MAX_SHARED = 16, 81, 97  # CU_DEVICE_ATTRIBUTE_...; MAX_SHARED is of one block
_WITHOUT_CONTEXT = ("cuInit", "cuDevice", "cuDriver", "cuCtxCreate", "cuCtxSetCurrent", "cuGetError")
LAUNCH_FAILED, INVALID_IMAGE, NO_BINARY_FOR_GPU = 719, 200, 209
_REPORTING = ("cuLaunch", "cuGraphLaunch", "cuEventSynchronize", "cuEventQuery", "cuCtxSynchronize", "cuMemcpy")
INCLUDES = Path(__file__).parent / "include"


class DriverError(AssertionError):
    """A call that this driver does not implement, or that is never correct; a real driver would return no status for it."""


@dataclass
class Function:
    text: str
    name: str
    integers: int  # number of its integer parameters
    max_shared: int = DEFAULT_SHARED


@dataclass(frozen=True)
class Launch:
    function: Function
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    arguments: bytes


@dataclass
class Graph:
    nodes: dict[int, Launch] = field(default_factory=dict)
    before: dict[int, list[int]] = field(default_factory=dict)


class Driver:
    """One GPU of `capacity` bytes. `counts`: the number of calls of each function. `launched`: the name of each kernel that has run.
    `uploaded`: bytes copied to the device. `peak`: bytes of device memory allocated at most.

    With `races`, races are checked in every kernel; without, kernels run twice as fast. `fail_once` names a kernel whose next launch fails:
    its last block does not run, nor what follows in its graph. The next call that waits or launches returns LAUNCH_FAILED.

    Without `executes` programs are machine code of a real compiler, checked as far as a driver would when it loads them, and a launch does
    nothing: memory is zero where the host has not written. That needs no C compiler.

    An `eager` driver runs work as it is issued, as a rank needs that waits for nothing: others wait for it. `gpus`: how many there are to
    count; the others are those of other processes. `peers`: whether this GPU maps their memory: "lost" maps something else, as machines do
    where peer access seems to work.
    """

    _numbers = itertools.count(0x1000, 16)  # handles; unique across drivers

    def __init__(self, seed: int = 0, capacity: int = 1 << 30, capability: tuple[int, int] = (9, 0), multiprocessors: int = 4,
                 races: bool = True, executes: bool = True, eager: bool = False, gpus: int = 1, peers: str = "reached"):  # fmt: skip
        self.counts: Counter[str] = Counter()
        self.launched: list[str] = []
        self.fail_once: str | None = None
        self.uploaded = self.peak = 0
        self.device: dict[int, np.ndarray] = {}  # device memory by address
        self.pinned: dict[int, np.ndarray] = {}
        self.imported: dict[int, np.ndarray] = {}  # memory of other GPUs
        self._random, self._seed, self._capacity, self._capability = random.Random(seed), seed, capacity, capability
        self._races, self._executes, self._eager, self._gpus, self._peers = races, executes, eager, gpus, peers
        self._attributes = {MULTIPROCESSORS: multiprocessors, MULTIPROCESSOR_SHARED: MAX_SHARED_BYTES + 1024, MAX_SHARED: MAX_SHARED_BYTES}
        self._handles: dict[int, Any] = {}
        self._shared: dict[int, int] = {}  # files of allocations that other processes may map
        self._stream: list[tuple[int, Callable[[], None]]] = []
        self._issued = self._done = 0
        self._lock, self._thread = threading.RLock(), threading.local()
        self._context: int | None = None
        self._failure = 0  # status of what has failed since the last call that waited or launched
        self._error_texts = {code: ctypes.create_string_buffer(text.encode()) for code, text in ERRORS.items()}

    def functions(self, names: list[str]) -> dict[str, Callable[..., int]]:
        """The function for each name of the driver's interface: calls are counted; DriverError for one that is not implemented."""
        return {name: self._counted(name, getattr(self, f"_{name}", None)) for name in names}

    def _counted(self, name: str, function: Callable[..., int | None] | None) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            with self._lock:
                self.counts[name] += 1
                if function is None:
                    raise DriverError(f"the emulated driver has no {name}")
                if not name.startswith(_WITHOUT_CONTEXT) and getattr(self._thread, "context", None) is None:
                    return INVALID_CONTEXT
                return function(*arguments) or self._reported_failure(name)

        return call

    def _reported_failure(self, name: str) -> int:
        if not name.startswith(_REPORTING):
            return 0
        status, self._failure = self._failure, 0
        return status

    # --- the stream

    def _enqueue(self, work: Callable[[], None]) -> int:
        self._issued += 1
        self._stream.append((self._issued, work))
        if self._eager:
            self.idle()
            return 0
        self._run(self._done + (self._random.choice((0, 1, 2, len(self._stream))) if self._seed % 2 else 0))
        return 0

    def _run(self, until: int) -> None:
        """Run the work that was issued up to number `until`."""
        with uncollected():
            while self._stream and self._stream[0][0] <= until:
                self._done, work = self._stream.pop(0)
                work()

    def idle(self) -> None:
        """Run everything that was issued."""
        self._run(self._issued)

    def free(self) -> int:
        """Free bytes of device memory."""
        return self._capacity - sum(memory.nbytes for memory in self.device.values())

    # --- handles

    def _new(self, thing: Any) -> int:
        number = next(self._numbers)
        self._handles[number] = thing
        return number

    # --- the device and its context

    def _cuInit(self, flags: int) -> None:
        pass

    def _cuDeviceGet(self, out: Any, index: int) -> int:
        put(out, index)
        return 0 if index == 0 else 101

    def _cuDeviceGetCount(self, out: Any) -> None:
        put(out, self._gpus)

    def _cuDriverGetVersion(self, out: Any) -> None:
        put(out, 12090)

    def _cuDeviceComputeCapability(self, major: Any, minor: Any, device: Any) -> None:
        put(major, self._capability[0])
        put(minor, self._capability[1])

    def _cuDeviceGetAttribute(self, out: Any, attribute: int, device: Any) -> None:
        put(out, self._attributes[attribute])

    def _cuCtxCreate_v2(self, out: Any, flags: int, device: Any) -> None:
        self._context = self._thread.context = self._new("context")
        put(out, self._context)

    def _cuCtxSetCurrent(self, context: Any) -> int:
        if number(context) != self._context:
            return INVALID_CONTEXT
        self._thread.context = self._context
        return 0

    def _cuCtxSynchronize(self) -> None:
        self.idle()

    def _cuMemGetInfo_v2(self, free: Any, total: Any) -> None:
        put(free, self.free())
        put(total, self._capacity)

    def _cuGetErrorString(self, status: int, out: Any) -> int:
        text = self._error_texts.setdefault(status, ctypes.create_string_buffer(f"error {status}".encode()))
        put(out, ctypes.addressof(text))
        return 0

    def _cuGetErrorName(self, status: int, out: Any) -> int:
        return self._cuGetErrorString(status, out)

    # --- memory

    def _cuMemAlloc_v2(self, out: Any, size: int) -> int:
        if size <= 0:
            return INVALID_VALUE
        if size > self.free():
            return OUT_OF_MEMORY
        put(out, self._allocate(self.device, size, 256 if size % 4096 else 4096))
        self.peak = max(self.peak, self._capacity - self.free())
        return 0

    def _cuMemHostAlloc(self, out: Any, size: int, flags: int) -> None:
        put(out, self._allocate(self.pinned, size, 4096))

    def _cuMemHostRegister_v2(self, address: Any, size: int, flags: int) -> int:
        start = number(address)
        if size <= 0 or start % 4096 or start in self.pinned:
            return INVALID_VALUE
        self.pinned[start] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))
        return 0

    def _cuMemHostUnregister(self, address: Any) -> int:
        self.idle()
        return 0 if self.pinned.pop(number(address), None) is not None else INVALID_VALUE

    def _cuMemHostGetDevicePointer_v2(self, out: Any, address: Any, flags: int) -> int:
        if not self._within(self.pinned, number(address), 1):
            return INVALID_VALUE
        put(out, number(address))
        return 0

    def _allocate(self, where: dict[int, np.ndarray], size: int, border: int) -> int:
        # pages of zeros take no memory until they are written: a GPU's memory may be larger than the host's
        raw = np.full(size + border, 0xFF, np.uint8) if self._executes else np.zeros(size + border, np.uint8)
        memory = raw[-raw.ctypes.data % border :][:size]
        where[memory.ctypes.data] = memory
        return memory.ctypes.data

    def _cuMemFree_v2(self, address: Any) -> int:
        self.idle()
        if (file := self._shared.pop(number(address), None)) is not None:
            os.close(file)
        return 0 if self.device.pop(number(address), None) is not None else INVALID_VALUE

    def _cuMemFreeHost(self, address: Any) -> int:
        self.idle()
        return 0 if self.pinned.pop(number(address), None) is not None else INVALID_VALUE

    # --- memory of other processes: a handle is the number of a process and that of its file with the allocation's pages

    def _cuIpcGetMemHandle(self, out: Any, address: Any) -> int:
        start = number(address)
        if start not in self.device:
            return INVALID_VALUE
        size = self.device[start].nbytes
        assert size % 4096 == 0, "the emulator shares whole pages"
        if start not in self._shared:
            file = os.memfd_create("tinyvllm-test-gpu")
            os.ftruncate(file, size)
            os.pwrite(file, self.device[start].data, 0)
            self._shared[start] = file
            fixed = _mmap(start, size, 3, 0x11, file, 0)  # PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED: the same address
            assert fixed == start
        handle = np.array([os.getpid(), self._shared[start], size, *[0] * 5], np.int64)
        ctypes.memmove(ctypes.addressof(out._obj), handle.ctypes.data, handle.nbytes)
        return 0

    def _cuIpcOpenMemHandle_v2(self, out: Any, handle: Any, flags: int) -> int:
        if self._peers == "none" or flags != 1:
            return NO_PEER
        pid, file, size = np.frombuffer(ctypes.string_at(ctypes.addressof(handle), 64), np.int64)[:3].tolist()
        try:
            with open(f"/proc/{pid}/fd/{file}", "r+b") as pages:
                memory = np.frombuffer(mmap.mmap(-1 if self._peers == "lost" else pages.fileno(), size), np.uint8)
        except OSError:
            return INVALID_VALUE
        self.imported[memory.ctypes.data] = memory
        put(out, memory.ctypes.data)
        return 0

    def _cuIpcCloseMemHandle(self, address: Any) -> int:
        self.idle()
        return 0 if self.imported.pop(number(address), None) is not None else INVALID_VALUE

    def _within(self, where: dict[int, np.ndarray], address: int, size: int) -> bool:
        return any(start <= address and address + size <= start + memory.nbytes for start, memory in where.items())

    def _reachable(self, address: int, size: int) -> bool:
        """Whether the device can access it: pinned memory has one address for host and device."""
        return any(self._within(where, address, size) for where in (self.device, self.pinned, self.imported))

    def _cuMemcpyHtoDAsync_v2(self, to: Any, source: Any, size: int, stream: Any) -> int:
        to, source = number(to), number(source)
        if not self._reachable(to, size):
            return INVALID_VALUE
        self.uploaded += size
        if self._within(self.pinned, source, size):
            return self._enqueue(lambda: copy(to, source, size))
        data = ctypes.string_at(source, size)  # the driver copies pageable memory before it returns
        return self._enqueue(lambda: copy(to, data, size))

    def _cuMemcpyDtoHAsync_v2(self, to: Any, source: Any, size: int, stream: Any) -> int:
        to, source = number(to), number(source)
        if not self._reachable(source, size):
            return INVALID_VALUE
        self._enqueue(lambda: copy(to, source, size))
        if not self._within(self.pinned, to, size):
            self.idle()
        return 0

    def _cuMemcpyDtoH_v2(self, to: Any, source: Any, size: int) -> int:
        status = self._cuMemcpyDtoHAsync_v2(to, source, size, None)
        self.idle()
        return status

    def _cuMemcpyDtoDAsync_v2(self, to: Any, source: Any, size: int, stream: Any) -> int:
        to, source = number(to), number(source)
        if not self._reachable(to, size) or not self._reachable(source, size):
            return INVALID_VALUE
        return self._enqueue(lambda: copy(to, source, size))

    # --- events: the number of the last work issued before them

    def _cuEventCreate(self, out: Any, flags: int) -> None:
        put(out, self._new(0))

    def _cuEventDestroy_v2(self, event: Any) -> None:
        del self._handles[number(event)]

    def _cuEventRecord(self, event: Any, stream: Any) -> None:
        self._handles[number(event)] = self._issued

    def _cuEventQuery(self, event: Any) -> int:
        self._run(self._done + self._random.choice((0, 1)))  # repeated queries make progress
        return 0 if self._handles[number(event)] <= self._done else NOT_READY

    def _cuEventSynchronize(self, event: Any) -> None:
        self._run(self._handles[number(event)])

    def _cuEventElapsedTime(self, out: Any, first: Any, last: Any) -> None:
        out._obj.value = 1.0

    def _cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> None:
        pass

    # --- programs

    def _cuModuleLoadData(self, out: Any, image: bytes) -> int:
        if self._executes:
            put(out, self._new(image.removeprefix(MACHINE_CODE).decode()))
            return 0
        if image[:4] != b"\x7fELF":
            return INVALID_IMAGE
        flags = int.from_bytes(image[48:52], "little")  # the architecture is in the lowest byte up to CUDA 12, in the next one since
        if 10 * self._capability[0] + self._capability[1] not in (flags & 0xFF, flags >> 8 & 0xFF):
            return NO_BINARY_FOR_GPU
        put(out, self._new(image))
        return 0

    def _cuModuleUnload(self, module: Any) -> None:
        self.idle()
        self._handles.pop(number(module), None)  # missing if a failed test has kept a program of an earlier driver

    def _cuModuleGetFunction(self, out: Any, module: Any, name: bytes) -> int:
        text = self._handles[number(module)]
        if isinstance(text, bytes):
            if b".text." + name + b"\0" not in text:
                return NOT_FOUND
            put(out, self._new(Function("", name.decode(), 0)))
            return 0
        integers = integers_of(text, name.decode())
        if integers is None:
            return NOT_FOUND
        put(out, self._new(Function(text, name.decode(), integers)))
        return 0

    def _cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        if attribute != MAX_DYNAMIC_SHARED or value > MAX_SHARED_BYTES:
            return INVALID_VALUE
        self._handles[number(function)].max_shared = max(DEFAULT_SHARED, value)
        return 0

    def _launch(self, function: Any, dims: tuple[int, ...], shared: int, extra: Any) -> Launch | None:
        """A launch with its current arguments; None if a driver would reject it."""
        loaded: Function = self._handles[number(function)]
        grid, block = dims[:3], dims[3:]
        if min(dims) < 1 or np.prod(block) > 1024 or shared > loaded.max_shared:
            return None
        assert extra[0] == 1 and extra[2] == 2 and not extra[4], "arguments must be one buffer: its address, then the address of its size"
        size = ctypes.c_size_t.from_address(extra[3]).value
        return Launch(loaded, (grid[0], grid[1], grid[2]), (block[0], block[1], block[2]), shared, ctypes.string_at(extra[1], size))

    def _execute(self, launch: Launch) -> None:
        """Run a kernel: its arguments are pointers, then integers."""
        function, size = launch.function, len(launch.arguments)
        if not self._executes:
            self.launched.append(function.name)
            return
        pointers, rest = divmod(size - 4 * function.integers, 8)
        assert rest == 0, f"{function.name} takes {function.integers} integers, got {size} bytes of arguments"
        addresses = np.frombuffer(launch.arguments, np.uint64, pointers).tolist()
        integers = np.frombuffer(launch.arguments, np.int32, offset=8 * pointers).tolist()
        self.launched.append(function.name)
        text = function.text
        if function.name == self.fail_once:
            self.fail_once, self._failure, text = None, LAUNCH_FAILED, without_last_block(text, function.name)
        resident = math.prod(launch.grid) if meets_others(text) else 3
        emulate_source(
            text, function.name, launch.grid, launch.block, launch.shared, [*addresses, *integers], self._memory_of(addresses),
            seed=self._random.getrandbits(32), races=self._races, resident=resident,
        )  # fmt: skip

    def _memory_of(self, addresses: list[int]) -> list[Memory]:
        """The allocations that the pointers point into: all the memory that a kernel may access."""
        allocations: dict[int, Memory] = {}
        for i, address in enumerate(addresses):
            for start, memory in (*self.device.items(), *self.pinned.items(), *self.imported.items()):
                if start <= address < start + memory.nbytes:
                    name = allocations[start].name if start in allocations else "argument"
                    allocations[start] = Memory(start, memory.nbytes, f"{name} {i}")
        return list(allocations.values())

    def _cuLaunchKernel(self, function: Any, *rest: Any) -> int:
        launch = self._launch(function, rest[:6], rest[6], rest[9])
        return INVALID_VALUE if launch is None else self._enqueue(lambda: self._execute(launch))

    # --- graphs

    def _cuGraphCreate(self, out: Any, flags: int) -> None:
        put(out, self._new(Graph()))

    def _cuGraphDestroy(self, graph: Any) -> None:
        del self._handles[number(graph)]

    def _node(self, parameters: Any) -> Launch | None:
        p = parameters._obj
        dims = (p.gridDimX, p.gridDimY, p.gridDimZ, p.blockDimX, p.blockDimY, p.blockDimZ)
        return self._launch(p.func, dims, p.sharedMemBytes, p.extra)

    def _cuGraphAddKernelNode(self, out: Any, graph: Any, before: Any, count: int, parameters: Any) -> int:
        launch = self._node(parameters)
        if launch is None:
            return INVALID_VALUE
        node, within = next(self._numbers), self._handles[number(graph)]
        within.before[node] = [number(before[i]) for i in range(count)]
        assert all(other in within.nodes for other in within.before[node]), "an edge to a node of another graph"
        within.nodes[node] = launch
        put(out, node)
        return 0

    def _cuGraphAddDependencies_v2(self, graph: Any, before: Any, nodes: Any, edges: Any, count: int) -> int:
        """A node that begins with the one before waits for it by itself: the emulator checks that in the kernel."""
        within, edge = self._handles[number(graph)], edges._obj
        if count != 1 or (edge.from_port, edge.to_port, edge.type) != (1, 0, 1) or self._capability < (9, 0):
            return INVALID_VALUE
        early, earlier = number(nodes[0]), number(before[0])
        assert early in within.nodes and earlier in within.nodes, "an edge between nodes of other graphs"
        if self._executes and not awaits_previous(within.nodes[early].function.text):
            raise DriverError(f"{within.nodes[early].function.name} begins early and does not wait for the kernel before it")
        within.before[early].append(earlier)
        return 0

    def _cuGraphInstantiate_v2(self, out: Any, graph: Any, node: Any, log: Any, size: int) -> None:
        whole = self._handles[number(graph)]
        put(out, self._new(Graph(dict(whole.nodes), {node: list(before) for node, before in whole.before.items()})))

    def _cuGraphExecKernelNodeSetParams(self, instance: Any, node: Any, parameters: Any) -> int:
        launch, graph = self._node(parameters), self._handles[number(instance)]
        if launch is None or number(node) not in graph.nodes:
            return INVALID_VALUE
        graph.nodes[number(node)] = launch
        return 0

    def _cuGraphExecDestroy(self, instance: Any) -> None:
        self.idle()
        del self._handles[number(instance)]

    def _cuGraphLaunch(self, instance: Any, stream: Any) -> int:
        graph: Graph = self._handles[number(instance)]
        nodes = dict(graph.nodes)  # setting a node's parameters changes later launches only
        return self._enqueue(lambda: self._run_nodes(nodes, graph.before))

    def _run_nodes(self, nodes: dict[int, Launch], before: dict[int, list[int]]) -> None:
        left = dict(nodes)
        while left and not self._failure:
            node = self._random.choice([node for node in left if not any(other in left for other in before[node])])
            self._execute(left.pop(node))


_mmap = ctypes.CDLL(None).mmap
_mmap.restype, _mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


# --- arguments passed by ctypes


def number(handle: Any) -> int:
    """A handle or an address as an integer, whichever ctypes type it has."""
    if isinstance(handle, int):
        return handle
    return int.from_bytes(ctypes.string_at(ctypes.addressof(handle), ctypes.sizeof(handle)), "little")


def put(out: Any, value: int) -> None:
    """Write an integer or a handle through a `byref`."""
    ctypes.memmove(ctypes.addressof(out._obj), value.to_bytes(ctypes.sizeof(out._obj), "little"), ctypes.sizeof(out._obj))


def copy(to: int, source: int | bytes, size: int) -> None:
    ctypes.memmove(to, source, size)


def integers_of(text: str, name: str) -> int | None:
    """The number of integer parameters of a function in the text; None if there is no such function."""
    plain = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    match = re.search(rf"__global__[^;{{}}]*?\b{re.escape(name)}\s*\(([^)]*)\)\s*\{{", plain)
    if match is None:
        return None
    return sum(re.fullmatch(r"\s*([A-Z_]+ )*(const )?int \w+\s*", parameter) is not None for parameter in match[1].split(","))


def meets_others(text: str) -> bool:
    """Whether blocks of the kernel wait for those of other processes, so that all of them must run at a time."""
    return "void meet(" in text


def without_last_block(text: str, name: str) -> str:
    """The text with a kernel whose last block does nothing."""
    wait = "await_previous(); " if awaits_previous(text) else ""
    return re.sub(rf"(\b{re.escape(name)}\s*\([^)]*\)\s*\{{)", rf"\1 if (blockIdx.x == gridDim.x - 1) {{ {wait}return; }}", text, count=1)


class _SourceCompiler(Compiler):
    """In place of tinygrad's compiler: the binary is the source."""

    def __init__(self, arch: str, ptx: bool = True, cache_key: str = "cuda"):
        super().__init__(None)  # without a cache
        self.ptx = ptx

    def compile(self, src: str) -> bytes:
        return src.encode() if self.ptx else MACHINE_CODE + src.encode()


class _InMemory(DiskTable):
    """A cache of tinygrad that writes nothing to disk, where a process with a GPU would load the source as machine code."""

    get: Any = dict.get
    __setitem__: Any = dict.__setitem__


# --- replacing what tinygrad and tinyvllm use


MACHINE_CODE = b"\x7fELF\xff"  # the start of binaries, and of no text


def source_of(kernel: Kernel, arch: str | None = None, *compiling: Any) -> bytes:
    """In place of the machine code of a hand-written kernel: its source, with the emulator's headers."""
    return MACHINE_CODE + kernel_text(kernel, INCLUDES).encode()


@contextlib.contextmanager
def cuda_device(**options: Any) -> Iterator[Driver]:
    """Makes tinygrad's device CUDA an emulated one, opened by `open_device`; `options` are those of Driver.

    Afterwards the process has no device and no cached program of it; nothing is written to disk but, where the driver does not execute,
    machine code and tinygrad's programs, which are those of a real GPU.
    """
    from tinygrad import Device, codegen, schedule
    from tinygrad.engine import realize
    from tinygrad.runtime import ops_cuda
    from tinygrad.runtime.autogen import cuda
    from tinygrad.runtime.support import compiler_cuda

    from tinyvllm.backends.cuda import nvrtc
    from tinyvllm.backends.registry import open_device
    from tinyvllm.bridge import arena, cuda_driver
    from tinyvllm.placement import Placement

    cuda_driver()  # adds what tinygrad's bindings lack
    driver = Driver(**options)
    names = [name for name in vars(cuda) if re.match("cu[A-Z]", name) and callable(getattr(cuda, name))]
    opened: dict[str, Any] = {}
    original = type(Device).__dict__["_Device__get_canonicalized_item"]

    def device(self: Any, name: str) -> Any:
        if not name.startswith("CUDA"):
            return original(self, name)
        if name not in opened:
            opened[name] = ops_cuda.CUDADevice(name)
        return opened[name]

    with contextlib.ExitStack() as undo:
        for name, function in driver.functions(names).items():
            undo.enter_context(_replaced(cuda, name, function))
        undo.enter_context(_replaced(type(Device), "_Device__get_canonicalized_item", device))
        undo.enter_context(_replaced(ops_cuda.CUDADevice, "devices", []))
        undo.enter_context(default_kept())
        if options.get("executes", True):
            os.environ.setdefault("TINYVLLM_KEEP_STEPS", "0")  # a process with a GPU would load the source as machine code
            undo.enter_context(_replaced(compiler_cuda, "NVRTCCompiler", _SourceCompiler))
            undo.enter_context(_replaced(codegen, "to_program_cache", _InMemory("programs")))
            undo.enter_context(_replaced(schedule, "schedule_cache", _InMemory("schedules")))
            undo.enter_context(_replaced(nvrtc, "cubin", source_of))
            undo.enter_context(_replaced(nvrtc, "waits", lambda arch: driver._capability >= (9, 0)))
        undo.callback(gc.collect)  # destructors of programs and buffers call the driver: they run while it is there
        undo.callback(opened.clear)
        undo.callback(arena._arenas.clear)  # what a test still holds is memory of this driver: the next one must not take it
        undo.callback(_drop_programs, realize.runtime_cache)
        _drop_programs(realize.runtime_cache)
        open_device(Placement("CUDA"))
        yield driver
        driver.idle()


@contextlib.contextmanager
def default_kept() -> Iterator[None]:
    """tinygrad's default device is afterwards that of before: an engine makes its own the default, and the emulated one is gone by then."""
    from tinygrad import helpers

    before = helpers.DEV._value
    try:
        yield
    finally:
        helpers.DEV._value = before


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _drop_programs(programs: dict[tuple[bytes, str], Any]) -> None:
    """Free everything that would call the driver later, while the driver exists."""
    from tinyvllm.backends.cuda import driver as gpu
    from tinyvllm.backends.cuda.launch import _ahead, loaded, machine_code
    from tinyvllm.bridge import forget_zeros, remove_hooks

    for key in [key for key in programs if key[1].startswith("CUDA")]:
        del programs[key]
    for cached in (gpu.copies_of, gpu.gpu_attribute, loaded, machine_code):
        cached.cache_clear()
    forget_zeros("CUDA")
    _ahead.clear()
    remove_hooks("CUDA")
    gc.collect()
