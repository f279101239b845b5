"""Modules that stand in for others while something imports them by name: what a start never uses is not read.

    with standing_in({"sqlite3": LaterModule("sqlite3")}):
        import tinygrad.helpers

Afterwards the stand-ins are gone from `sys.modules`, so another import of the name finds the true module.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

_THREADS = "OPENBLAS_NUM_THREADS"


class LaterModule(ModuleType):
    """In place of a module, which is imported when something of it is first used: then all of it is here."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:  # within `standing_in`
            del sys.modules[self.__name__]
        module = importlib.import_module(self.__name__)
        self.__dict__.update(vars(module))
        return getattr(module, name)


@contextlib.contextmanager
def standing_in(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Within the block, those of `modules` whose names are not imported yet are found by imports."""
    placed = {name: module for name, module in modules.items() if name not in sys.modules}
    sys.modules.update(placed)
    try:
        yield
    finally:
        for name, module in placed.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


class _AnyType:
    """In place of a type that only annotations name."""

    def __class_getitem__(cls, item: object) -> type:
        return cls


class _Types(ModuleType):
    """In place of a module of types that only annotations name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyType


def import_numpy() -> None:
    """Import numpy for a command: a fifth less time of this thread, and half of the processor's.

    Left out are the texts of `help`, which numpy adds to its functions at each import, and its types, which only its annotations name.
    OpenBLAS, which makes no product of a model here, gets no threads of its own: they take as long again to start, on another core.
    """
    if "numpy" in sys.modules:
        return
    given = os.environ.get(_THREADS)
    os.environ[_THREADS] = given or "1"
    texts = {name: ModuleType(name) for name in ("numpy._core._add_newdocs", "numpy._core._add_newdocs_scalars")}
    try:
        with standing_in({**texts, "numpy._typing": _Types("numpy._typing")}):
            importlib.import_module("numpy")
    finally:
        if given is None:
            del os.environ[_THREADS]
