"""The one room that touches what lies below tinygrad's public surface (0.13.0). Everything else in this project sees Tensors only.

    device       opening a device: what tinygrad's own is given in place of its graph, its copies and its compiler
    programs     schedules and compiled programs, kept on disk
    node         a hand-written kernel as a node of the lazy graph
    stores       programs in UOps that store through an index
    capture      a captured step, replayed and repeated; crew_graph, line_graph and indirect_graph run it, on CPU, CUDA and Metal devices
    memory       host access to device buffers; gpu has the CUDA driver for it, metal_queue Metal's, freeing lets go of the CPU's
    tensors      tensors over memory that is there already
    timing       how long a kernel takes, past any graph
    layers       tinygrad's layers without initial values

Others import the names below from here, and nothing from the modules: tests/test_house.py.
"""

from __future__ import annotations

from tinyvllm.backends.cuda.driver import gpu_attribute, gpu_free_memory
from tinyvllm.backends.metal.queue import gpu_family, gpu_name
from tinyvllm.bridge.capture import Captured, CapturedCall, PendingWork, repeat
from tinyvllm.bridge.device import open_device, prefer_device, synchronize
from tinyvllm.bridge.lazy_init import uninitialized
from tinyvllm.bridge.memory import Reading, download, peek, read_async, upload, upload_parts
from tinyvllm.bridge.node import launch, run_now
from tinyvllm.bridge.programs import enable_program_cache
from tinyvllm.bridge.scatter import scatter_add, store_kv
from tinyvllm.bridge.tensors import alias, byte_spans, mapped, shared_zeros, spans
from tinyvllm.bridge.timing import Timed

__all__ = [
    "Captured", "CapturedCall", "PendingWork", "Reading", "Timed", "alias", "byte_spans", "download", "enable_program_cache",
    "gpu_attribute", "gpu_family", "gpu_free_memory", "gpu_name", "launch", "mapped", "open_device", "peek", "prefer_device", "read_async",
    "repeat", "run_now", "scatter_add", "shared_zeros", "spans", "store_kv", "synchronize", "uninitialized", "upload", "upload_parts",
]  # fmt: skip
