"""Reads the counters of a machine in a thread of its own, and says what the steps of its engines have drawn above the idle machine.

A reading ends an interval. Its energy above idle is divided by the seconds that engines spent in steps during it; each engine charges its
own seconds. A step itself reads no counter.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from tinyvllm.energy.counters import Counters
from tinyvllm.energy.opening import open_counters
from tinyvllm.lazy_dataclass import dataclass

PERIOD = 0.05  # seconds between two readings while steps run
IDLE_PERIOD = 60.0  # while none runs: RAPL's counters wrap around after minutes at full power
IDLE_SECONDS = 0.25  # the shortest interval that says what the idle machine draws: about ten updates of a GPU's counter
MAX_WATTS = 20_000.0  # of one counter; more is a counter that was reset
MAX_DEFICIT = 1.0  # seconds of idle power that later intervals make up for, where one drew less than the idle machine
MAX_INTERVALS = 4096  # that an engine has not charged yet: three minutes of one step
log = logging.getLogger("tinyvllm")


@dataclass(frozen=True, slots=True)
class Interval:
    """What steps have drawn until `end` (seconds of the meter's clock): watts above idle while steps ran, and the idle machine's watts."""

    end: float
    watts: float
    idle_watts: float


class Account:
    """One engine's seconds in steps, and the intervals that it has not charged yet. One thread writes it."""

    def __init__(self, meter: Meter):
        self.intervals: deque[Interval] = deque(maxlen=MAX_INTERVALS)
        self.meter = meter
        self._read_seconds = 0.0  # in steps at the last reading; the meter writes it
        self._state: tuple[float, float | None] = (0.0, None)  # seconds of finished steps; when the running one began

    def step_started(self, now: float) -> None:
        self._state = (self._state[0], now)
        if self.meter.asleep:
            self.meter.wake()

    def step_finished(self, now: float) -> None:
        seconds, started = self._state
        self._state = (seconds + (0.0 if started is None else now - started), None)

    @property
    def in_step(self) -> bool:
        return self._state[1] is not None

    def take_seconds(self, now: float) -> float:
        """Seconds in steps since the last call until now, the running one included."""
        seconds, started = self._state
        if started is not None:
            seconds += max(0.0, now - started)
        since, self._read_seconds = seconds - self._read_seconds, seconds
        return max(0.0, since)


class Meter:
    """The counters of one machine and their readings. `read` may be called by any thread."""

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], object] = time.sleep):
        """Measures the idle machine first, which takes IDLE_SECONDS, if there is a counter."""
        self.counters, self.clock = counters, clock
        self.joules = {counter.name: 0.0 for counter in counters.open}  # of the whole machine since the start
        self.idle_watts = 0.0  # of the counters that are open
        self.asleep = False
        self._accounts: list[Account] = []
        self._lock = threading.Lock()
        self._work, self._closed = threading.Event(), threading.Event()
        self._last = clock()  # the last reading
        self._deficit = 0.0  # joules, 0 or less
        self._idle: dict[str, float] = {}  # watts of each counter, of the idle interval that drew the least
        self._thread: threading.Thread | None = None
        if self.measures:
            counters.read()
            self._last = clock()
            sleep(IDLE_SECONDS)
            self.read()

    @property
    def measures(self) -> bool:
        return bool(self.counters.open)

    def account(self) -> Account:
        """A new account; the meter is its own until `remove`."""
        account = Account(self)
        with self._lock:
            self._accounts.append(account)
        return account

    def remove(self, account: Account) -> int:
        """Forget an account; the number of those that remain."""
        with self._lock:
            self._accounts.remove(account)
            return len(self._accounts)

    def read(self) -> None:
        """End an interval: charge it to the accounts if steps ran, else take it as a measurement of the idle machine."""
        with self._lock:
            self._read(idle=False)

    def _read(self, idle: bool) -> None:
        now = self.clock()
        elapsed = now - self._last
        if elapsed <= 0:
            return
        self._last = now
        measured = self._plausible(self.counters.read(), elapsed)
        joules = sum(measured.values())
        in_steps = 0.0 if idle else sum(account.take_seconds(now) for account in self._accounts)
        if in_steps <= 0:
            if elapsed >= IDLE_SECONDS and (not self._idle or joules / elapsed < self.idle_watts):
                self._idle = {name: value / elapsed for name, value in measured.items()}
                self.idle_watts = joules / elapsed
            return
        above = joules - self.idle_watts * elapsed + self._deficit
        self._deficit = max(min(0.0, above), -MAX_DEFICIT * self.idle_watts)
        interval = Interval(now, max(0.0, above) / in_steps, self.idle_watts)
        for account in self._accounts:
            account.intervals.append(interval)

    def _plausible(self, joules: dict[str, float], elapsed: float) -> dict[str, float]:
        """Joules by counter, without those that have failed or were reset: that is the end of them, and of their idle watts."""
        for name, value in joules.items():
            if value > MAX_WATTS * max(1.0, elapsed):
                self.counters.fail(name, f"{name} counted {value:.0f} J in {elapsed:.2f} s: it was reset, as by a driver that was reloaded")
        joules = {counter.name: joules[counter.name] for counter in self.counters.open}
        for name, value in joules.items():
            self.joules[name] += value
        self._idle = {name: watts for name, watts in self._idle.items() if name in joules}
        self.idle_watts = sum(self._idle.values())
        return joules

    # ---- the thread ----

    def start(self) -> None:
        """Read in the background from now on, until `close`."""
        if self.measures and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tinyvllm-energy", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread and close the counters."""
        self._closed.set()
        self._work.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self.counters.close()

    def wake(self) -> None:
        """A step begins while the thread sleeps."""
        self._work.set()

    def _run(self) -> None:
        while not self._closed.wait(PERIOD):
            self.read()
            self._work.clear()
            self.asleep = True  # before the look at the accounts: a step that begins now either is seen, or wakes the thread
            if self._closed.is_set() or any(account.in_step for account in list(self._accounts)):  # closed before `clear`, perhaps
                self.asleep = False
                continue
            woken = self._work.wait(IDLE_PERIOD)
            self.asleep = False
            if not self._closed.is_set():
                with self._lock:
                    self._end_pause(woken)

    def _end_pause(self, woken: bool) -> None:
        """The pause was idle if it was long. The step that ended it runs for microseconds so far, which the next interval has."""
        if not woken or self.clock() - self._last >= IDLE_SECONDS:
            self._read(idle=woken)


# By device, and GPUs from it on: the models of a server share a meter, or each would be charged all of the machine.
_open: dict[tuple[str, int], Meter] = {}
_opening = threading.Lock()


def open_account(device: str, gpus: int = 1) -> Account:
    """An account of this process's meter for a device, or for `gpus` GPUs from it on, which reads in the background from now on."""
    with _opening:
        meter = _open.get((device, gpus))
        if meter is None:
            meter = _open[device, gpus] = Meter(open_counters(device, gpus=gpus))
            for part, reason in meter.counters.not_measured.items():
                log.warning("energy: %s is not measured: %s", part, reason)
            meter.start()
        return meter.account()


def close_account(account: Account) -> None:
    """Forget an account, and close its meter if it was the last."""
    with _opening:
        if account.meter.remove(account) == 0:
            account.meter.close()
            for key in [key for key, meter in _open.items() if meter is account.meter]:
                del _open[key]
