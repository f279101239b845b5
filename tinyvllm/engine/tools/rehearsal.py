"""How fast an engine will be before its weights are there: an engine on stand-ins (runner/rehearsed.py) is driven step by step and timed.

So all that a step takes is in its time: schedule, inputs, kernels, draw, requests, and the turns that device and host take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import fmean, median
from types import TracebackType
from typing import TYPE_CHECKING

from tinyvllm.config.engine import EngineConfig
from tinyvllm.engine.engine import Engine
from tinyvllm.engine.startup import DEVICE_LOCK
from tinyvllm.engine.tools.stepping import Stepping
from tinyvllm.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from tinyvllm.runner.opened import OpenedModel
    from tinyvllm.runner.outlined import Held

SECONDS, RUNS = 0.4, 5  # of one measurement, and steps at least
STEPS = 48  # of decodes between two starts, around the wanted context
GROUP = 16  # steps of which the mean counts: a sequence gets a block in one of them, which costs the host more
_SLACK = 4  # steps before those that are timed
_SHORTEST = 64  # tokens of the longest sequence: room for some steps


@dataclass(frozen=True)
class StepSeconds:
    """Of a step that decodes a token of one sequence, a token of each of several, and of the prefill of a prompt."""

    decode: float
    decode_all: float
    prompt: float


def rehearsed_seconds(
    config: EngineConfig, opened: OpenedModel, held: Iterable[Held], sequences: int, context: int, prompt: int
) -> StepSeconds:
    """Seconds of decodes with contexts of `context` tokens, of one sequence and of `sequences`, and of a prompt of `prompt` tokens.

    `opened.model` has the stand-ins afterwards. OutOfMemoryError if they would take more than half of the free memory; KernelError and
    ToolchainError where the steps cannot be run.
    """
    with Rehearsal(config, opened, held, sequences, context) as rehearsal:
        prefill = rehearsal.prefill(prompt)
        return StepSeconds(rehearsal.decode(1), rehearsal.decode(sequences), prefill)


class Rehearsal:
    """An engine with room for `sequences` sequences of `context` tokens. `clock` gives seconds."""

    def __init__(
        self,
        config: EngineConfig,
        opened: OpenedModel,
        held: Iterable[Held],
        sequences: int,
        context: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        from tinyvllm.runner.rehearsed import EMBEDDED, RehearsedRunner, check_room
        from tinyvllm.runner.scratch import wanted_context
        from tinyvllm.runner.sizes import groups_of

        self._clock, self._prompts, self._ids = clock, 0, min(EMBEDDED, opened.config.vocab_size)
        longest = max(wanted_context(config, opened.config), min(_SHORTEST, opened.config.max_context))
        budget = max(1, config.max_num_batched_tokens - sequences)
        admitting = -(-sequences * context // budget)  # steps in which the first sequences already decode
        later = config.num_scheduler_steps * (STEPS + _SLACK) + admitting
        self._start = max(1, min(context - later // 2, longest - later - 1))
        self._steps = min(STEPS, (longest - self._start - admitting - 1) // config.num_scheduler_steps - _SLACK)
        self._tokens = config.num_scheduler_steps  # of a sequence in a step
        config = _alone(config, sequences, longest)
        held_blocks = groups_of(config, opened.config).blocks.most_blocks(
            min(self._start + later + 1, longest), config.max_num_batched_tokens
        )
        blocks = sequences * held_blocks
        config = replace(config, num_blocks=blocks)
        kv_bytes = blocks * opened.block.nbytes
        check_room(opened, held, kv_bytes)
        with DEVICE_LOCK:
            runner = RehearsedRunner(config, opened, kv_bytes)
        self._runner, self._engine = runner, Engine(config, runner=runner)
        self._stepping = Stepping(self)

    @property
    def engine(self) -> Engine:
        return self._engine

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._engine.close()

    def decode(self, sequences: int) -> float:
        """Seconds of a token of each of `sequences` sequences."""
        spans, end = list[float](), self._clock() + SECONDS
        while len(spans) < RUNS or self._clock() < end:
            self._stepping.begin_tuned([self._prompt(self._start) for _ in range(sequences)], _SLACK)
            for _ in range(max(1, self._steps)):
                spans.append(self._seconds(lambda: self._stepping.steps(1)))
                if len(spans) >= RUNS and self._clock() >= end:
                    break
        self._stepping.stop()
        return _typical(spans) / self._tokens

    def prefill(self, tokens: int) -> float:
        """Seconds of the prefill of `tokens` tokens."""
        long = self._runner.long_prefill(tokens)
        if long is not None:
            return long
        self._runner.computes_prompts = True
        try:
            self._stepping.prefill(self._prompt(tokens))  # compiles and captures
            spans, end = list[float](), self._clock() + SECONDS
            while len(spans) < RUNS or self._clock() < end:
                prompt = self._prompt(tokens)
                spans.append(self._seconds(lambda prompt=prompt: self._stepping.prefill(prompt)))  # type: ignore[misc]
        finally:
            self._runner.computes_prompts = False
        return median(spans)

    def _seconds(self, run: Callable[[], object]) -> float:
        start = self._clock()
        run()
        return self._clock() - start

    def _prompt(self, tokens: int) -> list[int]:
        """A prompt that no other begins as: nothing of it is in the prefix cache."""
        self._prompts += 1
        return [(7 * i + self._prompts * (1 + i)) % self._ids for i in range(tokens)]


def _alone(config: EngineConfig, sequences: int, longest: int) -> EngineConfig:
    """The configuration without what a step does not take part in."""
    return replace(
        config,
        skip_tokenizer_init=True,
        max_model_len=longest,
        max_num_seqs=sequences,
        kv_memory=None,
        swap_space=0,
        speculative_config=None,
        prefix_cache_dir=None,
        kv_events_config=None,
        max_num_queued_reqs=None,
        max_num_queued_tokens=None,
        lora_modules=(),
        warm_up=False,
        record=None,
        profile=None,
        energy=False,
    )


def _typical(spans: list[float]) -> float:
    """The median of the means of groups, or of single spans where those are few."""
    groups = [fmean(spans[i : i + GROUP]) for i in range(0, len(spans) - GROUP + 1, GROUP)]
    return median(groups if len(groups) >= RUNS else spans)
