"""A device has one spelling, whatever a user has written."""

from __future__ import annotations

from pathlib import Path

from tinyvllm.config.devices import parse_device
from tinyvllm.config.engine import resolve


def test_devices_have_one_spelling(tmp_path: Path) -> None:
    assert [parse_device("device", d) for d in ("cpu", "Cuda:1", "AUTO", "METAL")] == ["CPU", "CUDA:1", "auto", "METAL"]
    assert resolve(tmp_path, environ={"TINYVLLM_DEVICE": "cpu"}).device == "CPU"
    assert resolve(tmp_path, environ={"TINYVLLM_DEVICE": "cpu"}, device="cuda").device == "CUDA"
