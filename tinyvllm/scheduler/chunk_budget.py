"""How many tokens of prompts a step computes: the token budget, and with decodes a target for the step's time."""

from __future__ import annotations

from tinyvllm.scheduler.rates import Rates
from tinyvllm.scheduler.schedule import SchedulerLimits


def chunk_budget(limits: SchedulerLimits, rates: Rates, num_decodes: int, pending: bool) -> tuple[int, int | None]:
    """Tokens for the chunks of a step: what its decodes leave, and with decodes no more than the target for the step's time allows.

    The second number is what a recording keeps: what the rates allowed, max_batched_tokens for no limit, None where they were not
    consulted. `pending`: there may be chunks in this step.
    """
    budget, seconds = limits.max_batched_tokens - num_decodes, limits.max_step_seconds
    if seconds is None or not num_decodes or not pending:
        return budget, None
    allowed = rates.max_chunk_tokens(seconds, budget)
    return allowed, allowed if allowed < budget else limits.max_batched_tokens
