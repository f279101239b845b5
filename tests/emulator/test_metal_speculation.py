"""The same as test_speculation.py on the emulated Mac."""

from __future__ import annotations

from tests.emulator.metal_runtime import metal_device
from tests.emulator.test_speculation import check


def test_metal() -> None:
    with metal_device():
        check("METAL")
