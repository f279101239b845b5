"""The events of an engine, for statistics and recordings. An observer reads them; it changes nothing that a request gets."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tinyvllm.cache.prefix import PrefixCache
from tinyvllm.config.engine import EngineConfig
from tinyvllm.engine.output import ActiveRequest
from tinyvllm.errors import TinyvllmError
from tinyvllm.request import RequestOutput
from tinyvllm.scheduler import Schedule

if TYPE_CHECKING:
    from tinyvllm.runner.runner import Runner

Clock = Callable[[], float]
LAUNCH_STARTED, LAUNCH_ENDED = "launch started", "launch ended"
MAX_MARKS = 1 << 14  # that wait: steps which raise have no end, and do not count
log = logging.getLogger("tinyvllm")


class Marks(list[str | float]):
    """Names and times of what steps have done, in turn: "step", the phases that ended, LAUNCH_STARTED and LAUNCH_ENDED, "end".

    Without `phases` there are steps and ends alone, and without `steps` nothing.
    Observers get `steps_marked` after `left` more steps, or, where steps are marked, at the end of the first one after the time `until`.
    A trace that was called in each step instead took 3% of steps of 0.4 ms for 1 us of work: its code is no longer in the processor's
    caches then. For the same reason marks of each step took 1 to 2% of steps of 1 ms.
    """

    left, until, phases, steps = 0, math.inf, True, True


class EngineObserver:
    """One method an event. All of them do nothing here: an observer overrides those that it needs."""

    def engine_started(self, config: EngineConfig, runner: Runner) -> None:
        """The model is loaded; no request has come yet."""

    def cache_opened(self, cache: PrefixCache | None) -> None:
        """The prefix cache, with the blocks of its folder; None for an engine without one. No request has come yet."""

    def engine_closed(self) -> None:
        """The engine is closed, or its start failed: no event follows."""

    def watch_clock(self, clock: Clock) -> Clock:
        """The clock that the scheduler gets in place of `clock`; what it reads decides about deadlines."""
        return clock

    def request_added(self, request: ActiveRequest) -> None:
        """The request is in the queue, its drawn seed among its parameters."""

    def request_refused(self, request: ActiveRequest, error: TinyvllmError) -> None:
        """The scheduler did not take the request."""

    def request_aborted(self, request_id: str) -> None:
        """The caller ended a request that runs or waits."""

    def request_finished(self, request: ActiveRequest, output: RequestOutput) -> None:
        """`output` is the last one of the request."""

    def step_started(self) -> None:
        """A step begins."""

    def phase_ended(self, phase: str) -> None:
        """The time since the last event of this name, or since the step began, was spent on schedule, prepare, run, sample or output."""

    def step_scheduled(self, schedule: Schedule) -> None:
        """The scheduler chose a new step (not a reused one); neither its blocks nor its ended sequences are taken care of yet."""

    def blocks_moved(self, schedule: Schedule, seconds: float) -> None:
        """The blocks of a schedule were swapped and copied."""

    def step_launched(self, schedule: Schedule, owners: Mapping[int, ActiveRequest], num_steps: int) -> None:
        """A schedule runs `num_steps` times in a row; `owners` has the request of each sequence id."""

    def batch_changed(self, schedule: Schedule, owners: Mapping[int, ActiveRequest]) -> None:
        """The schedule that was launched has other rows than the step before it: it is not a reused one."""

    def steps_marked(self) -> None:
        """There are as many marks as were asked for: see Marks."""

    def tokens_appended(self, request: ActiveRequest, count: int, forced: bool = False) -> None:
        """A sequence of the request got `count` tokens; `forced` if they follow without a choice and were not drawn."""

    def drafts_checked(self, request: ActiveRequest, num_drafts: int, num_accepted: int) -> None:
        """A step has checked drafts of a sequence of the request, and accepted the first `num_accepted` of them."""

    def step_finished(self) -> None:
        """The step is over and its outputs are made."""

    def segment_tried(self, number: int, token_ids: list[int], cache_salt: str | None, held: bool) -> None:
        """The blocks of a segment were looked up to be held. Also a failure matters for a recording: the look-up counts as a use."""

    def segment_released(self, number: int) -> None:
        """A segment gave its blocks up."""


class Observers(EngineObserver):
    """Passes every event on to several observers, in their order.

    What an observer raises for an event of a request is that request's: the caller has a boundary around it. What it raises for an event
    of a step or a segment is logged, once for each kind of event: the step is unchanged by it.
    """

    def __init__(self, observers: Iterable[EngineObserver]):
        self.marks: Marks | None = None  # of a trace, while there is one
        self._observers: tuple[EngineObserver, ...] = ()
        self._of_event: dict[str, list[EngineObserver]] = {}  # that do something at an event which cannot fail for its caller
        self._set(observers)
        self._logged: set[tuple[str, str]] = set()  # observers and events whose failure was logged

    def engine_started(self, config: EngineConfig, runner: Runner) -> None:
        for observer in self._observers:
            observer.engine_started(config, runner)

    def cache_opened(self, cache: PrefixCache | None) -> None:
        for observer in self._observers:
            observer.cache_opened(cache)

    def watch_clock(self, clock: Clock) -> Clock:
        for observer in self._observers:
            clock = observer.watch_clock(clock)
        return clock

    def add(self, observer: EngineObserver) -> None:
        """Also pass events to this one, from now on. Between two steps."""
        self._set((*self._observers, observer))

    def remove(self, observer: EngineObserver) -> None:
        """Pass events to this one no more. Between two steps."""
        self._set(each for each in self._observers if each is not observer)

    def _set(self, observers: Iterable[EngineObserver]) -> None:
        self._observers = tuple(observers)
        self._of_event = {}

    # ---- events of a request ----

    def request_added(self, request: ActiveRequest) -> None:
        for observer in self._observers:
            observer.request_added(request)

    def request_refused(self, request: ActiveRequest, error: TinyvllmError) -> None:
        for observer in self._observers:
            observer.request_refused(request, error)

    def request_aborted(self, request_id: str) -> None:
        for observer in self._observers:
            observer.request_aborted(request_id)

    def request_finished(self, request: ActiveRequest, output: RequestOutput) -> None:
        for observer in self._observers:
            observer.request_finished(request, output)

    def tokens_appended(self, request: ActiveRequest, count: int, forced: bool = False) -> None:
        for observer in self._observers:
            observer.tokens_appended(request, count, forced)

    def drafts_checked(self, request: ActiveRequest, num_drafts: int, num_accepted: int) -> None:
        self._each("drafts_checked", request, num_drafts, num_accepted)

    # ---- other events ----

    def engine_closed(self) -> None:
        self._each("engine_closed")

    def step_started(self) -> None:
        self._each("step_started")
        if (marks := self.marks) is not None:
            if marks.left <= 0 or len(marks) > MAX_MARKS:
                self._each("steps_marked")
            if marks.steps:
                marks += ("step", time.perf_counter())

    def phase_ended(self, phase: str) -> None:
        if (marks := self.marks) is not None and marks.phases and phase != "prepare":  # it ends where the launch begins
            marks += (phase, time.perf_counter())
        self._each("phase_ended", phase)

    def step_scheduled(self, schedule: Schedule) -> None:
        self._each("step_scheduled", schedule)

    def blocks_moved(self, schedule: Schedule, seconds: float) -> None:
        self._each("blocks_moved", schedule, seconds)

    def step_launched(self, schedule: Schedule, owners: Mapping[int, ActiveRequest], num_steps: int) -> None:
        self._each("step_launched", schedule, owners, num_steps)
        if not schedule.reused:
            self._each("batch_changed", schedule, owners)

    def step_finished(self) -> None:
        if (marks := self.marks) is not None:
            marks.left -= 1
            now = 0.0
            if marks.steps:
                now = time.perf_counter()
                marks += ("end", now)
            if marks.left <= 0 or now > marks.until:
                self._each("steps_marked")
        self._each("step_finished")

    def segment_tried(self, number: int, token_ids: list[int], cache_salt: str | None, held: bool) -> None:
        self._each("segment_tried", number, token_ids, cache_salt, held)

    def segment_released(self, number: int) -> None:
        self._each("segment_released", number)

    def _each(self, event: str, *values: Any) -> None:
        observers = self._of_event.get(event)
        if observers is None:
            unchanged = getattr(EngineObserver, event)
            observers = self._of_event[event] = [one for one in self._observers if getattr(type(one), event, None) is not unchanged]
        for observer in observers:
            try:
                getattr(observer, event)(*values)
            except Exception as error:  # it only watches
                self._log(type(observer).__name__, event, error)

    def _log(self, observer: str, event: str, error: Exception) -> None:
        if (observer, event) not in self._logged:
            self._logged.add((observer, event))
            log.error("%s.%s failed; the engine continues, and this is logged once", observer, event, exc_info=error)
