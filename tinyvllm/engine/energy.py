"""The joules of an engine's steps, split over the requests by their rows: an observer with an account of the machine's meter."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tinyvllm.engine.observer import EngineObserver
from tinyvllm.engine.output import ActiveRequest
from tinyvllm.metrics import EnergyTotals
from tinyvllm.request import Energy, RequestOutput
from tinyvllm.scheduler import Schedule

if TYPE_CHECKING:
    from tinyvllm.energy.meter import Account, Interval

MAX_SPANS = 16_384  # steps without a reading: of ten microseconds each, three periods
OFF = Energy(not_measured={"all": "the engine was started without --energy (energy=True)"})

_Shares = tuple[tuple[ActiveRequest, float], ...]  # of a schedule's rows, of the requests that want to know


class EngineEnergy(EngineObserver):
    """Charges each step to its requests, once the reading that covers it is there. `totals` are those of all steps."""

    def __init__(self, account: Account):
        self._account, self._clock = account, account.meter.clock
        counters = account.meter.counters
        self.totals = EnergyTotals(counters=account.meter.joules, not_measured=counters.not_measured)
        self._spans: deque[tuple[float, float, _Shares]] = deque()  # (start, end, shares) of what is not charged yet
        self._shares: _Shares = ()
        self._uses: dict[ActiveRequest, list[float]] = {}  # joules above idle and of the idle machine, of requests that run
        self._started: float | None = None  # the running step, or its part that is not in a span yet
        self._last: Interval | None = None

    def engine_closed(self) -> None:
        from tinyvllm.energy.meter import close_account

        close_account(self._account)

    def step_started(self) -> None:
        self._started = now = self._clock()
        self._account.step_started(now)

    def step_launched(self, schedule: Schedule, owners: Mapping[int, ActiveRequest], num_steps: int) -> None:
        if schedule.reused:  # the rows are those of the last step
            return
        rows: dict[ActiveRequest, int] = {}
        for entry in schedule.entries:
            owner = owners[entry.sequence.sequence_id]
            if owner.options.wants_energy:
                rows[owner] = rows.get(owner, 0) + entry.num_tokens
        self._shares = tuple((owner, count / schedule.num_tokens) for owner, count in rows.items())
        for owner in rows:
            self._uses.setdefault(owner, [0.0, 0.0])

    def step_finished(self) -> None:
        now = self._clock()
        self._cut(now)
        self._started = None
        self._account.step_finished(now)
        if len(self._spans) > MAX_SPANS:  # the thread of the meter does not come
            self._account.meter.read()
        if self._account.intervals:
            self._charge_spans()

    def bill(self, request: ActiveRequest) -> Energy:
        """The energy of a request that has finished; `EngineStats` calls it once.

        Since the last reading, 50 ms at most, it is estimated with the power before that.
        """
        meter = self._account.meter
        self._cut(self._clock())
        self._charge_spans()
        if self._last is None and meter.measures:  # it finishes within the first period
            meter.read()
            self._charge_spans()
        use = self._uses.pop(request, None) or [0.0, 0.0]
        if not meter.measures:
            return Energy(not_measured=dict(self.totals.not_measured))
        if self._last is not None:
            seconds = sum((end - start) * share for start, end, shares in self._spans for owner, share in shares if owner is request)
            use = [use[0] + self._last.watts * seconds, use[1] + self._last.idle_watts * seconds]
        tokens = sum(len(sequence.output_token_ids) for sequence in request.sequences)
        names = tuple(counter.name for counter in meter.counters.open)
        return Energy.of(use[0], use[1], tokens, names, dict(self.totals.not_measured))

    def read(self) -> EnergyTotals:
        """The totals up to now, between two steps."""
        self._account.meter.read()
        self._charge_spans()
        return self.totals

    def _cut(self, now: float) -> None:
        """What has run of the step until now, as a span."""
        if self._started is not None:
            self._spans.append((self._started, now, self._shares))
            self._started = now

    def _charge_spans(self) -> None:
        intervals, spans = self._account.intervals, self._spans
        while intervals:
            interval = self._last = intervals.popleft()
            while spans and spans[0][0] < interval.end:
                start, end, shares = spans.popleft()
                self._charge(min(end, interval.end) - start, shares, interval)
                if end > interval.end:
                    spans.appendleft((interval.end, end, shares))
        self.totals.idle_watts = self._account.meter.idle_watts

    def _charge(self, seconds: float, shares: _Shares, interval: Interval) -> None:
        active, idle = interval.watts * seconds, interval.idle_watts * seconds
        self.totals.active += active
        self.totals.idle += idle
        for owner, share in shares:
            use = self._uses.get(owner)  # None once it has finished
            if use is not None:
                use[0] += active * share
                use[1] += idle * share


def set_energy(request: ActiveRequest, output: RequestOutput, energy: Energy) -> None:
    """Put the energy of a finished request where it was wanted."""
    request.receipt.energy = energy
    if request.options.energy:
        output.energy = energy
