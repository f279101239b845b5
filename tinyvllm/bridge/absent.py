"""What tinygrad looks for whenever it opens a device, and this project never uses: a quarter of the processor time of a warm start.

Importing this module takes effect, so it is imported before all others of the bridge. `LLVM_PATH` and `MESA_PATH`, tinygrad's own
variables, bring the two libraries back.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

from tinygrad.runtime.support import c

# Libraries that other renderers of tinygrad's CPU device generate code with. They are searched for in every folder of the system's
# libraries and loaded, which took 0.1 s where LLVM is installed.
UNUSED_LIBRARIES = ("llvm", "mesa")
# Copies between GPUs of several machines: its modules load libraries for USB and PCI devices. Its class is only named by tinygrad's graph
# of a CPU device, whose place a backend's graph takes.
_UNUSED_MODULE, _UNUSED_CLASS = "tinygrad.runtime.ops_rdma", "RDMACopyQueue"
_NAMING_MODULE = "tinygrad.runtime.graph.hcq"

_find = c.DLL.findlib


def _find_used(name: str, *arguments: Any) -> str | None:
    if name in UNUSED_LIBRARIES and f"{name.upper()}_PATH" not in os.environ:
        return None
    found: str | None = _find(name, *arguments)
    return found


def _import_without_unused_module() -> None:
    if _UNUSED_MODULE in sys.modules or _NAMING_MODULE in sys.modules:
        return
    stub = ModuleType(_UNUSED_MODULE)
    setattr(stub, _UNUSED_CLASS, type(_UNUSED_CLASS, (), {}))
    sys.modules[_UNUSED_MODULE] = stub
    try:
        importlib.import_module(_NAMING_MODULE)
    finally:
        del sys.modules[_UNUSED_MODULE]  # another import finds tinygrad's


_loader: Any = c.DLL
_loader.findlib = staticmethod(_find_used)
_import_without_unused_module()
