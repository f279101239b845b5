"""Names of devices as options and environment variables have them: "CPU", "CUDA:1", "auto", and several, such as "CUDA,CPU"."""

from __future__ import annotations

from tinyvllm.errors import ArgumentError

DEVICES = ("auto", "CPU", "METAL", "CUDA", "NV", "AMD", "HIP", "QCOM", "CL", "WEBGPU", "PYTHON")


def parse_device(name: str, text: str) -> str:
    """A device in tinygrad's spelling ("cuda:1" is "CUDA:1"), or "auto"."""
    check_device(name, text)
    return "auto" if text.lower() == "auto" else text.upper()


def parse_devices(name: str, text: str) -> str:
    """One device as `parse_device` has it, or several: "CUDA,CPU". ArgumentError for one that is there twice, or "auto" among several."""
    devices = [parse_device(name, part.strip()) for part in str(text).split(",")]
    if len(devices) > 1 and ("auto" in devices or len({*devices}) < len(devices)):
        raise ArgumentError(f"{name} must name each of several devices once, such as CUDA,CPU, got {text!r:.80}")
    return ",".join(devices)


def check_device(name: str, device: object) -> None:
    """ArgumentError, with the name of the option, for what is no device."""
    kind, colon, index = str(device).upper().partition(":")
    if kind not in map(str.upper, DEVICES) or (colon and (kind == "AUTO" or not index.isdecimal())):
        raise ArgumentError(f"{name} must be one of {', '.join(DEVICES)}, or one with a number such as CUDA:1, got {device!r}")


def kind_of(device: str) -> str:
    """A device without its number."""
    return device.partition(":")[0]
