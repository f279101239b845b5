"""tinygrad's Metal device: its bindings of Metal and of Objective-C strings."""

from __future__ import annotations

import ctypes
from typing import Any

from tinygrad import Device


def metal_bindings() -> Any:
    """Metal's classes and constants under their own names."""
    from tinygrad.runtime.autogen import metal

    return metal


def to_objc_string(text: str) -> Any:
    from tinygrad.runtime.ops_metal import to_ns_str

    return to_ns_str(text)


def from_objc_string(text: Any) -> str:
    from tinygrad.runtime.ops_metal import from_ns_str

    return str(from_ns_str(text))  # type: ignore[no-untyped-call]


def metal_buffer_over(device: str, address: int, nbytes: int) -> Any | None:
    """A Metal buffer over whole host pages, without a copy, as tinygrad's opaque memory; None if it is longer than a buffer may be."""
    from tinygrad.runtime import ops_metal
    from tinygrad.runtime.autogen import metal
    from tinygrad.runtime.support import objc

    types = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p]
    create = objc.msg("newBufferWithBytesNoCopy:length:options:deallocator:", metal.MTLBuffer, types, retain=True)
    opened: Any = Device[device]
    buffer = create(opened.sysdevice, address, nbytes, metal.MTLResourceStorageModeShared, None)
    return None if buffer.value is None else ops_metal.MetalBuffer(buffer, nbytes)
