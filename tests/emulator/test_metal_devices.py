"""Layers divided between an emulated Mac's GPU and the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulator.metal_runtime import metal_device
from tests.emulator.test_devices import float32
from tinyvllm.backends import registry


@pytest.mark.long
def test_a_mac_has_the_tokens_of_the_cpu(tiny_model: Path) -> None:
    with metal_device():
        registry.forget_choices()
        assert float32(tiny_model, "METAL,CPU") == float32(tiny_model, "CPU")
