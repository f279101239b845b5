"""After a step that raised: the engine continues, and the request that makes steps fail is found and ended.

A step computes many requests at once, so an exception in it names none of them. All running sequences return to the queue, nothing of
what they computed is kept but blocks that earlier steps published, and they are admitted again one at a time: each must give a token
before the next may join. A failure that does not come back harmed no request; one that does is that of the sequence that joined last. The
tokens of the others are those of an undisturbed run: a token does not depend on the batch, and a preempted sequence is recomputed in the
same way.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

from tinyvllm.engine.boundary import request_failure
from tinyvllm.engine.loop import StepLoop
from tinyvllm.engine.requests import ActiveRequests
from tinyvllm.engine.stages import Stages
from tinyvllm.errors import RankError
from tinyvllm.host_memory import is_out_of_memory
from tinyvllm.request import Sequence

log = logging.getLogger("tinyvllm")

MAX_FAILED_STEPS = 16  # in a row without a good one, memory that ran out not counted: then the device or the engine is broken
MAX_ROUNDS = 3  # times that the sequences start over one at a time before one is blamed that may be innocent


class StepRecovery:
    """Runs steps, and recovers from those that raise an Exception. Others (KeyboardInterrupt) pass."""

    def __init__(self, stages: Stages, loop: Callable[[], StepLoop]):
        self._stages, self._loop = stages, loop
        self._suspects: set[Sequence] = set()  # ran in a failed step and gave no token since
        self._rounds = 0  # failures since the last time without suspects that could not be attributed
        self._failures = 0  # in a row
        self.num_failed = 0  # steps since the start

    @property
    def _requests(self) -> ActiveRequests:
        return self._stages.requests

    def run(self, step: Callable[[], None]) -> None:
        """Run one step. Raises what it raised only if the engine cannot continue."""
        if self._suspects:
            self._limit_admission()
        try:
            step()
        except RankError:
            raise  # the ranks are gone: no step can run any more
        except Exception as error:
            self._recover(error)
        else:
            self._failures = 0
            if self._suspects:
                self._clear_suspects()

    def _recover(self, error: Exception) -> None:
        memory = is_out_of_memory(error)
        self.num_failed += 1
        self._failures += not memory
        if self._failures > MAX_FAILED_STEPS:
            raise error
        log.error(
            "a step failed (%s); its requests run again, one more at a time", type(error).__name__, exc_info=None if memory else error
        )
        if memory:
            traceback.clear_frames(error.__traceback__)  # they hold what the step had allocated
        blamed = self._blamed()
        self._loop().discard()
        self._stages.forget_device_state()
        requeued = self._requests.requeue_running()
        self._suspects = {sequence for sequence in (*requeued, *self._suspects) if not sequence.finished}
        if blamed is not None and not blamed.finished and (request := self._requests.owners.get(blamed.sequence_id)) is not None:
            self._requests.fail(request, request_failure(request.request_id, "a step of the model", error))
            self._suspects = {sequence for sequence in self._suspects if not sequence.finished}

    def _blamed(self) -> Sequence | None:
        """The sequence whose request is to blame for the failed step, if that is certain enough."""
        schedule = self._stages.scheduled
        running = [entry.sequence for entry in schedule.entries if not entry.sequence.finished] if schedule is not None else []
        if schedule is None and self._stages.scheduler.considered is not None:
            return self._stages.scheduler.considered
        newcomers = [sequence for sequence in running if sequence in self._suspects]
        if len({sequence.request_id for sequence in newcomers}) == 1:
            return newcomers[-1]
        self._rounds += 1
        return running[-1] if running and self._rounds > MAX_ROUNDS else None

    def _limit_admission(self) -> None:
        """Let the next sequence in once all that run have given a token."""
        scheduler = self._stages.scheduler
        self._suspects = {sequence for sequence in self._suspects if not sequence.finished}
        scheduler.max_admissions = 0 if any(sequence in self._suspects for sequence in scheduler.running) else 1
        if not self._suspects:
            scheduler.max_admissions, self._rounds = None, 0

    def _clear_suspects(self) -> None:
        schedule = self._stages.scheduled
        if schedule is not None:
            self._suspects.difference_update(entry.sequence for entry in schedule.entries if entry.num_logits)
        if not self._suspects:
            self._stages.scheduler.max_admissions, self._rounds = None, 0
