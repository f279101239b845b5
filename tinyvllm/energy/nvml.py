"""NVML, the management library of NVIDIA's driver, through ctypes: millijoules of a GPU since the driver was loaded (Volta and later).

The counter is of the whole GPU, also where the engine has a part of it (MIG, other processes).
Source: NVIDIA, NVML API Reference Guide: nvmlDeviceGetTotalEnergyConsumption, nvmlDeviceGetHandleByPciBusId.
"""

from __future__ import annotations

import ctypes
from typing import Any

from tinyvllm.energy.counters import CounterError

LIBRARY = "libnvidia-ml.so.1"
_DRIVER = "libcuda.so.1"
_MAX_BUS_ID = 32  # bytes of "00000000:3B:00.0"


class GpuCounter:
    """One GPU."""

    def __init__(self, name: str, nvml: Any, handle: ctypes.c_void_p):
        self.name, self._nvml, self._handle = name, nvml, handle
        self._last = self._millijoules()

    def joules(self) -> float:
        now = self._millijoules()
        difference, self._last = now - self._last, now
        if difference < 0:
            raise CounterError(f"NVML's counter of {self.name} went back by {-difference} mJ: the driver was loaded again")
        return difference / 1e3

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def _millijoules(self) -> int:
        value = ctypes.c_ulonglong()
        _check(self._nvml, "nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(value))
        return value.value


def open_gpus(index: int, library: str, driver: str = _DRIVER) -> tuple[list[GpuCounter], dict[str, str]]:
    """The counter of CUDA's device `index`, or why there is none."""
    try:
        nvml = ctypes.CDLL(library)
        _check(nvml, "nvmlInit_v2")
    except OSError as error:
        return [], {"gpu": f"NVML cannot be loaded ({error}): {library} comes with NVIDIA's driver"}
    except CounterError as error:
        return [], {"gpu": str(error)}
    try:
        return [GpuCounter(f"gpu {index}", nvml, _handle(nvml, index, driver))], {}
    except CounterError as error:
        nvml.nvmlShutdown()
        return [], {"gpu": str(error)}


def _handle(nvml: Any, index: int, driver: str) -> ctypes.c_void_p:
    """NVML's handle of CUDA's device `index`: the two number GPUs differently, and have the address on the PCI bus in common."""
    handle, count = ctypes.c_void_p(), ctypes.c_uint()
    if (bus_id := _bus_id(index, driver)) is not None:
        _check(nvml, "nvmlDeviceGetHandleByPciBusId_v2", bus_id, ctypes.byref(handle))
        return handle
    _check(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    if count.value != 1:
        raise CounterError(f"CUDA does not report the PCI address of device {index}, and NVML has {count.value} GPUs; expected 1")
    _check(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(0), ctypes.byref(handle))
    return handle


def _bus_id(index: int, driver: str) -> bytes | None:
    """CUDA's own answer, as CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER change its numbers. cuInit may be called again."""
    try:
        cuda = ctypes.CDLL(driver)
    except OSError:
        return None
    device, text = ctypes.c_int(), ctypes.create_string_buffer(_MAX_BUS_ID)
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), index) or cuda.cuDeviceGetPCIBusId(text, _MAX_BUS_ID, device):
        return None
    return text.value


def _check(nvml: Any, name: str, *arguments: Any) -> None:
    try:
        status = getattr(nvml, name)(*arguments)
    except AttributeError as error:
        raise CounterError(f"NVML has no {name}: this driver is too old to count energy") from error
    if status:
        raise CounterError(f"NVML's {name} failed with status {status}{_meaning(nvml, status)}")


def _meaning(nvml: Any, status: int) -> str:
    try:
        explain = nvml.nvmlErrorString
    except AttributeError:
        return ""
    explain.restype = ctypes.c_char_p
    text = explain(status)
    return f" ({text.decode('utf-8', 'replace'):.80})" if text else ""
