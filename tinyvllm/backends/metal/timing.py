"""Timing of Metal kernels."""

from __future__ import annotations

from tinyvllm.bridge import Timed as TimedKernel

__all__ = ["TimedKernel"]
