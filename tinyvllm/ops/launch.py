"""The one file that touches what lies below tinygrad's public surface (0.13.0).

Host access to device buffers without a graph, programs written in UOps that tinygrad's own ops cannot express (stores through an index),
and the state of a captured step. Everything else in this project sees Tensors only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from tinygrad import Context, Device, Tensor, TinyJit, UOp, codegen, dtypes, helpers, schedule
from tinygrad.codegen.opt import Opt, OptOps
from tinygrad.device import Buffer
from tinygrad.dtype import _to_np_dtype
from tinygrad.engine.realize import graph_cache
from tinygrad.helpers import CPU_COUNT, diskcache_get, diskcache_put
from tinygrad.uop.ops import AxisType, KernelInfo, Ops, buffers

from tinyvllm.batch import LayerCache


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
    Device[device]


def synchronize(device: str) -> None:
    """Wait until everything launched on `device` has run. `realize()` of tinygrad returns before the CPU device's worker has begun."""
    Device[device].synchronize()


def upload(tensor: Tensor, array: np.ndarray, start: int = 0) -> None:
    """Overwrite elements start.. of a realized, contiguous tensor with `array` (same item size), keeping its buffer.

    A captured step replays on buffers, so its inputs are changed in place. On a device with host-visible memory this waits for the
    work in flight (about 2 us when idle) and then is a memcpy.
    """
    buffer = _buffer(tensor)
    array = np.ascontiguousarray(array)
    if (start + array.size) > buffer.size or array.itemsize != buffer.dtype.itemsize:
        raise ValueError(f"upload: {array.size} items of {array.itemsize} bytes at {start} do not fit {buffer}")
    if (memory := _host_memory(buffer)) is not None:
        memory[start * array.itemsize : (start + array.size) * array.itemsize] = array.data.cast("B")
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
    array = np.empty(shape, dtype)
    buffer.copyout(array.data.cast("B"))
    return array


def alias(tensor: Tensor) -> Tensor:
    """A second tensor over the memory of a realized one, which tinygrad takes for another."""
    twin, buffer = Tensor.empty(*tensor.shape, dtype=tensor.dtype, device=tensor.device), _buffer(tensor)
    buffers[twin.uop.base] = buffer.view(buffer.size, buffer.dtype, 0).ensure_allocated()
    return twin


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


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, I] float32 times weight [O, I] transposed, float32 [T, O], for the CPU device. I and O are multiples of 4.

    tinygrad's choice of loops for this product changes with T, and leaves small ones without independent sums: 1.5 GB/s of weights at
    T = 1 where these loops read 9, 4 GFLOP/s at T = 64 where these reach 17 and more. Up to 16 rows of x lie side by side as lanes.
    Each result is one running sum over I in order, so a row's bits do not depend on how many rows are computed with it.
    """
    T, I, O = int(x.shape[0]), int(x.shape[1]), int(weight.shape[0])
    lanes = next(n for n in (16, 8, 4, 2, 1) if T % n == 0)
    panels = x.float().reshape(T // lanes, lanes, I)
    panels = panels.reshape(1, I, 1) if T == 1 else panels.permute(0, 2, 1).contiguous()  # [T / lanes, I, lanes]
    out = Tensor.empty(T // lanes, O, lanes, dtype=dtypes.float32, device=x.device)
    at_once = next(n for n in ((8, 4) if lanes == 1 else (4,)) if O % n == 0)  # outputs whose sums run together
    panel_axes = int(lanes < T)  # a range of one panel is no axis
    opts = [Opt(OptOps.UPCAST, panel_axes, at_once)]
    if lanes > 1:
        opts.append(Opt(OptOps.UPCAST, panel_axes + 1, lanes))
    opts.append(Opt(OptOps.UNROLL, 0, 4))
    threads = next(n for n in range(CPU_COUNT.value, 0, -1) if (O // at_once) % n == 0)
    worth_it = 1 << (20 if T == 1 else 21)  # waking a second thread takes 67 us: with fewer products, more than it saves
    if threads > 1 and worth_it <= T * O * I:
        opts.append(Opt(OptOps.THREAD, panel_axes, threads))

    def program(out: UOp, panels: UOp, weight: UOp) -> UOp:
        p, o, t, i = UOp.range(T // lanes, 0), UOp.range(O, 1), UOp.range(lanes, 2), UOp.range(I, 3, AxisType.REDUCE)
        total = (panels[p, i, t] * weight[o, i].cast(dtypes.float32)).reduce(i, arg=Ops.ADD)
        return out[p, o, t].store(total).end(p, o, t).sink(arg=KernelInfo(name=f"matmul_{T}_{O}_{I}", opts_to_apply=tuple(opts)))

    done = out.custom_kernel(panels, weight, fxn=program)[0]
    return done.reshape(1, O) if T == 1 else done.permute(0, 2, 1).reshape(T, O)


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

    def __init__(self, function: Callable[..., Tensor], variables: Mapping[str, tuple[int, int]] | None = None):
        self._jit, self._variables = TinyJit(function), dict(variables or {})
        self._jit.cnt = 1
        self._graph: Callable[[tuple[UOp, ...], dict[str, int]], Any] | None = None
        self._result: Tensor

    def __call__(self, *tensors: Tensor, **values: int) -> Tensor:
        """The function's result, in a buffer that the next call overwrites."""
        if self._graph is not None:
            self._graph(tuple(tensor.uop.base for tensor in tensors), values)
            return self._result
        if self._jit.captured is not None:
            result: Tensor = self._jit.captured([tensor.uop.base for tensor in tensors], values)
            return result
        bound = {name: UOp.variable(name, *self._variables[name]).bind(value) for name, value in values.items()}
        with Context(JIT_BATCH_SIZE=0):
            self._result = self._jit(*tensors, **bound)
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
