"""Captures common step shapes ahead of time: a capture takes a tenth of a second or more, in which all requests stall."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tinygrad import Tensor

from tinyvllm.config.engine import EngineConfig
from tinyvllm.runner.drawing import draw_tokens
from tinyvllm.runner.prepare import Shape, common_shapes
from tinyvllm.runner.runner import PreparedStep, Runner
from tinyvllm.sampling.parameters import SamplingFlags
from tinyvllm.sampling.sampler import Sampler

PLAIN_DRAWS = SamplingFlags(), SamplingFlags(sampled=True)  # greedy, and sampled without filters


class Warmup:
    """Runs the common shapes of an engine once on padding: forward pass, greedy and plainly sampled draws, and the advance."""

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        config: EngineConfig,
        run_ahead: bool,
        after: Callable[[Shape, Tensor | None], None] | None = None,
    ):
        """`run_ahead`: decodes run one step ahead of the host, which is another capture. `after` gets each shape and its hidden states."""
        self._runner, self._sampler, self._run_ahead, self._after = runner, sampler, run_ahead, after
        self._drafts = config.speculative_config is not None
        self._shapes: deque[Shape] = deque(common_shapes(config))

    def capture_next(self) -> bool:
        """Capture the next shape that has not run yet; False if none is left. Nothing may be in flight."""
        while self._shapes:
            shape = self._shapes.popleft()
            step = self._runner.padded(shape)
            if step is not None:
                self._capture(shape, step)
                return True
        return False

    def _capture(self, shape: Shape, step: PreparedStep) -> None:
        ahead, states = step.decodes and self._run_ahead, None
        if ahead:
            self._run_ahead_once(step)
        # with drafts, a number of rows is a power of two, and the step runs by itself
        if not ahead or (self._drafts and shape.decodes & (shape.decodes - 1) == 0):
            states = capture_step(self._runner, self._sampler, step)
        if self._after is not None:
            self._after(shape, states)

    def _run_ahead_once(self, step: PreparedStep) -> None:
        runner, sampler = self._runner, self._sampler
        sampler.prepare([], step.num_logits)
        for flags in PLAIN_DRAWS:
            runner.decode(step, sampler.step(step.num_logits, flags), flags, plain=not flags).get()
            sampler.mark_drawn(step.num_logits, flags, 1)


def capture_step(runner: Runner, sampler: Sampler, step: PreparedStep) -> Tensor | None:
    """Run a step of padding with each of PLAIN_DRAWS; its hidden states, if the runner keeps them."""
    states = None
    sampler.prepare([], step.num_logits)
    for flags in PLAIN_DRAWS:
        logits = runner.launch(step)
        states = logits.states
        for _ in draw_tokens(runner, sampler, step, logits, flags, 1, use_best=True, advance=step.decodes):
            pass
    return states
