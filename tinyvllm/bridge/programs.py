"""What tinygrad keeps between processes, in our cache folder: schedules, programs, and what its compilers and its search returned.

tinygrad has a database for this, in a folder of its own choice, and unpickles its rows: a damaged database stops every start, and a
planted row runs code. So tinygrad's two functions that read and write it are replaced. Values are files of the cache folder
(`storage.cache`), which are verified before they are read; the pickles in them may name tinygrad's data classes only.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import importlib
import io
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

from tinygrad import UOp, helpers
from tinygrad.renderer import Renderer
from tinygrad.uop.ops import Ops

from tinyvllm.bridge.deferred import when_imported
from tinyvllm.storage.cache import open_cache

FOLDER = "tinygrad"  # in the cache folder
_VERSION = "0.13.0-1"  # tinygrad's version, and a count of changes here
# Classes of plain data. Building them runs no code of the pickle.
_CLASSES = {
    "tinygrad.codegen.opt": ("Opt", "OptOps"),
    "tinygrad.dtype": ("AddrSpace", "ConstFloat", "DType", "ImageDType", "InvalidType", "PtrDType"),
    "tinygrad.helpers": ("Metadata",),
    "tinygrad.renderer": ("Estimates",),
    "tinygrad.uop": ("Ops",),
    "tinygrad.uop.ops": ("AxisType", "CallInfo", "KernelInfo", "ProgramInfo", "UOp"),
}
# Modules that have the two functions by name. The last one, if it is imported later, takes them from the first: it loads multiprocessing.
_READERS = ("tinygrad.helpers", "tinygrad.device", "tinygrad.codegen.opt.search")
_machine = ""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member  # how Python 3.11.0 to 3.11.3 pickle a member of an enumeration
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return getattr(importlib.import_module(module), name)


def _member(kind: Any, name: Any) -> enum.Enum:
    """A member of one of the enumerations among `_CLASSES`; no other attribute of anything."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it asks for {name!r:.80} of {kind!r:.80}")
    return kind.__members__[name]


def _load(table: str, key: object) -> Any:
    """The value that an earlier process has kept; None if there is none, or none that is believed."""
    if helpers.CACHELEVEL < 1:
        return None
    place = _place(table, key)
    content = open_cache().read(place)
    if content is None:
        return None
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # a pickle that was not written here can raise anything
        open_cache().discard(place, f"{type(error).__name__}: {error}"[:200])
        return None


def _keep(table: str, key: object, value: Any, prepickled: bool = False) -> Any:
    if helpers.CACHELEVEL >= 1:
        open_cache().write(_place(table, key), value if prepickled else pickle.dumps(value))
    return value


def _place(table: str, key: object) -> str:
    name = "\0".join((_VERSION, _machine, table, repr(key)))
    return f"{FOLDER}/{hashlib.sha256(name.encode()).hexdigest()[:40]}"


class DiskTable(dict[Any, Any]):
    """One of tinygrad's caches, extended to disk: tinygrad keeps binaries there but derives every kernel's source again in each process."""

    def __init__(self, table: str):
        self._table = table

    def get(self, key: Any, default: Any = None) -> Any:
        value = super().get(key)
        if value is None and (value := _load(self._table, key)) is not None:
            super().__setitem__(key, value)
        return default if value is None else value

    def __setitem__(self, key: Any, value: UOp) -> None:
        super().__setitem__(key, value)
        _keep(self._table, key, value)


def _compiling(compile_program: Callable[[UOp, Renderer], UOp]) -> Callable[[UOp, Renderer], UOp]:
    """tinygrad's compilation without what running does not need, also in the process that compiles.

    tinygrad names a program by a digest of all its nodes and of the text of its estimates. For attention over a variable number of blocks
    that took two thirds of a first capture.
    """
    return lambda ast, renderer: _without_linear(compile_program(ast, renderer))


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


def enable_program_cache(machine: str) -> None:
    """From now on, look up schedules and compiled programs of earlier processes on disk. Start-up falls from seconds to tenths.

    `machine` names what tinygrad compiles for: its C compiler uses all instructions of the processor, which its own keys do not name.
    """
    global _machine
    os.environ.setdefault("GRAPH_ONE_KERNEL", "1")  # a single kernel also replays as a graph, in half the host time
    _machine = machine
    for module in (sys.modules[name] for name in _READERS if name in sys.modules):
        module.diskcache_get, module.diskcache_put = _load, _keep  # type: ignore[attr-defined]
    when_imported("tinygrad.codegen", _keep_programs)
    when_imported("tinygrad.schedule", _keep_schedules)


def _keep_programs(codegen: Any) -> None:
    if not isinstance(codegen.to_program_cache, DiskTable):
        codegen.do_to_program = _compiling(codegen.do_to_program)
        codegen.to_program_cache = DiskTable("programs")


def _keep_schedules(schedule: Any) -> None:
    if not isinstance(schedule.schedule_cache, DiskTable):
        schedule.schedule_cache = DiskTable("schedules")
