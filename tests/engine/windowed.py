"""Engines of tiny models with windows, what they answer, and a count of the blocks that they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tinyvllm import LLM, SamplingParams
from tinyvllm.windows import Window

WINDOW, SIZE, STEP = 40, 8, 32
MOST = Window(WINDOW, SIZE).most_blocks(1 << 20, STEP)
LENGTHS = (9, 33, 150, 70, 260)
Answer = tuple[list[int], list[float]]


def prompt(i: int) -> list[int]:
    return [1, *np.random.default_rng(i).integers(3, 256, LENGTHS[i] - 1).tolist()]


def params(i: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0 if i % 2 else 0.9, seed=i, max_tokens=50, ignore_eos=True, logprobs=1, **more)


def load(folder: Path, kept: bool = False, **options: Any) -> LLM:
    options = {"max_model_len": 400, "max_num_batched_tokens": STEP, "max_num_seqs": 4, "num_blocks": 4 * MOST} | options
    options = {"speculative_config": "off", "dtype": "float32"} | options
    return LLM(folder, device="CPU", load_format="dummy", skip_tokenizer_init=True, block_size=SIZE,
               disable_hybrid_kv_cache_manager=kept, **options)  # fmt: skip


def answers(llm: LLM, numbers: range = range(len(LENGTHS)), **more: Any) -> list[Answer]:
    """Tokens and their log-probabilities, whose bits show those of the logits."""
    outputs = llm.generate([{"prompt_token_ids": prompt(i)} for i in numbers], [params(i, **more) for i in numbers])
    parts = [part for output in outputs for part in output.outputs]
    return [(p.token_ids, [row[t].logprob for row, t in zip(p.logprobs, p.token_ids, strict=True)]) for p in parts]


def check_turns(llm: LLM, whole: LLM, turns: int) -> tuple[int, int]:
    """A conversation, of which each turn must find all before it, as with `whole`: its tokens, and those that the last turn found."""
    turn, context, found = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), prompt(2), 0
    for number in range(turns):
        (output,), (expected,) = (each.generate({"prompt_token_ids": context}, turn) for each in (llm, whole))
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        found = output.num_cached_tokens
        assert found == (expected.num_cached_tokens if number else 0)
        context = [*context, *output.outputs[0].token_ids, *prompt(1)]
    return len(context), found


def count_held(llm: LLM) -> list[int]:
    """The most blocks that a sequence has held, the most in use, and the number of preemptions; changes with each step."""
    scheduler, found = llm.engine.scheduler, [0, 0, 0]
    schedule = scheduler.schedule

    def counted() -> Any:
        plan = schedule()
        held = max((len(scheduler.tables.held(sequence)) for sequence in scheduler.running), default=0)
        found[:] = max(found[0], held), max(found[1], scheduler.pool.num_blocks - scheduler.pool.num_free), found[2] + len(plan.preempted)
        return plan

    scheduler.schedule = counted  # type: ignore[method-assign]
    return found
