"""tinygrad's schedules and compiled programs, kept on disk for the next process."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
from collections.abc import Callable
from typing import Any

from tinygrad import UOp, codegen, helpers, schedule
from tinygrad.helpers import diskcache_get, diskcache_put
from tinygrad.uop.ops import Ops


class DiskTable(dict[Any, Any]):
    """One of tinygrad's caches, extended to disk: tinygrad keeps binaries there but derives every kernel's source again in each process."""

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
    """The program without its syntax tree and instruction list: running does not need them, and they are most of its size."""
    sink, device, _, source, binary = program.src
    info = sink.arg
    if info.estimates is not None:  # at their maximum: tinygrad would add them up as symbols at every capture, half of its time
        work = {f.name: _max_value(getattr(info.estimates, f.name)) for f in dataclasses.fields(info.estimates)}
        info = dataclasses.replace(info, estimates=dataclasses.replace(info.estimates, **work))
    return program.replace(src=(UOp.sink(arg=info), device, UOp(Ops.LINEAR), source, binary))


def _max_value(amount: int | UOp) -> int:
    return int(amount.vmax) if isinstance(amount, UOp) else amount


_connections = threading.local()
_connect = helpers.db_connection


def _connection_of_thread() -> Any:
    """A connection to tinygrad's disk cache for this thread: sqlite refuses to share tinygrad's one connection among threads."""
    if getattr(_connections, "own", None) is None:
        helpers._db_connection = None
        _connections.own = _connect()  # type: ignore[no-untyped-call]
    return _connections.own


def enable_program_cache() -> None:
    """From now on, look up schedules and compiled programs of earlier processes on disk. Start-up falls from seconds to tenths."""
    os.environ.setdefault("GRAPH_ONE_KERNEL", "1")  # a single kernel also replays as a graph, in half the host time
    if not isinstance(codegen.to_program_cache, DiskTable):
        helpers.db_connection = _connection_of_thread
        codegen.to_program_cache = DiskTable("programs", _without_linear)
        schedule.schedule_cache = DiskTable("schedules", lambda linear: linear)
