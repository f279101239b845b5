"""The choice of a device, before tinygrad is there."""

import pytest

from tinyvllm.errors import ArgumentError
from tinyvllm.runner import device


@pytest.mark.parametrize(
    ("dev", "platform", "machine", "gpus", "expected"),
    [
        ("CUDA", "darwin", "arm64", 0, "CUDA"),
        ("", "darwin", "arm64", 0, "METAL"),
        ("", "darwin", "x86_64", 0, "CPU"),
        ("", "linux", "x86_64", 2, "CUDA"),
        ("", "linux", "aarch64", 0, "CPU"),
    ],
)
def test_auto(monkeypatch, dev, platform, machine, gpus, expected):
    monkeypatch.setenv("DEV", dev)
    monkeypatch.setattr(device.sys, "platform", platform)
    monkeypatch.setattr(device.platform, "machine", lambda: machine)
    monkeypatch.setattr(device, "_cuda_devices", lambda: gpus)
    assert device.choose_device("auto") == expected
    assert device.choose_device("CUDA:1") == "CUDA:1"


@pytest.mark.parametrize("dev", ["CUDA:1", "CUDA;CPU", "CPU:LLVM"])
def test_what_means_something_else_to_tinygrad_is_refused(monkeypatch, dev):
    monkeypatch.setenv("DEV", dev)
    with pytest.raises(ArgumentError, match=f"DEV={dev}: expected the name of a device"):
        device.choose_device("auto")


@pytest.mark.parametrize("dev", [None, "CPU"])
def test_the_environment_is_as_before_for_the_processes_of_the_caller(monkeypatch, tmp_path, dev):
    """A device chosen for one engine was the default of every process started after it."""
    monkeypatch.setenv("DEV", dev) if dev else monkeypatch.delenv("DEV", raising=False)
    assert device.start_device("CPU", tmp_path) == "CPU"
    assert device.os.environ.get("DEV") == dev
