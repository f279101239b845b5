"""Waiting until a device is idle."""

from __future__ import annotations

from typing import Any

from tinygrad import Device


def synchronize(device: str) -> None:
    """Wait until everything launched on `device` has run. tinygrad's `realize()` returns before the CPU device's worker has started.

    Where nothing was launched since the last call, that is seen by the device's own count of launches, for a quarter of the time.
    """
    opened = Device[device]
    launched = getattr(opened, "timeline_value", None)
    if launched is None or _waited.get(device) != (opened, launched):
        opened.synchronize()
        _waited[device] = opened, launched


_waited: dict[str, tuple[Any, int | None]] = {}  # by device: as opened, and its launches at the end of the last wait
