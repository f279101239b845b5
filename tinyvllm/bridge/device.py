"""tinygrad's devices: choosing, opening and awaiting one, and replacing parts of it."""

from __future__ import annotations

import functools
import gc
import logging
from pathlib import Path
from typing import Any

from tinygrad import Device, helpers
from tinygrad.device import CompileError
from tinygrad.runtime.ops_cpu import CPUDevice

from tinyvllm.bridge.deferred_free import defer_in_worker, release_deferred
from tinyvllm.bridge.graph import StepGraph
from tinyvllm.bridge.tensors import restore_zeros
from tinyvllm.errors import KernelError, OutOfMemoryError
from tinyvllm.host_memory import require

log = logging.getLogger("tinyvllm")

_CHECKED_BYTES = 1 << 20  # a look at the limits takes 0.1 ms


def prefer_device(kind: str) -> None:
    """Make `kind` tinygrad's default unless the user chose one: otherwise tinygrad probes every backend for it, which is slow."""
    if not helpers.DEV.device:
        helpers.DEV.value = kind


def opened_device(device: str) -> Any:
    """tinygrad's object of a device, opened at its first use; raises what tinygrad's backend raises if it cannot be opened."""
    return Device[device]


def architecture(device: str) -> str:
    """What the device's GPU calls its architecture: "sm_90", "Apple9"."""
    return str(opened_device(device).arch)


def has_graph(device: str) -> bool:
    """Whether tinygrad captures steps on this device; the GPU of a virtual Mac has no indirect command buffers."""
    return opened_device(device).graph is not None


def use_graph(device: str, graph: type[StepGraph]) -> bool:
    """Capture steps of this device with `graph`; False if that was so before."""
    opened = opened_device(device)
    if opened.graph is graph:
        return False
    opened.graph = graph
    return True


def defer_frees(device: str) -> None:
    """Free buffers of the CPU device only in threads that may wait for it."""
    allocator = opened_device(device).allocator
    allocator._free = defer_in_worker(allocator._free)


def raise_memory_errors(device: str) -> None:
    """Let the CPU device raise MemoryError for a buffer that does not fit: tinygrad then frees the buffers that it keeps, and tries again.

    Large buffers are checked before: the system hands out their pages as they are written, and kills the process when there are none.
    """
    allocator = opened_device(device).allocator
    allocate = allocator._alloc

    def allocate_or_memory_error(size: int, options: Any) -> Any:
        try:
            if size >= _CHECKED_BYTES and options.external_ptr is None:
                require(size, "a buffer of a step")
            return allocate(size, options)
        except (OSError, OutOfMemoryError) as error:
            raise MemoryError(str(error)) from error

    allocator._alloc = allocate_or_memory_error


def recover_device(device: str) -> None:
    """After a failed step: free what it has left, and make the device usable again.

    A GPU's kernels find their counters at zero. The CPU's worker thread keeps an exception for ever and leaves its launch unsignalled; the
    step that failed has raised it.
    """
    gc.collect()
    opened: Any = opened_device(device)
    if not isinstance(opened, CPUDevice):
        _restore_counters(device)
        return
    opened.tasks.join()
    if opened.error_state is not None:
        opened.error_state = None
        opened.timeline_signal.value = opened.timeline_value - 1
    opened.synchronize()
    release_deferred()
    allocator: Any = opened.allocator
    allocator.free_cache()


def _restore_counters(device: str) -> None:
    try:
        restore_zeros(device)
    except (RuntimeError, KernelError) as error:  # the steps to come fail, too, and the engine ends with what they raise
        log.error("%s cannot be used after a failed step: %s", device, next(iter(str(error).splitlines()), type(error).__name__))


def share_programs(device: str) -> None:
    """Load a program of a device once for all that ask for it: tinygrad loads one for each kernel that it schedules."""
    opened: Any = opened_device(device)
    if not hasattr(opened.runtime, "cache_clear"):
        load = opened.runtime

        @functools.lru_cache(maxsize=4096)
        def loaded(name: str, binary: bytes) -> Any:
            return load(name, binary)

        def runtime(name: str, binary: bytes, *aux: Any, **options: Any) -> Any:
            return load(name, binary, *aux, **options) if aux else loaded(name, binary)

        runtime.cache_clear = loaded.cache_clear  # type: ignore[attr-defined]
        opened.runtime = runtime


def forbid_tensor_cores() -> None:
    """From now on, tinygrad generates no kernels with tensor cores."""
    helpers.USE_TC.value = 0


def compile_text(device: str, name: str, text: str) -> bytes:
    """What tinygrad's compiler of the device makes of a source; tinygrad keeps it on disk. KernelError with the compiler's messages."""
    try:
        compiled: bytes = opened_device(device).compiler.compile_cached(text)
    except CompileError as error:
        lines = [line for line in str(error).splitlines() if "error" in line] or str(error).splitlines()
        raise KernelError(f"kernels: {name} does not compile for {device}: {'; '.join(lines[:3])}") from error
    return compiled


def profiling() -> bool:
    """Whether tinygrad keeps what it launched for its profiler."""
    return bool(helpers.PROFILE)


def tinygrad_setting(name: str, default: int) -> int:
    """One of tinygrad's environment variables."""
    return int(helpers.getenv(name, default))


@functools.cache
def _tinygrad_version() -> str:
    """By the name of the folder next to the package: importlib.metadata, which has a parser of mail, takes 15 ms to import."""
    found = [path.name for path in Path(helpers.__file__).parents[1].glob("tinygrad-*.dist-info")]
    if len(found) == 1:
        return found[0].removeprefix("tinygrad-").removesuffix(".dist-info")
    from importlib.metadata import version

    return version("tinygrad")


def tinygrad_settings() -> str:
    """tinygrad's version and all of its settings, of which its kernels may depend on any."""
    return repr((_tinygrad_version(), sorted((name, setting.value) for name, setting in helpers.ContextVar._cache.items())))
