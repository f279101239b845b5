"""tinygrad's scheduler and code generator, imported when something is first scheduled or compiled: a tenth of a warm start.

A start whose steps are kept on disk schedules nothing. What tinygrad's other modules import of these two by name is a function here that
imports them at its first call. Modules below them that are imported before them are kept out of `sys.modules` until their package is
imported, so that modules that import each other are imported in tinygrad's own order, whichever of them comes first.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from tinyvllm.lean_imports import standing_in

PACKAGES = ("tinygrad.codegen", "tinygrad.schedule")
# Modules that are not imported, and the function that others import from them by name.
FUNCTIONS = {
    "tinygrad.callify": "transform_to_call",
    "tinygrad.schedule": "create_linear_with_vars",
    "tinygrad.codegen": "to_program",
    "tinygrad.codegen.late": None,
    "tinygrad.codegen.late.devectorizer": "no_vectorized_alu",
    "tinygrad.codegen.opt.postrange": "bufs_from_ast",
}
RULES = ("tinygrad.schedule.rangeify", "mop_cleanup")  # that TinyJit hands on
# tinygrad takes the functions of its patterns apart: they must have no closure.
_FUNCTION = """
def {name}(*arguments, **named):
    from {module} import {name} as imported
    return imported(*arguments, **named)
"""


class _Rules:
    """In place of a matcher of patterns, to which others are added."""

    def __add__(self, more: Any) -> Any:
        module, rules = RULES
        return getattr(importlib.import_module(module), rules) + more


class _Folder:
    """Where the modules of a package are, known once tinygrad is being imported."""

    def __init__(self, package: str):
        self._parent, _, self._name = package.rpartition(".")

    def __iter__(self) -> Iterator[str]:
        return (os.path.join(folder, self._name) for folder in sys.modules[self._parent].__path__)


class _Finder:
    """Finds modules that were imported before their package, and calls what waits for a package once it is imported.

    A finder and loader of the import system, whose base classes take 4 ms to import.
    """

    def __init__(self) -> None:
        self.modules: dict[str, ModuleType] = {}
        self.waiting: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in self.modules:
            loader: Any = self
            return ModuleSpec(name, loader, is_package=hasattr(self.modules[name], "__path__"))
        if name not in self.waiting:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            true: Any = spec.loader
            execute = true.exec_module

            def execute_and_tell(module: ModuleType) -> None:
                execute(module)
                for tell in self.waiting.pop(name):
                    tell(module)

            true.exec_module = execute_and_tell
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.modules.pop(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed."""


_finder = _Finder()
sys.meta_path.insert(0, _finder)


def when_imported(package: str, tell: Callable[[ModuleType], None]) -> None:
    """Call `tell` with one of PACKAGES: now, or once, as soon as it is imported."""
    if package in sys.modules:
        tell(sys.modules[package])
    elif tell not in (waiting := _finder.waiting.setdefault(package, [])):
        waiting.append(tell)


@contextmanager
def deferring() -> Iterator[None]:
    """Within the block, tinygrad is imported without its scheduler and its code generator."""
    with standing_in(_stand_ins()):
        yield
    for package in PACKAGES:
        if package not in sys.modules:
            for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
                _finder.modules[name] = sys.modules.pop(name)


def _stand_ins() -> dict[str, ModuleType]:
    modules: dict[str, Any] = {name: ModuleType(name) for name in (*FUNCTIONS, RULES[0])}
    for module, function in FUNCTIONS.items():
        if function is not None:
            names = {"__name__": module}
            exec(_FUNCTION.format(module=module, name=function), names)
            setattr(modules[module], function, names[function])
    setattr(modules[RULES[0]], RULES[1], _Rules())
    for package in PACKAGES:  # other modules in these are imported
        modules[package].__path__ = _Folder(package)
    return modules
