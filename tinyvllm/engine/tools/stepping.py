"""Drives an LLM step by step, to time its steps. Uses the engine's public face: add, abort, step, has_work."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


class Stepping:
    """Greedy requests in the middle of their answers."""

    def __init__(self, llm: Any):
        self.engine = llm.engine
        self._ids = itertools.count()
        self._running: list[str] = []
        self._failed = self.engine.recovery.num_failed

    def _step(self) -> Any:
        """One step's outputs. RuntimeError where it failed: the engine recovers, and a figure would be of nothing."""
        outputs = self.engine.step()
        before, self._failed = self._failed, self.engine.recovery.num_failed
        if self._failed > before:
            raise RuntimeError("a step of the engine failed; its error is logged above")
        return outputs

    def begin(self, prompts: Sequence[list[int]], room: int | None = None) -> None:
        """End what runs; then start one request a prompt, and step until each has its first token.

        The requests run for `room` tokens, or as long as the model's context allows.
        """
        from tinyvllm.request import SamplingParams

        self.stop()
        longest = self.engine.max_model_len
        for ids in prompts:
            params = SamplingParams(temperature=0.0, max_tokens=room or longest - len(ids), ignore_eos=True)
            self._running.append(f"bench-{next(self._ids)}")
            self.engine.add(self._running[-1], ids, params)
        waiting = set(self._running)
        while waiting:
            waiting -= {output.request_id for output in self._step() if output.outputs[0].token_ids}

    def begin_tuned(self, prompts: Sequence[list[int]], steps: int) -> None:
        """`begin` and some steps, with kernels as they are in a later process: those that are to be timed first are timed in between."""
        self.begin(prompts)
        self.steps(steps)
        if self.engine.runner.has_untimed_kernels:
            self.stop()
            while self.engine.warmup():
                pass
            self.begin(prompts)
            self.steps(steps)

    def steps(self, count: int) -> None:
        """`count` steps, each a token of every request. RuntimeError if a request ends meanwhile: it would count as decoded."""
        for _ in range(count):
            if any(output.finished for output in self._step()):
                raise RuntimeError("a request ended while it was timed: give the engine a greater max_model_len")

    def prefill(self, *prompts: list[int]) -> None:
        """Prompts up to the first token of their answers, and no further."""
        self.begin(prompts, room=1)
        self._running.clear()

    def stop(self) -> None:
        """End what runs; the step that reports it counts for no measurement."""
        for request_id in self._running:
            self.engine.abort(request_id)
        self._running.clear()
        while self.engine.has_work():
            self.engine.step()
