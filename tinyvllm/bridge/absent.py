"""What tinygrad looks for or imports whenever it opens a device, and this project never uses: a third of a warm start.

Definitions of the C library are read when one of them is used, as to load an object file that was just compiled: 14 ms.

Importing this module takes effect, so it is imported before all others of the bridge. `LLVM_PATH` and `MESA_PATH`, tinygrad's own
variables, bring the two libraries back.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import platform
import sys
from types import ModuleType
from typing import Any

from tinyvllm.bridge.deferred import deferring
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.lean_imports import LaterModule, standing_in

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
    ("tinygrad.renderer.llvmir", "CPULLVMRenderer", "tinygrad.runtime.ops_cpu", "LLVM_PATH"),
    ("tinygrad.renderer.nir", "LVPRenderer", "tinygrad.runtime.ops_cpu", "MESA_PATH"),
    ("tinygrad.renderer.isa.x86", "X86Renderer", "tinygrad.runtime.ops_cpu", None),
)
# Read when something of them is first used: 14 ms for the definitions, 7 ms for the others, which tinygrad's helpers and readers name.
DEFINITIONS = "tinygrad.runtime.autogen.libc"
LATER = ("sqlite3", "difflib", "tarfile", "zipfile", "statistics")


class _Absent:
    """In place of a class that is named and never used."""

    def __init__(self, *arguments: Any, **named: Any):
        raise ImportError(f"{type(self).__name__} is left out: import its module before tinyvllm")


def _find_used(name: str, *arguments: Any) -> str | None:
    if name in UNUSED_LIBRARIES and f"{name.upper()}_PATH" not in os.environ:
        return None
    found: str | None = _find(name, *arguments)
    return found


def _import_tinygrad() -> None:
    """Import tinygrad with classes whose methods are made when they are first called: the standard library's took a tenth of a start.

    tinygrad asks a process (`uname -p`) for the processor's name, which only one message of its Mesa renderer uses: the machine's name
    says as much.
    """
    standard: Any = dataclasses
    system: Any = platform
    before = standard.dataclass, system.processor
    standard.dataclass, system.processor = dataclass, system.machine
    try:
        with standing_in({name: LaterModule(name) for name in LATER}):
            for name in ("tinygrad", "tinygrad.llm.model", "tinygrad.runtime.autogen", "tinygrad.runtime.support.c"):
                importlib.import_module(name)
    finally:
        standard.dataclass, system.processor = before


def _import_without_definitions(autogen: Any) -> None:
    """Import the readers of object files, and of what GPUs share with the CPU device, which name the C library's definitions."""
    if DEFINITIONS in sys.modules:
        return
    stub: Any = LaterModule(DEFINITIONS)
    stub.Elf64_Shdr = stub.Elf32_Shdr = object  # a class says what it holds by these two
    autogen.libc = stub
    try:
        with standing_in({DEFINITIONS: stub, **{name: LaterModule(name) for name in LATER}}):
            for naming in ("tinygrad.runtime.support.elf", "tinygrad.runtime.support.hcq"):
                importlib.import_module(naming)
    finally:
        del stub.Elf64_Shdr, stub.Elf32_Shdr, autogen.libc


def _import_without_unused_modules() -> None:
    """Import what names them with stubs in their places."""
    stubs = {}
    for module, name, naming, variable in UNUSED_MODULES:
        if naming not in sys.modules and (variable is None or variable not in os.environ):
            stubs[module] = ModuleType(module)
            setattr(stubs[module], name, type(name, (_Absent,), {}))
    with standing_in(stubs):
        for naming in dict.fromkeys(naming for _, _, naming, _ in UNUSED_MODULES):
            importlib.import_module(naming)


with deferring():
    _import_tinygrad()
    _loader: Any = vars(sys.modules["tinygrad.runtime.support.c"])["DLL"]
    _find = _loader.findlib
    _loader.findlib = staticmethod(_find_used)
    _import_without_definitions(sys.modules["tinygrad.runtime.autogen"])
    _import_without_unused_modules()
