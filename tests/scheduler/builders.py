"""Schedulers and sequences made by hand, and a step of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tinyvllm.cache.blocks import BlockPool
from tinyvllm.cache.prefix import PrefixCache
from tinyvllm.request import RequestOptions, SamplingParams, Sequence
from tinyvllm.scheduler import Schedule, Scheduler, SchedulerLimits


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def make(
    rows: int = 4, budget: int = 32, longest: int = 64, blocks: int = 32, size: int = 4, hosted: int = 0, caching: bool = False, **limits
) -> Scheduler:
    pool = BlockPool(blocks, size)
    prefix = PrefixCache(pool, b"key") if caching else None
    host = BlockPool(hosted, size) if hosted else None
    return Scheduler(SchedulerLimits(rows, budget, longest, **limits), pool, prefix, host, Clock())


def make_sequence(number: int, tokens: int | list[int], output: int = 0, wanted: int = 8, arrival: float = 100.0, **options) -> Sequence:
    given = RequestOptions(**options)
    due = arrival + min((d for d in (given.deadline_ms, given.ttft_deadline_ms) if d is not None), default=math.inf) / 1000
    prompt = list(range(tokens)) if isinstance(tokens, int) else tokens
    sequence = Sequence(number, f"r{number}", prompt, SamplingParams(max_tokens=wanted), options=given, arrival=arrival, due=due)
    sequence.output_token_ids += [7] * output
    return sequence


def run(scheduler: Scheduler) -> Schedule:
    """A step, after which each sequence that samples has one more token."""
    plan = scheduler.schedule()
    scheduler.advance(plan)
    for entry in plan.entries:
        if entry.num_logits:
            entry.sequence.output_token_ids.append(7)
    return plan


def ran(plan: Schedule) -> list[int]:
    return [entry.sequence.sequence_id for entry in plan.entries]


def all_free(scheduler: Scheduler) -> bool:
    pool, host = scheduler.pool, scheduler.host
    return pool.num_free == pool.num_blocks and (host is None or host.num_free == host.num_blocks)
