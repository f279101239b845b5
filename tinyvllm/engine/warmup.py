"""What an engine does ahead of requests, between steps: captures of common shapes, and timing of kernels that have several variants."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tinyvllm.config.engine import EngineConfig
from tinyvllm.engine.speculation import Speculation
from tinyvllm.engine.startup import DEVICE_LOCK

if TYPE_CHECKING:
    from tinyvllm.runner.runner import Runner
    from tinyvllm.runner.warmup import Warmup
    from tinyvllm.sampling.sampler import Sampler


log = logging.getLogger("tinyvllm")


def new_warmup(runner: Runner, sampler: Sampler, config: EngineConfig, run_ahead: bool, speculation: Speculation | None) -> Warmup | None:
    """The captures of an engine's common steps and of its drafter's; None if it is not to make them ahead of time."""
    from tinyvllm.runner.warmup import Warmup

    if not config.warm_up:
        return None
    if speculation is None:
        return Warmup(runner, sampler, config, run_ahead)
    return Warmup(runner, sampler, config, run_ahead and not speculation.reads_states, speculation.capture)


def tune_next(runner: Runner) -> bool:
    """Time a candidate of a kernel that has several; False if none waits for it. Nothing may be in flight."""
    try:
        with DEVICE_LOCK:
            return runner.tune_next()
    except (MemoryError, RuntimeError) as error:
        log.warning("autotune: a kernel keeps its default: %s: %s", type(error).__name__, error)
        runner.forget_device_state()
        return True
