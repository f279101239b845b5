"""The one room that touches what is below tinygrad's public surface (0.13.0). Everything else in this project sees Tensors only.

    absent         libraries that tinygrad would load and this project never uses
    device         opening a device, and replacing its graph, its frees and its compiler
    compiler       the C compiler of the CPU device
    cuda, metal    bindings of the two drivers as tinygrad has them
    hooks          what a backend adds to a device: asynchronous copies, import of host pages
    node           a compiled kernel as a node of the lazy graph
    scatter        programs in UOps that store through an index
    compiling      how long compilers have taken
    capture        a captured step, replayed and repeated
    recording      what a captured function launches, in order
    kept           captured steps kept on disk
    kept_record    a captured step as a record, and back
    names          names of buffers that are the same in every process
    lowering       recorded calls as what a device replays
    kernel_times   timing of the kernels of a step, one by one
    graph          base classes of a backend's graph of a captured step
    arena          memory that captured steps share
    memory         host access to device buffers
    waiting        waiting until a device is idle
    deferred_free  frees CPU buffers outside tinygrad's worker thread
    tensors        tensors over existing memory
    constant_shapes  shapes that are numbers
    patterns       tinygrad's patterns, compiled after a few matches
    deferred       tinygrad's scheduler and code generator, imported when they are needed
    programs       schedules and compiled programs, kept on disk
    renderer       how generated C holds bfloat16, and float16 on old processors
    timing         how long a kernel takes, past any graph
    lazy_init      tinygrad's layers without initial values

It names no backend. Other rooms import the names below from here, and nothing from the modules: tests/test_house.py.
"""

from __future__ import annotations

from tinyvllm.bridge.absent import UNUSED_LIBRARIES  # first: it keeps the modules below from loading them
from tinyvllm.bridge.capture import (
    Captured,
    CapturedCall,
    CaptureWork,
    PendingWork,
    capture_work,
    captures_steps,
    check_before_first_run,
    repeat,
)
from tinyvllm.bridge.compiler import use_c_compiler
from tinyvllm.bridge.compiling import compile_clock, time_generated_kernels
from tinyvllm.bridge.cuda import EdgeData, compile_to_cubins, cuda_driver, cuda_runtime, replace_copy_in
from tinyvllm.bridge.deferred_free import release_deferred
from tinyvllm.bridge.device import (
    architecture,
    compile_text,
    defer_frees,
    forbid_tensor_cores,
    has_graph,
    opened_device,
    prefer_device,
    profiling,
    raise_memory_errors,
    recover_device,
    share_programs,
    tinygrad_setting,
    tinygrad_settings,
    use_graph,
)
from tinyvllm.bridge.graph import GraphKernel, JobGraph, Launch, StepGraph
from tinyvllm.bridge.hooks import DeviceCopies, DeviceHooks, ImportedPages, QueueEvent, Transfer, install_hooks, remove_hooks
from tinyvllm.bridge.kept import KeptStep, KeptSteps, StepNotes
from tinyvllm.bridge.kernel_times import KernelTime, KernelTimer, kernel_timer, start_timing, stop_timing
from tinyvllm.bridge.lazy_init import uninitialized
from tinyvllm.bridge.memory import Reading, download, host_address, opaque_memory, peek, read_async, resident, upload, upload_parts
from tinyvllm.bridge.metal import from_objc_string, metal_bindings, metal_buffer_over, to_objc_string
from tinyvllm.bridge.names import Unkept, define_process_tensor, name_process_tensor
from tinyvllm.bridge.node import Program, code_address, launch_program, load_object, load_program, run_program
from tinyvllm.bridge.programs import enable_program_cache
from tinyvllm.bridge.recording import Recorded
from tinyvllm.bridge.renderer import emulate_half_without_f16c, render_bfloat16_as_bits
from tinyvllm.bridge.scatter import scatter_add, store_kv, store_latents, store_packed_kv, store_states
from tinyvllm.bridge.tensors import (
    alias,
    byte_spans,
    copied,
    device_buffer,
    empty,
    forget_zeros,
    mapped,
    over_address,
    over_host,
    shared_zeros,
    spans,
)
from tinyvllm.bridge.timing import TimedProgram
from tinyvllm.bridge.waiting import synchronize

__all__ = [
    "UNUSED_LIBRARIES", "CaptureWork", "Captured", "CapturedCall", "DeviceCopies", "DeviceHooks", "EdgeData", "GraphKernel",
    "ImportedPages",
    "JobGraph", "KeptStep", "KeptSteps", "KernelTime", "KernelTimer", "Launch", "PendingWork", "Program", "QueueEvent", "Reading",
    "Recorded", "StepGraph", "StepNotes", "TimedProgram", "Transfer", "Unkept", "alias", "architecture", "byte_spans", "capture_work",
    "captures_steps", "check_before_first_run", "code_address", "compile_clock", "compile_text", "compile_to_cubins", "copied",
    "cuda_driver", "cuda_runtime", "defer_frees",
    "define_process_tensor", "device_buffer", "download", "empty", "emulate_half_without_f16c", "enable_program_cache",
    "forbid_tensor_cores", "forget_zeros", "from_objc_string", "has_graph", "host_address", "install_hooks", "kernel_timer",
    "launch_program",
    "load_object", "load_program", "mapped", "metal_bindings", "metal_buffer_over", "name_process_tensor", "opaque_memory", "opened_device",
    "over_address", "over_host",
    "peek", "prefer_device", "profiling", "raise_memory_errors", "read_async", "recover_device", "release_deferred", "remove_hooks",
    "render_bfloat16_as_bits", "repeat", "replace_copy_in", "resident", "run_program", "scatter_add", "share_programs", "shared_zeros",
    "spans", "start_timing", "stop_timing", "store_kv", "store_latents", "store_packed_kv", "store_states", "synchronize",
    "time_generated_kernels",
    "tinygrad_setting", "tinygrad_settings", "to_objc_string", "uninitialized", "upload", "upload_parts", "use_c_compiler", "use_graph",
]  # fmt: skip
