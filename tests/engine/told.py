"""An Engine that tells a Recorder what it does, from outside."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tinyvllm.engine import engine as module
from tinyvllm.engine.beam import BeamState
from tinyvllm.engine.engine import Engine
from tinyvllm.engine.record import Recorder, header_of, record_to
from tinyvllm.errors import BusyError

WIRED = "recorder" in inspect.signature(Engine).parameters


class Told(Engine):
    def __init__(self, config: Any, progress: Any = None, *, recorder: Recorder | None = None, clock: Callable[[], float] = time.monotonic):
        super().__init__(replace(config, record=None), progress)
        given, checkpoint = replace(config, device=self.config.device), self.runner.checkpoint
        header = header_of(given, self.runner.pool.num_blocks, str(self.runner.dtype), checkpoint.config, checkpoint.tensors)
        self.recorder = recorder or record_to(config.record, header)
        self.scheduler._clock = self.recorder.watched(clock)
        module.time = SimpleNamespace(monotonic=clock, perf_counter=time.perf_counter)  # type: ignore[attr-defined]
        launched = self.accounts.launched

        def tell(schedule: Any, owners: Any, rounds: int) -> None:
            launched(schedule, owners, rounds)
            self.recorder.launched(schedule, rounds)

        self.accounts.launched = tell  # type: ignore[method-assign]

    def add(self, request_id: str, prompt_token_ids: list[int], params: Any, prompt: Any = None, terms: Any = None) -> None:
        try:
            super().add(request_id, prompt_token_ids, params, prompt, terms)
        except BusyError as error:
            self.recorder.refused(request_id, str(error), 0.0)
            raise
        state = self._requests[request_id]
        self.recorder.added(request_id, prompt_token_ids, state.params, state.terms, state.metrics.arrival)

    def abort(self, request_id: str) -> None:
        if request_id in self._requests:
            self.recorder.aborted(request_id)
        super().abort(request_id)

    def step(self) -> Any:
        self.recorder.begin_step()
        return super().step()

    def _settle(self, schedule: Any) -> None:
        self.recorder.settled(schedule)
        super()._settle(schedule)

    def _outputs(self) -> Any:
        states = dict(self._requests)
        outputs = super()._outputs()
        for output in outputs:
            if output.finished:
                state = states[output.request_id]
                search = isinstance(state, BeamState)
                results = [(o.token_ids, o.finish_reason) for o in output.outputs] if search else \
                    [(s.output_token_ids, s.finish_reason) for s in state.sequences]  # fmt: skip
                self.recorder.finished(output.request_id, results)
        return outputs
