"""The one file that touches what lies below tinygrad's public surface (0.13.0).

Host access to device buffers without a graph, programs written in UOps that tinygrad's own ops cannot express (stores through an index),
and the state of a captured step. Everything else in this project sees Tensors only.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import Any

import numpy as np
from tinygrad import Context, Device, Tensor, TinyJit, UOp, codegen, dtypes, helpers, schedule
from tinygrad.device import Buffer
from tinygrad.dtype import _from_np_dtype, _to_np_dtype
from tinygrad.engine.jit import GraphRunner
from tinygrad.engine.realize import graph_cache
from tinygrad.helpers import diskcache_get, diskcache_put
from tinygrad.renderer import Estimates
from tinygrad.runtime.ops_cpu import CPUWorker
from tinygrad.runtime.support.elf import jit_loader
from tinygrad.uop.ops import KernelInfo, Ops, ProgramInfo, buffers

from tinyvllm.batch import LayerCache
from tinyvllm.errors import KernelError
from tinyvllm.ops import nvrtc
from tinyvllm.ops.compile import object_code
from tinyvllm.ops.crew import ALONE, CORES, MOST_ARGUMENTS, TEAM, crew
from tinyvllm.ops.cuda_device import Arrival, Copies, Mark
from tinyvllm.ops.kernel import Kernel


class _Kept(dict[Any, Any]):
    """A cache of tinygrad's, continued on disk: tinygrad keeps binaries there, but derives every kernel's source again in each process."""

    def __init__(self, table: str, strip: Callable[[UOp], UOp]):
        self._table, self._strip = f"tinyvllm_{table}_tinygrad_0_13_0_a", strip

    def get(self, key: Any, default: Any = None) -> Any:
        value = super().get(key)
        if value is None and (value := diskcache_get(self._table, _digest(key))) is not None:
            super().__setitem__(key, value)
        return default if value is None else value

    def __setitem__(self, key: Any, value: UOp) -> None:
        value = self._strip(value)
        super().__setitem__(key, value)
        diskcache_put(self._table, _digest(key), value)


def _digest(key: Any) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()


def _without_linear(program: UOp) -> UOp:
    """A compiled program needs neither its syntax tree nor its instruction list to run; they are most of its size."""
    sink, device, _, source, binary = program.src
    info = sink.arg
    if info.estimates is not None:  # at their largest: tinygrad would add them up as symbols at every capture, for half of its time
        work = {f.name: _largest(getattr(info.estimates, f.name)) for f in dataclasses.fields(info.estimates)}
        info = dataclasses.replace(info, estimates=dataclasses.replace(info.estimates, **work))
    return program.replace(src=(UOp.sink(arg=info), device, UOp(Ops.LINEAR), source, binary))


def _largest(amount: int | UOp) -> int:
    return int(amount.vmax) if isinstance(amount, UOp) else amount


_connections = threading.local()
_connect = helpers.db_connection


def _connection_of_thread() -> Any:
    """tinygrad's disk cache in a connection of this thread's own: sqlite refuses tinygrad's one connection to a second engine's thread."""
    if getattr(_connections, "own", None) is None:
        helpers._db_connection = None
        _connections.own = _connect()
    return _connections.own


def keep_programs() -> None:
    """From now on, find schedules and compiled programs of earlier processes on disk. Start-up falls from seconds to tenths."""
    if not isinstance(codegen.to_program_cache, _Kept):
        helpers.db_connection = _connection_of_thread
        os.environ.setdefault("GRAPH_ONE_KERNEL", "1")  # a lone kernel replays as a graph too, in half the host's time
        codegen.to_program_cache = _Kept("programs", _without_linear)
        schedule.schedule_cache = _Kept("schedules", lambda linear: linear)


def prefer_device(device: str) -> None:
    """Make `device` tinygrad's default, unless somebody chose one: otherwise tinygrad probes every backend for it, at length."""
    if not helpers.DEV.device:
        helpers.DEV.value = device


def open_device(device: str) -> None:
    """Open `device`, which tinygrad otherwise does at its first use; whatever its backend raises where it cannot."""
    opened = Device[device]
    if device.split(":")[0] == "CPU" and opened.graph is not CrewGraph:
        opened.graph = CrewGraph
        opened.allocator._free = _never_waiting_for_itself(opened.allocator._free)  # type: ignore[method-assign]
    if device.split(":")[0] == "CUDA" and opened.graph is not LineGraph:
        opened.graph = LineGraph
        opened.allocator._copyin = functools.partial(_copy_in, device)  # type: ignore[method-assign]
        opened.runtime = _never_shown(opened.runtime)
        _compile_to_machine_code(opened)


def _compile_to_machine_code(opened: Any) -> None:
    """tinygrad's kernels, too, as machine code: a driver older than NVRTC, which a wheel often is newer than, takes no PTX of it."""
    from tinygrad.runtime.support import compiler_cuda

    if isinstance(opened.renderer.compiler, compiler_cuda.NVRTCCompiler):
        opened.renderer.compiler = compiler_cuda.NVRTCCompiler(opened.arch, ptx=False, cache_key="cuda_cubin")


def _never_shown(runtime: Callable[..., Any]) -> Callable[..., Any]:
    """`runtime`, which from DEBUG=5 on prints the program as the text that it takes it for; machine code is none."""

    def made(*arguments: Any, **named: Any) -> Any:
        with Context(DEBUG=min(helpers.DEBUG.value, 4)):
            return runtime(*arguments, **named)

    return made


_held: list[Any] = []  # buffers to be let go once the CPU device is idle


def _never_waiting_for_itself(free: Callable[..., None]) -> Callable[..., None]:
    """`free`, for buffers that Python collects in the very thread that empties tinygrad's queue: it would wait for itself for ever."""

    def later(opaque: Any, options: Any = None) -> None:
        if isinstance(threading.current_thread(), CPUWorker):
            _held.append(opaque)
        else:
            free(opaque, options)

    return later


def synchronize(device: str) -> None:
    """Wait until everything launched on `device` has run. `realize()` of tinygrad returns before the CPU device's worker has begun."""
    Device[device].synchronize()


def upload(tensor: Tensor, array: np.ndarray, start: int = 0) -> None:
    """Overwrite elements start.. of a realized, contiguous tensor with `array` (same item size), keeping its buffer.

    A captured step replays on buffers, so its inputs are changed in place. On a device with host-visible memory this waits for the
    work in flight (about 2 us when idle) and then is a memcpy. On a CUDA device the copy stands behind what has been launched, and
    nothing waits.
    """
    buffer = _buffer(tensor)
    array = np.ascontiguousarray(array)
    if (start + array.size) > buffer.size or array.itemsize != buffer.dtype.itemsize:
        raise ValueError(f"upload: {array.size} items of {array.itemsize} bytes at {start} do not fit {buffer}")
    if (memory := _host_memory(buffer)) is not None:
        memory[start * array.itemsize : (start + array.size) * array.itemsize] = array.data.cast("B")
        return
    if buffer.device.split(":")[0] == "CUDA":
        _copies(buffer.device).upload(buffer._buf.value + start * array.itemsize, array)
        return
    if start == 0 and array.size == buffer.size:
        buffer.copyin(array.data.cast("B"))
        return
    view = buffer.view(array.size, buffer.dtype, start * buffer.dtype.itemsize).ensure_allocated()
    view.copyin(array.data.cast("B"))


def _buffer(tensor: Tensor) -> Buffer:
    buffer = tensor.uop.buffer
    assert isinstance(buffer, Buffer), f"launch: one device's buffer expected, got {buffer}"
    return buffer.ensure_allocated()


def _host_memory(buffer: Buffer) -> memoryview | None:
    """The bytes of a CPU buffer once the device is idle, None on other devices. tinygrad's own copies cost ten times as much."""
    return buffer.as_memoryview(force_zero_copy=True) if buffer.device.split(":")[0] == "CPU" and buffer.options is None else None


def download(tensor: Tensor) -> np.ndarray:
    """The contents of a realized tensor as a new array, after waiting for the work that produces it."""
    shape, dtype, buffer = tuple(int(d) for d in tensor.shape), _to_np_dtype(tensor.dtype), _buffer(tensor)
    if (memory := _host_memory(buffer)) is not None:
        return np.frombuffer(memory, dtype).reshape(shape).copy()
    if buffer.device.split(":")[0] == "CUDA" and buffer.nbytes <= _MOST_PINNED:
        return read_behind(tensor).get()
    array = np.empty(shape, dtype)
    buffer.copyout(array.data.cast("B"))
    return array


_MOST_PINNED = 1 << 20  # bytes; larger downloads are no part of serving, and would keep as much host memory from everybody else


class Reading:
    """The contents of a tensor, on their way to the host or there already."""

    def __init__(self, arrival: Arrival | None, array: np.ndarray):
        self._arrival, self._array = arrival, array

    def ready(self) -> bool:
        """Whether `get` would not have to wait."""
        return self._arrival is None or self._arrival.ready()

    def get(self) -> np.ndarray:
        """The contents, once they are there."""
        return self._array if self._arrival is None else self._arrival.get().view(self._array.dtype).reshape(self._array.shape)


def read_behind(tensor: Tensor) -> Reading:
    """Start reading a realized, small tensor as it is when all that has been launched until now has run.

    On a CUDA device this only puts a copy behind the work in flight; what is launched or uploaded later does not change what comes. Other
    devices are waited for here.
    """
    buffer = _buffer(tensor)
    if buffer.device.split(":")[0] != "CUDA":
        return Reading(None, download(tensor))
    like = np.broadcast_to(np.empty((), _to_np_dtype(tensor.dtype)), tuple(int(d) for d in tensor.shape))
    return Reading(_copies(buffer.device).read(buffer._buf.value, buffer.nbytes), like)


@functools.cache
def _copies(device: str) -> Copies:
    """The one that copies to and from a CUDA device."""
    from tinygrad.runtime.autogen import cuda

    return Copies(cuda, Device[device].context)  # type: ignore[attr-defined]


def _copy_in(device: str, opaque: Any, source: memoryview) -> None:
    """tinygrad's copy to a CUDA device keeps pinned memory as large as all it has ever copied between two synchronisations, and after."""
    _copies(device).upload(opaque.value, np.frombuffer(source, np.uint8))


def alias(tensor: Tensor) -> Tensor:
    """A second tensor over the memory of a realized one, which tinygrad takes for another."""
    twin, buffer = Tensor.empty(*tensor.shape, dtype=tensor.dtype, device=tensor.device), _buffer(tensor)
    buffers[twin.uop.base] = buffer.view(buffer.size, buffer.dtype, 0).ensure_allocated()
    return twin


def spans(tensor: Tensor, places: list[tuple[int, int]]) -> list[Tensor]:
    """Tensors over parts (start, size) of a realized one's elements: the same memory, which tinygrad takes for others."""
    buffer, out = _buffer(tensor), []
    for start, size in places:
        part = Tensor.empty(size, dtype=tensor.dtype, device=tensor.device)
        buffers[part.uop.base] = buffer.view(size, buffer.dtype, start * buffer.dtype.itemsize).ensure_allocated()
        out.append(part)
    return out


@functools.cache
def standing_zeros(device: str, count: int) -> Tensor:
    """int32 [count] of zeros, one for all who ask for as many: for kernels that count in it and leave it as they found it.

    Made past the graph: what is first computed in a captured step would be computed in each of them.
    """
    tensor = Tensor.empty(count, dtype=dtypes.int32, device=device)
    buffer = Buffer(device, count, dtypes.int32).allocate()
    buffer.copyin(memoryview(bytearray(4 * count)))
    buffers[tensor.uop.base] = buffer
    return tensor


@functools.cache
def gpu_attribute(device: str, name: str) -> int:
    """What the driver says of a CUDA device, by the driver's names: "MULTIPROCESSOR_COUNT", ..."""
    from tinygrad.runtime.autogen import cuda

    found = ctypes.c_int()
    which = getattr(cuda, f"CU_DEVICE_ATTRIBUTE_{name}")
    if status := cuda.cuDeviceGetAttribute(ctypes.byref(found), which, Device[device].cu_device):  # type: ignore[attr-defined]
        raise KernelError(f"launch: the driver does not say {name} of {device} (status {status})")
    return found.value


def gpu_free_memory(device: str) -> int:
    """Bytes that the driver has left on a CUDA device."""
    from tinygrad.runtime.autogen import cuda

    Device[device].synchronize()  # makes the device this thread's
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    if status := cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)):
        raise KernelError(f"launch: the driver does not say how much memory {device} has free (status {status}); give --kv-memory")
    return free.value


@functools.cache
def _machine_code(kernel: Kernel, device: str = "CPU") -> bytes:
    if kernel.backend == "cuda":
        return nvrtc.cubin(kernel, Device[device].arch)
    return jit_loader(object_code(kernel))


@functools.cache
def _solo() -> Tensor:
    """A team of one lane with its own shared words: the last argument of a CPU kernel that runs outside a captured step."""
    words = np.zeros(512, np.uint8)
    start = -words.ctypes.data % 64
    team = words[start : start + 64]
    team[:8].view(np.int32)[:] = 0, 1
    team[8:16].view(np.uint64)[0] = team.ctypes.data + 64
    tensor = Tensor.from_blob(team.ctypes.data, (64,), device="CPU", dtype=dtypes.uint8)
    _solo_words.append(words)
    return tensor


_solo_words: list[np.ndarray] = []  # kept: the tensor does not own them


def launch(kernel: Kernel, outs: list[Tensor] | tuple[Tensor, ...], ins: list[Tensor]) -> list[Tensor]:
    """The hand-written kernel as a node of the lazy graph: `outs` after it has written them, in their order.

    Tensors are passed as they lie in memory, so all must be contiguous; `outs` must be buffers (Tensor.empty, or what is to be changed in
    place). Whatever reads a returned tensor runs after the kernel, also in a captured step.
    """
    if (len(outs), len(ins)) != (kernel.outs, kernel.ins):
        raise ValueError(f"launch: {kernel.stem} writes {kernel.outs} and reads {kernel.ins} tensors, got {len(outs)} and {len(ins)}")
    on_cpu, device = kernel.backend == "cpu", str(outs[0].device)
    arguments = [*outs, *ins, _solo()] if on_cpu else [*outs, *ins]

    def program(*placeholders: UOp) -> UOp:
        work = Estimates(ops=kernel.flops, lds=kernel.bytes, mem=kernel.bytes)
        sink = UOp.sink(*placeholders, arg=KernelInfo(name=kernel.name, estimates=work))
        every, written = tuple(range(len(arguments))), tuple(range(kernel.outs))
        # outs and ins must be given: derived from the sink they are empty, and then a graph knows no order
        info = ProgramInfo(kernel.name, (1, 1, 1), None, (), every, written, every)
        if not on_cpu:  # by its name the function is found in the binary; aux is what a CUDA program takes beside it
            threads, shared = (kernel.block, 1, 1), (kernel.shared,)
            info = dataclasses.replace(info, name=kernel.stem, global_size=kernel.grid, local_size=threads, aux=shared)
        binary = UOp(Ops.BINARY, arg=_machine_code(kernel, device))
        source, where = UOp(Ops.SOURCE, arg=kernel.name), UOp(Ops.DEVICE, arg=device)
        return UOp(Ops.PROGRAM, src=(sink, where, UOp(Ops.LINEAR, src=tuple(sink.toposort())), source, binary), arg=info)

    return arguments[0].custom_kernel(*arguments[1:], fxn=program)[: kernel.outs]


@functools.cache
def _address(kernel: Kernel) -> tuple[int, Any]:
    """Where a kernel's code lies in this process, and what keeps it there."""
    program = Device["CPU"].runtime(kernel.name, _machine_code(kernel))
    return _code_address(program), program


def _code_address(program: Any) -> int:
    address = ctypes.cast(program.fxn, ctypes.c_void_p).value
    assert address is not None
    return address


def run_now(kernel: Kernel, *arrays: np.ndarray) -> None:
    """Run a CPU kernel on host memory, outside any graph: the crew has done it on return. For loading, tests and benchmarks."""
    if len(arrays) != kernel.outs + kernel.ins or not all(a.flags.c_contiguous for a in arrays):
        raise ValueError(f"run_now: {kernel.stem} takes {kernel.outs + kernel.ins} contiguous arrays")
    words = [_address(kernel)[0], TEAM, len(arrays), 0, 1, *(a.ctypes.data for a in arrays)]
    crew().run(np.array(words, np.int64), 1)


def store_kv(cache: LayerCache, k: Tensor, v: Tensor, slots: Tensor) -> LayerCache:
    """cache, of [P, 2, K, S, D], with k, v [T, K, D] written at slots [T] (block * S + offset), in place; returns the cache after it.

    tinygrad's scatter rewrites the whole destination; this stores T rows. Whatever reads the returned tensors runs after the store,
    also inside a captured step.
    """
    _, _, K, S, D = cache.keys.shape

    def program(keys: UOp, values: UOp, k: UOp, v: UOp, slots: UOp) -> UOp:
        t, h, d = UOp.range(k.shape[0], 0), UOp.range(K, 1), UOp.range(D, 2)
        slot = slots[t].cast(dtypes.weakint)
        block, offset, dtype = slot // S, slot % S, keys.dtype.base
        key = keys[block, 0, h, offset, d].store(k[t, h, d].cast(dtype))
        value = values[block, 1, h, offset, d].store(v[t, h, d].cast(dtype))
        return UOp.group(key, value).end(t, h, d).sink(arg=KernelInfo(name="store_kv"))

    return LayerCache(*cache.keys.custom_kernel(cache.values, k, v, slots, fxn=program)[:2])


def scatter_add(table: Tensor, rows: Tensor, columns: Tensor, amount: int = 1) -> Tensor:
    """table [R, V] int32 with `amount` added at (rows [B], columns [B]), in place, one after the other; returns the table after it."""

    def program(table: UOp, rows: UOp, columns: UOp) -> UOp:
        b = UOp.range(rows.shape[0], 0)
        cell = table[rows[b].cast(dtypes.weakint), columns[b].cast(dtypes.weakint)]
        return cell.store(cell + amount).end(b).sink(arg=KernelInfo(name="scatter_add", opts_to_apply=()))

    return table.custom_kernel(rows, columns, fxn=program)[0]


class Captured:
    """A function of tensors that is captured by TinyJit at its first call and replayed as one graph ever after.

    tinygrad runs a function once in the open before it captures; with all weights and inputs realized that run only costs a second
    scheduling of the whole step. A replay goes to the captured graph at once: TinyJit's check of the arguments takes longer than the
    launch. So arguments must be realized tensors of the first call's shapes, and whatever else the function reads must lie in buffers
    that stay. `variables` are the function's integer arguments, by name, with their bounds.
    """

    def __init__(self, function: Callable[..., Any], variables: Mapping[str, tuple[int, int]] | None = None):
        self._jit, self._variables = TinyJit(function), dict(variables or {})
        self._jit.cnt = 1
        self._graph: Callable[[tuple[UOp, ...], dict[str, int]], Any] | None = None
        self._result: Any

    def __call__(self, *tensors: Tensor, **values: int) -> Any:
        """The function's result, a tensor or several, in buffers that the next call overwrites."""
        if self._graph is not None:
            self._graph(tuple(tensor.uop.base for tensor in tensors), values)
            return self._result
        if self._jit.captured is not None:
            return self._jit.captured([tensor.uop.base for tensor in tensors], values)
        bound = {name: UOp.variable(name, *self._variables[name]).bind(value) for name, value in values.items()}
        with Context(JIT_BATCH_SIZE=0):
            self._result = self._jit(*tensors, **bound)
        if self._jit.captured is not None:  # JIT=0 in the environment captures nothing
            self._graph = self._only_graph()
        return self._result

    def _only_graph(self) -> Callable[[tuple[UOp, ...], dict[str, int]], Any] | None:
        """The device graph, where the whole capture is one that takes the arguments as they come: a replay then passes the jit by."""
        assert self._jit.captured is not None
        calls = self._jit.captured.linear.src
        if len(calls) != 1 or calls[0].src[0].op is not Ops.CUSTOM_FUNCTION or self._jit.captured._written_uops & set(calls[0].src[1:]):
            return None
        arguments = [u.arg for u in calls[0].src[1:] if u.op is Ops.PARAM]
        graph = graph_cache.get(calls[0].src[0]) if arguments == list(range(len(arguments))) else None
        if graph is not None and graph.device == "CPU" and not any(graph.uop_replace):
            graph.uop_replace = []  # one empty list a kernel, which every replay would go through: 0.1 ms at 290 kernels
        return graph


Call = tuple[Captured, tuple[Tensor, ...], dict[str, int]]  # what is captured, its tensors and its variables' values


class Behind:
    """Work that goes on behind the caller's back, if there is any."""

    PATIENCE = 0.002  # seconds; looking more often costs the lanes more than it brings

    def __init__(self, work: Future[None] | Mark | None = None):
        self._work = work

    def wait(self) -> bool:
        """Wait a moment; whether all is done. Raises what the work has raised."""
        if self._work is None:
            return True
        try:
            self._work.result(self.PATIENCE)
        except TimeoutError:
            return False
        return True


def repeat(calls: list[Call], times: int) -> Behind:
    """Start these calls one after the other, all of them `times` times over. Each must have been made before.

    On the CPU that is one list of kernels for the crew, run from a thread of its own: the caller goes on meanwhile, may `peek` at buffers
    and must wait for the end before it launches or uploads anything. A CUDA device has them all in its stream on return.
    """
    graphs = [captured._graph for captured, _, _ in calls]
    if times > 0 and all(isinstance(graph, CrewGraph) for graph in graphs):
        for graph, (_, tensors, values) in zip(graphs, calls, strict=True):
            graph.bind(tuple(tensor.uop.base for tensor in tensors), values)  # type: ignore[union-attr]
        return Behind(_launcher().submit(CrewGraph.run, graphs, times))  # type: ignore[arg-type]
    for _ in range(times):
        for captured, tensors, values in calls:
            captured(*tensors, **values)
    if times > 0 and graphs and isinstance(graphs[-1], LineGraph):
        return Behind(_copies(graphs[-1].calls[0][2][0].device).mark())
    return Behind()


@functools.cache
def _launcher() -> ThreadPoolExecutor:
    """The thread that is lane 0 of what runs behind the callers' backs. A forked child makes one of its own."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_launcher.cache_clear)
    return ThreadPoolExecutor(1, thread_name_prefix="tinyvllm-launcher")


def peek(tensor: Tensor) -> np.ndarray:
    """The contents of a realized tensor as they are at this moment; without waiting for the work in flight on the CPU or if `visible`."""
    buffer = _buffer(tensor)
    if buffer.device.split(":")[0] == "CPU":
        address = buffer._buf.va_addr
    elif buffer.base.options is not None and buffer.base.options.external_ptr in _visible:
        address = buffer._buf.value
    else:
        return download(tensor)  # behind the work in flight: there is one stream
    shape, dtype = tuple(int(d) for d in tensor.shape), _to_np_dtype(tensor.dtype)
    assert dtype is not None
    memory = (ctypes.c_uint8 * (prod(shape) * tensor.dtype.itemsize)).from_address(address)
    return np.ctypeslib.as_array(memory).view(dtype).reshape(shape).copy()


def visible(array: np.ndarray, device: str) -> Tensor:
    """A realized tensor on `device` with the contents of `array`, for kernels to write and the host to `peek` at while they run.

    On a CUDA device it lies in host memory, for good, and a kernel's writes cross the bus: for a few numbers a step.
    """
    tensor = Tensor.empty(*array.shape, dtype=_from_np_dtype(array.dtype), device=device)
    if device.split(":")[0] == "CUDA":
        address = _copies(Device.canonicalize(device)).shared(array.nbytes)
        _visible.add(address)
        tensor = Tensor.from_blob(address, array.shape, dtype=tensor.dtype, device=device)
    upload(tensor, array)
    return tensor


_visible: set[int] = set()  # addresses of host memory that a CUDA device writes to


class CrewGraph(GraphRunner):
    """A captured step on the CPU device: one list of kernels, hand-written and generated alike, that the crew runs as one job.

    tinygrad's own graph goes through its Python worker kernel by kernel, 6 to 9 us each, and 67 us where one wants several cores.
    """

    def __init__(self, linear: UOp, input_uops: tuple[UOp, ...] = ()):
        super().__init__(linear, input_uops)
        team, words = _buffer(_solo())._buf.va_addr, []
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
            assert len(arguments) < MOST_ARGUMENTS, f"{info.name} takes {len(arguments)} arguments, the crew passes {MOST_ARGUMENTS - 1}"
            words += [_code_address(runtime), kind, len(arguments), place, cores]
            self._starts.append(len(words))
            words += arguments
        self._list = np.array(words, np.int64)
        self._buffers = [[bufs[i] for i in program.arg.globals] for _, program, bufs, _ in self.calls]  # their addresses are in use
        self._crew = crew()

    def __call__(self, input_uops: tuple[UOp, ...], var_vals: dict[str, int], wait: bool = False) -> float | None:
        self.bind(input_uops, var_vals)
        start = time.perf_counter()
        self.run([self], 1)
        return time.perf_counter() - start if wait else None

    def bind(self, input_uops: tuple[UOp, ...], var_vals: dict[str, int]) -> None:
        """Put the inputs' addresses and the variables' values into the list."""
        for j, replace in enumerate(self.uop_replace):
            for position, i in replace:
                self._list[self._starts[j] + position] = _base_buffer(input_uops[i])._buf.va_addr
        for j, i, value in self.updated_vars(var_vals):
            self._list[self._starts[j] + len(self._buffers[j]) + i] = value

    @staticmethod
    def run(graphs: list[CrewGraph], times: int) -> None:
        """Run the graphs' lists as one, `times` times over, when tinygrad's own queue is empty."""
        words = graphs[0]._list if len(graphs) == 1 else np.concatenate([graph._list for graph in graphs])
        Device[graphs[0].calls[0][2][0].device].synchronize()
        _held.clear()
        graphs[0]._crew.run(words, sum(len(graph.calls) for graph in graphs), times)

    @staticmethod
    def supports_uop(batch_devs: list[Any], new_call: UOp) -> bool:
        return GraphRunner.supports_uop(batch_devs, new_call)


class LineGraph(GraphRunner):
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
        self._addresses = [_base_buffer(u)._buf.value for u in input_uops]
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
        self._bind([_base_buffer(u)._buf.value for u in input_uops], {name: var_vals[name] for name in self.vars})
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

    @staticmethod
    def supports_uop(batch_devs: list[Any], new_call: UOp) -> bool:
        return GraphRunner.supports_uop(batch_devs, new_call)


def _base_buffer(u: UOp) -> Buffer:
    buffer = u.buffer
    assert isinstance(buffer, Buffer)
    return buffer.ensure_allocated()


@contextlib.contextmanager
def uninitialized() -> Iterator[None]:
    """Within it, tinygrad's layers are built without initial values: 22 layers take 1.5 s to draw random weights that loading replaces."""

    def empty(*shape: Any, **kwargs: Any) -> Tensor:
        return Tensor.empty(*shape, dtype=kwargs.get("dtype"), device=kwargs.get("device"))

    names = ("uniform", "glorot_uniform", "zeros", "ones")
    kept = {name: Tensor.__dict__[name] for name in names if name in Tensor.__dict__}
    for name in names:
        setattr(Tensor, name, staticmethod(empty))
    try:
        yield
    finally:
        for name in names:
            if name in kept:
                setattr(Tensor, name, kept[name])
            else:
                delattr(Tensor, name)
