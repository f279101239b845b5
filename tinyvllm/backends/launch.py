"""Launches of hand-written kernels: as nodes of the lazy graph, or at once on host memory."""

from __future__ import annotations

from tinyvllm.bridge import launch, run_now

__all__ = ["launch", "run_now"]
