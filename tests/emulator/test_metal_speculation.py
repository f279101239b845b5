"""The same as test_speculation.py on the emulated Mac."""

from __future__ import annotations

import pytest

from tests.emulator.metal_runtime import metal_device
from tests.emulator.test_speculation import check, check_heads


@pytest.mark.long
def test_metal() -> None:
    with metal_device():
        check("METAL")


@pytest.mark.long
def test_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    with metal_device():
        check_heads("METAL", monkeypatch)
