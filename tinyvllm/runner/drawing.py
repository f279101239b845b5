"""From the logits of a prepared step to its tokens, and to those of steps that the device then runs by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tinyvllm.runner.runner import Logits, PreparedStep, Runner
    from tinyvllm.sampling.sampler import Sampler, SamplingFlags


def draw_tokens(
    runner: Runner, sampler: Sampler, inputs: PreparedStep, logits: Logits, flags: SamplingFlags, num_steps: int, *, use_best: bool,
    advance: bool,
) -> Iterator[np.ndarray]:  # fmt: skip
    """Tokens [n, B] drawn from `logits`, as they come. `use_best` allows the maximum that the forward pass found on its way.

    With `advance` the device moves on to the next position by itself, and runs `num_steps` - 1 more steps.
    """
    best = logits.best if use_best and not flags else None
    sampled = sampler.draw(logits.logits, flags) if best is None else best
    if not advance:
        return iter([runner.tokens(sampled)])
    call = sampler.call(logits.logits, flags) if best is None else None
    sampler.mark_drawn(inputs.num_logits, flags, num_steps - 1)
    return runner.advance(inputs, sampled, call, num_steps)
