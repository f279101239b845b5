"""What an engine may know of the bridge's timing of kernels."""

from tinyvllm.bridge import KernelTime, KernelTimer, start_timing, stop_timing

__all__ = ["KernelTime", "KernelTimer", "start_timing", "stop_timing"]
