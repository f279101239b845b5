"""The usual steps, captured before somebody waits for one: each takes a tenth of a second and more, and everybody's tokens stand still."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tinyvllm.config import EngineConfig

if TYPE_CHECKING:
    from tinyvllm.runner.prepare import Shape
    from tinyvllm.runner.runner import PreparedStep, Runner
    from tinyvllm.sampling.sampler import Sampler, SamplingFlags


class Warmup:
    """Goes through an engine's usual shapes: forward pass, greedy and plainly sampled draws, and the advance, run once on padding alone."""

    def __init__(self, runner: Runner, sampler: Sampler, config: EngineConfig, ahead: bool):
        """`ahead` says that decodes run one step ahead of the host: that is another capture."""
        from tinyvllm.runner.prepare import usual_shapes
        from tinyvllm.sampling.sampler import SamplingFlags

        self._runner, self._sampler, self._ahead = runner, sampler, ahead
        self._kinds = SamplingFlags(), SamplingFlags(sampled=True)
        self._left: deque[Shape] = deque(usual_shapes(config.max_num_seqs, config.max_num_batched_tokens))

    def next(self) -> bool:
        """Capture one more that nobody has run yet; whether more may be left. Nothing must be in flight."""
        while self._left:
            step = self._runner.padded(self._left.popleft())
            if step is not None:
                self._sampler.prepare([], step.num_logits)
                for flags in self._kinds:
                    self._run(step, flags)
                return True
        return False

    def _run(self, step: PreparedStep, flags: SamplingFlags) -> None:
        runner, sampler = self._runner, self._sampler
        if step.decodes and self._ahead:
            runner.decode(step, sampler.step(step.num_logits, flags), flags, plain=not flags).get()
            sampler.mark_drawn(step.num_logits, flags, 1)
            return
        result = runner.launch(step)
        plain = result.best is not None and not flags
        sampled = result.best if plain and result.best is not None else sampler.draw(result.logits, flags)
        if step.decodes:
            draw = None if plain else sampler.call(result.logits, flags)
            for _ in runner.advance(step, sampled, draw, 1):
                pass
        else:
            runner.tokens(sampled)
