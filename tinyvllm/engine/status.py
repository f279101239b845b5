"""What an engine says about itself: its state in numbers, and why the prefix cache has or lacks the blocks of a prompt."""

from __future__ import annotations

from typing import Any

from tinyvllm.cache.prefix import PrefixCache
from tinyvllm.engine.segments import Segments
from tinyvllm.engine.stats import EngineStats
from tinyvllm.request import RequestOptions
from tinyvllm.text.tokenizer import Tokenizer

PHASES = ("schedule", "prepare", "run", "sample", "output")


def engine_status(stats: EngineStats, segments: Segments) -> dict[str, Any]:
    """Numbers for a live view; may be called from any thread."""
    scheduler = stats.scheduler
    pool, prefix, step = scheduler.pool, scheduler.prefix, stats.step
    return {
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "blocks": {"used": pool.num_blocks - pool.num_free, "cached": pool.num_evictable, "total": pool.num_blocks},
        "prefix": {"queries": prefix.queries, "hits": prefix.hits, "evictions": prefix.evictions} if prefix else None,
        "segments": segments.status(),
        "steps": stats.num_steps,
        "tokens": stats.num_tokens,
        "step_seconds": {name: getattr(step, name) for name in PHASES},
        "predicted_wait": scheduler.predicted_wait(),
    }


def explain_prefix(prefix: PrefixCache | None, tokenizer: Tokenizer | None, prompt_token_ids: list[int], options: RequestOptions) -> str:
    """Blocks of a prompt that are cached, or were evicted, and where the nearest cached prompt of the same key differs."""
    if prefix is None:
        return "prefix caching is off"

    def shown(token_ids: list[int]) -> str:
        return repr(tokenizer.decode(token_ids, skip_special_tokens=False) if tokenizer else token_ids)

    found = prefix.explain(prompt_token_ids, options.prefix_salt, options.owner)
    num_blocks = len(prompt_token_ids) // prefix.pool.block_size
    text = f"{found.hit_blocks} of {num_blocks} blocks hit, {found.evicted_blocks} were evicted"
    if found.first_difference is None:
        return text
    return f"{text}; diverged at token {found.first_difference}: {shown(found.ours)} vs {shown(found.theirs)}"
