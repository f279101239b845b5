"""The same as test_speculation.py on the emulated Mac."""

from __future__ import annotations

from tests.emulator.metal_runtime import metal_device
from tests.emulator.test_speculation import MODEL, OPTIONS, check
from tinyvllm import LLM


def test_metal() -> None:
    with metal_device(), LLM(MODEL, device="METAL", **OPTIONS) as gpu:
        check(gpu)
