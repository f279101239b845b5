"""What a backend adds to one of tinygrad's devices: asynchronous copies, and the import of host pages.

The bridge names no backend. A backend installs its hooks when its device is opened; a device without hooks works through tinygrad's own
synchronous copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from tinygrad import Device

from tinyvllm.lazy_dataclass import dataclass


class Transfer(Protocol):
    """Bytes on their way from the device to the host."""

    def ready(self) -> bool:
        """Whether `get` returns without waiting."""

    def get(self) -> np.ndarray:
        """The bytes, uint8 [size]; waits for them."""


class QueueEvent(Protocol):
    """A point in a device's queue."""

    def result(self, timeout: float) -> None:
        """Wait until the device has passed it; TimeoutError if that takes more than `timeout` seconds."""


class DeviceCopies(Protocol):
    """Copies that take their place in the device's queue and wait for nothing else. `memory` is tinygrad's opaque memory of a buffer."""

    max_read: int  # bytes; larger downloads go through tinygrad's own copy

    def upload(self, memory: Any, start: int, array: np.ndarray) -> None:
        """Copy a contiguous array to byte `start` of `memory`; the array may change on return."""

    def read(self, memory: Any, size: int) -> Transfer:
        """Start copying the first `size` bytes of `memory`, as they are once all earlier launches have run."""

    def mark(self) -> QueueEvent:
        """The end of everything launched until now."""


class ImportedPages(NamedTuple):
    """Host pages as device memory: tinygrad's opaque memory, its address for tinygrad, and what waits for the device before it is freed."""

    memory: Any
    pointer: int
    settle: Callable[[], None]


@dataclass(frozen=True)
class DeviceHooks:
    """`import_pages(address, nbytes)` makes whole host pages visible to the device without a copy, or returns None.

    `max_import` bytes at a time: whole pages, within what a buffer of the device and an offset into it may be.
    """

    copies: DeviceCopies | None = None
    import_pages: Callable[[int, int], ImportedPages | None] | None = None
    max_import: int = 0


_NONE = DeviceHooks()
_installed: dict[str, DeviceHooks] = {}


def install_hooks(device: str, hooks: DeviceHooks) -> None:
    """Use `hooks` for a device from now on."""
    _installed[Device.canonicalize(device)] = hooks


def remove_hooks(device: str) -> None:
    """Use tinygrad's own copies again."""
    _installed.pop(Device.canonicalize(device), None)


def hooks_of(device: str) -> DeviceHooks:
    """The hooks of a device, by its canonical name; none if no backend installed any."""
    return _installed.get(device, _NONE)
