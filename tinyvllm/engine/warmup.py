"""Captures common step shapes ahead of time: a capture takes a tenth of a second or more, in which all requests stall."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from tinyvllm.config import EngineConfig
from tinyvllm.engine.startup import DEVICE_LOCK
from tinyvllm.runner.drawing import draw_tokens

if TYPE_CHECKING:
    from tinyvllm.runner.prepare import Shape
    from tinyvllm.runner.runner import PreparedStep, Runner
    from tinyvllm.sampling.sampler import Sampler, SamplingFlags


log = logging.getLogger("tinyvllm")


class Warmup:
    """Runs the common shapes of an engine once on padding: forward pass, greedy and plainly sampled draws, and the advance."""

    def __init__(self, runner: Runner, sampler: Sampler, config: EngineConfig, run_ahead: bool):
        """`run_ahead`: decodes run one step ahead of the host, which is another capture."""
        from tinyvllm.runner.prepare import usual_shapes
        from tinyvllm.sampling.sampler import SamplingFlags

        self._runner, self._sampler, self._run_ahead = runner, sampler, run_ahead
        self._kinds = SamplingFlags(), SamplingFlags(sampled=True)
        self._shapes: deque[Shape] = deque(usual_shapes(config.max_num_seqs, config.max_num_batched_tokens))

    def capture_next(self) -> bool:
        """Capture the next shape that has not run yet; False if none is left. Nothing may be in flight."""
        while self._shapes:
            step = self._runner.padded(self._shapes.popleft())
            if step is not None:
                self._sampler.prepare([], step.num_logits)
                for flags in self._kinds:
                    self._run(step, flags)
                return True
        return False

    def _run(self, step: PreparedStep, flags: SamplingFlags) -> None:
        runner, sampler = self._runner, self._sampler
        if step.decodes and self._run_ahead:
            runner.decode(step, sampler.step(step.num_logits, flags), flags, plain=not flags).get()
            sampler.mark_drawn(step.num_logits, flags, 1)
            return
        for _ in draw_tokens(runner, sampler, step, runner.launch(step), flags, 1, use_best=True, advance=step.decodes):
            pass


def new_warmup(runner: Runner, sampler: Sampler, config: EngineConfig, run_ahead: bool) -> Warmup | None:
    """The captures of an engine's common steps; None if it is not to make them ahead of time."""
    return Warmup(runner, sampler, config, run_ahead) if config.warm_up else None


def tune_next(runner: Runner) -> bool:
    """Time a candidate of a kernel that has several; False if none waits for it. Nothing may be in flight."""
    try:
        with DEVICE_LOCK:
            return runner.tune_next()
    except (MemoryError, RuntimeError) as error:
        log.warning("autotune: a kernel keeps its default: %s: %s", type(error).__name__, error)
        runner.forget_device_state()
        return True
