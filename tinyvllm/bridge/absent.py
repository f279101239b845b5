"""What tinygrad looks for or imports whenever it opens a device, and this project never uses: a third of a warm start.

Definitions of the C library are read when one of them is used, as to load an object file that was just compiled: 14 ms.

Importing this module takes effect, so it is imported before all others of the bridge. `LLVM_PATH` and `MESA_PATH`, tinygrad's own
variables, bring the two libraries back.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

import tinygrad.runtime.autogen
from tinygrad.runtime.support import c

# Libraries that other renderers of tinygrad's CPU device generate code with. They are searched for in every folder of the system's
# libraries and loaded, which took 0.1 s where LLVM is installed.
UNUSED_LIBRARIES = ("llvm", "mesa")
# Modules of which only a class is named by those that import them: module, class, what imports it, and the variable that keeps it.
#   Copies between GPUs of several machines: its modules load libraries for USB and PCI devices. It is named by tinygrad's graph of a CPU
#   device, whose place a backend's graph takes.
#   Definitions of LLVM, of which tinygrad's compilers of C read none: 8 ms.
#   Renderers of the CPU device that are not chosen, with the definitions of Mesa: 40 ms of imports.
UNUSED_MODULES = (
    ("tinygrad.runtime.ops_rdma", "RDMACopyQueue", "tinygrad.runtime.graph.hcq", None),
    ("tinygrad.runtime.autogen.llvm", "LLVMModuleRef", "tinygrad.runtime.support.compiler_cpu", "LLVM_PATH"),
    ("tinygrad.renderer.nir", "LVPRenderer", "tinygrad.runtime.ops_cpu", "MESA_PATH"),
    ("tinygrad.renderer.isa.x86", "X86Renderer", "tinygrad.runtime.ops_cpu", None),
)
# Read when something of it is first used.
LATER = "tinygrad.runtime.autogen.libc"

_find = c.DLL.findlib
_autogen: Any = tinygrad.runtime.autogen


def _find_used(name: str, *arguments: Any) -> str | None:
    if name in UNUSED_LIBRARIES and f"{name.upper()}_PATH" not in os.environ:
        return None
    found: str | None = _find(name, *arguments)
    return found


class _Absent:
    """In place of a class that is named and never used."""

    def __init__(self, *arguments: Any, **named: Any):
        raise ImportError(f"{type(self).__name__} is left out: import its module before tinyvllm")


class _Definitions(ModuleType):
    """In place of a module, which is imported when something of it is first used: then all of it is here."""

    def __getattr__(self, name: str) -> Any:
        module = importlib.import_module(self.__name__)
        self.__dict__.update(vars(module))
        return getattr(module, name)


def _import_without_definitions() -> None:
    """Import the readers of object files, and of what GPUs share with the CPU device, which name the C library's definitions."""
    if LATER in sys.modules:
        return
    stub: Any = _Definitions(LATER)
    stub.Elf64_Shdr = stub.Elf32_Shdr = object  # a class says what it holds by these two
    sys.modules[LATER] = _autogen.libc = stub
    try:
        for naming in ("tinygrad.runtime.support.elf", "tinygrad.runtime.support.hcq"):
            importlib.import_module(naming)
    finally:
        del stub.Elf64_Shdr, stub.Elf32_Shdr, _autogen.libc, sys.modules[LATER]


def _import_without_unused_modules() -> None:
    """Import what names them with stubs in their places, which are removed: another import finds tinygrad's."""
    stubs = []
    for module, name, naming, variable in UNUSED_MODULES:
        if module not in sys.modules and naming not in sys.modules and (variable is None or variable not in os.environ):
            sys.modules[module] = stub = ModuleType(module)
            setattr(stub, name, type(name, (_Absent,), {}))
            stubs.append(module)
    try:
        for naming in dict.fromkeys(naming for _, _, naming, _ in UNUSED_MODULES):
            importlib.import_module(naming)
    finally:
        for module in stubs:
            del sys.modules[module]


_loader: Any = c.DLL
_loader.findlib = staticmethod(_find_used)
_import_without_definitions()
_import_without_unused_modules()
