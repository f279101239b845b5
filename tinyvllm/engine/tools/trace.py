"""A trace of an engine's steps for Perfetto and Chrome: phases on the host, kernels on the device, requests as flows, memory.

Events are those of the Trace Event Format (Google, "Trace Event Format", 2016), times in microseconds since the trace began. The trace has
no text and no tokens of requests. Thread 1 has the steps and their phases, 2 arrivals and ends of requests, 3 the kernels of sampled steps.
A request is an async slice, and a flow from its arrival over each chunk of its prompt and its first decode to its end.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from tinyvllm.engine.observer import LAUNCH_ENDED, LAUNCH_STARTED, MAX_MARKS, EngineObserver, Marks
from tinyvllm.engine.output import ActiveRequest
from tinyvllm.engine.tools.kernel_table import KernelRoof, KernelTable
from tinyvllm.engine.tools.step_slices import StepNote, StepSlices
from tinyvllm.engine.tools.trace_output import TraceOutput
from tinyvllm.request import RequestOutput
from tinyvllm.runner.kernel_timing import KernelTime, KernelTimer, start_timing, stop_timing
from tinyvllm.scheduler import Schedule, Scheduler

if TYPE_CHECKING:
    from tinyvllm.runner.runner import Runner

SAMPLE_EVERY = 64  # steps at least, of which one has its kernels timed
SAMPLE_EVERY_GPU = 512  # where a sampled step runs its kernels one by one
SAMPLE_SHARE = 0.001  # of the time at most is spent on the kernels of sampled steps: short steps are sampled less often
COUNTER_SECONDS = 0.1  # between two readings of the memory
FLUSH_SECONDS = 1.0
FLUSH_EVENTS = 4096
SHORT_STEP = 0.001  # seconds: of shorter steps WITH_PHASES in a row have their phases, and then WITHOUT are one slice together
WITH_PHASES, WITHOUT = 2, 126
FORMAT_STEPS = 256  # whose texts are made together, a tenth of a second's at most
MAX_ID = 64  # characters of a request's id
_PHASES = {LAUNCH_STARTED: "prepare", LAUNCH_ENDED: "launch", "run": "wait"}  # what ends there
_STEPS, _REQUESTS, _KERNELS = 1, 2, 3  # threads of the trace


class StepTrace(EngineObserver):
    """Writes the events of an engine's steps to `output`, until `close`, or until `max_steps` have run: then it calls `on_end` once."""

    def __init__(
        self,
        output: TraceOutput,
        runner: Runner,
        scheduler: Scheduler,
        roof: KernelRoof,
        max_steps: int | None = None,
        on_end: Callable[[], None] = lambda: None,
    ):
        self.table = KernelTable(roof)
        self.num_steps = 0
        self._output, self._runner, self._scheduler, self._roof = output, runner, scheduler, roof
        self._max_steps, self._on_end = max_steps, on_end
        self._sample_every = SAMPLE_EVERY_GPU if runner.overlaps else SAMPLE_EVERY
        self._until_sample, self._sample_after = 0, 0.0  # steps, and a time: the next sample is after both
        self._timer = KernelTimer()
        self._sampling = False  # the next step's kernels are timed
        self._start = time.perf_counter()
        self._count_at, self._flush_at = self._start, self._start + FLUSH_SECONDS  # when the memory is read, and events are written
        self.marks = Marks()  # of steps that are no text yet
        self._notes: list[StepNote] = []  # of these, but for the steps since `steps_marked` and those that raised
        self._asked_at, self._asked = self._start, 0  # when, and steps until the next call of `steps_marked`
        self._batches: list[tuple[int, StepNote]] = []  # that came since its last call, and after how many steps
        self._note = StepNote(0, 0, False)  # of the batch before them
        self._schedule: Schedule | None = None  # the last one
        self._slices = StepSlices(_STEPS, self._start, _PHASES)
        self._flows: dict[ActiveRequest, int] = {}  # of requests that run
        self._decoding: set[int] = set()  # flows that had their first decode
        self._num_flows = 0
        self._events = [_name(thread, name) for thread, name in ((_STEPS, "steps"), (_REQUESTS, "requests"), (_KERNELS, "kernels"))]

    def close(self) -> None:
        """Write what is left."""
        self._stop_sampling()
        if self.marks.steps:
            self._count_steps()
        else:
            self._end_run(time.perf_counter())
        self._format_steps()
        self._flush()
        self._output.close()

    def engine_closed(self) -> None:
        self.close()

    # ---- steps ----

    def step_scheduled(self, schedule: Schedule) -> None:
        """Other rows: this step and the next ones have their phases, as they may take longer than those before."""
        marks = self.marks
        if not marks.steps:
            now = time.perf_counter()
            self._end_run(now)
            marks.steps = True
            marks += ("step", now)
        if not marks.phases:
            marks.phases = True
            fewer = max(0, marks.left - WITH_PHASES)
            self._asked -= fewer
            marks.left -= fewer

    def batch_changed(self, schedule: Schedule, owners: Mapping[int, ActiveRequest]) -> None:
        note = StepNote(schedule.num_tokens, len(schedule.entries), False)
        self._batches.append((self._asked - self.marks.left, note))
        self._schedule = schedule
        self._follow_requests(schedule, owners)

    def steps_marked(self) -> None:
        since = self._asked_at
        if self.marks.steps:
            now = float(self.marks[-1]) if self.marks else time.perf_counter()
            num_steps = self._count_steps()
        else:
            now = time.perf_counter()
            num_steps = self._end_run(now)
        if self._sampling:
            self._take_sample(now)
        ends = self.num_steps == self._max_steps
        are_many = len(self._notes) >= FORMAT_STEPS or len(self.marks) > MAX_MARKS
        if ends or (self.marks and (are_many or now > self._count_at)):
            self._format_steps()
            self._write_due(now)
            if ends or self._output.full:
                on_end, self._on_end = self._on_end, lambda: None
                on_end()
                return
        self._ask(now, now - since < SHORT_STEP * num_steps)

    def _ask(self, now: float, are_short: bool) -> None:
        """Choose after how many steps, or when, the next call comes: after the next one, if its kernels are timed. `are_short`: the steps
        since the last choice.
        """
        self._sampling = self._until_sample <= 0 and now >= self._sample_after
        count, until = FORMAT_STEPS - len(self._notes), self._count_at
        if self._sampling:
            count = 1
            self._timer.spent = 0.0
            start_timing(self._timer)
        elif self._until_sample > 0:
            count = min(count, self._until_sample)
        else:
            until = min(until, self._sample_after)
        if self._max_steps is not None:
            count = max(1, min(count, self._max_steps - self.num_steps))
        self.marks.phases = not (are_short and self.marks.phases) or self._sampling
        self.marks.steps = self.marks.phases or not are_short
        if are_short:
            count = min(count, WITH_PHASES if self.marks.phases else WITHOUT)
        self._asked_at, self._asked = now, count
        self.marks.left, self.marks.until = count, until

    def _end_run(self, now: float) -> int:
        """Make a slice of the steps without marks that have ended since the last call or choice; how many they are."""
        count = self._asked - self.marks.left
        if count:
            about = f'{{"steps":{count},"rows":{self._note.rows},"sequences":{self._note.sequences}}}'
            self._events.append(self._slice(_STEPS, "steps", self._asked_at, now, about))
        self._asked, self._asked_at = self.marks.left, now
        self.num_steps += count
        self._until_sample -= count
        return count

    def _end_run_with_step(self) -> None:
        """The step that runs is the last one of its slice: the engine may be idle after it."""
        fewer = max(0, self.marks.left - 1)
        self._asked -= fewer
        self.marks.left -= fewer

    def _count_steps(self) -> int:
        """Count the steps that have ended since the last call, and note the batch of each."""
        count, done = self._asked - self.marks.left, 0
        self._asked = self.marks.left
        self.num_steps += count
        self._until_sample -= count
        for before, note in self._batches:
            self._notes += [self._note] * (before - done)
            self._note, done = note, before
        self._notes += [self._note] * (count - done)
        self._batches = []
        if self._sampling and count:
            self._notes[-1] = self._note._replace(sampled=True)
        return count

    def _format_steps(self) -> None:
        """Make texts of the steps since the last call. A step that raised has no end, and no text."""
        if self._notes:
            self._events += self._slices.texts(self.marks, self._notes)
            self._notes = []
        self.marks.clear()

    def _write_due(self, now: float) -> None:
        if now > self._count_at:
            self._count_at = now + COUNTER_SECONDS
            self._count_memory(now)
        if now > self._flush_at or len(self._events) > FLUSH_EVENTS:
            self._flush_at = now + FLUSH_SECONDS
            self._flush()

    def _take_sample(self, now: float) -> None:
        """The kernels that ran in this step. One without a captured step, as at the first use of a shape, leaves the next to be sampled."""
        times, spent = self._stop_sampling(), self._timer.spent
        if not times:
            return
        began, self._until_sample = time.perf_counter(), self._sample_every - 1
        self.table.num_steps += 1
        attention = self._attention_bytes()
        for kernel in times:
            stem = "_".join(kernel.name.split("_")[:2])
            nbytes = kernel.nbytes or (int(next(attention[stem], 0)) if stem in attention else 0)
            self.table.add(kernel.name, kernel.seconds, nbytes, kernel.flops)
            rate, flops = (nbytes / kernel.seconds, kernel.flops / kernel.seconds) if kernel.seconds > 0 else (0.0, 0.0)
            share, bound = self._roof.share(kernel.seconds, nbytes, kernel.flops)
            arguments = (
                f'{{"bytes":{nbytes},"GB/s":{rate / 1e9:.2f},"FLOP":{kernel.flops},"GFLOP/s":{flops / 1e9:.2f},'
                f'"of roof":{share:.3f},"bound":"{bound}"}}'
            )
            self._events.append(self._slice(_KERNELS, kernel.name, kernel.start, kernel.start + kernel.seconds, arguments))
        self._sample_after = now + (spent + time.perf_counter() - began) / SAMPLE_SHARE

    def _stop_sampling(self) -> list[KernelTime]:
        stop_timing(self._timer)
        times, self._timer.times = self._timer.times, []
        return times

    def _attention_bytes(self) -> dict[str, Iterator[float]]:
        """Keys and values that the attention of each layer reads in the last step, by the stem of its kernel.

        No plan can know them: contexts grow without a new capture.
        """
        tokens, windows = self._runner.kv_bytes_by_layer, self._runner.windows
        lengths: dict[str, list[tuple[int, int]]] = {"attention_decode": [], "attention_prefill": []}
        for entry in self._schedule.entries if self._schedule else ():
            stem = "attention_decode" if entry.num_tokens == 1 or entry.drafts else "attention_prefill"
            lengths[stem].append((entry.start + entry.num_tokens, entry.num_tokens))

        def layers(stem: str) -> Iterator[float]:
            for window, token in zip(windows, tokens, strict=True):
                yield sum(min(context, window - 1 + count) if window else context for context, count in lengths[stem]) * token

        return {stem: layers(stem) for stem in lengths}

    # ---- requests ----

    def request_added(self, request: ActiveRequest) -> None:
        flow = self._flow_of(request)
        now = time.perf_counter()
        self._events.append(self._slice(_REQUESTS, "arrival", now, now + 1e-6))
        self._link(flow, "s", _REQUESTS, now)

    def request_aborted(self, request_id: str) -> None:
        """Between two steps: the engine may be idle from now on."""
        if not self.marks.steps:
            self._end_run(time.perf_counter())

    def request_finished(self, request: ActiveRequest, output: RequestOutput) -> None:
        if not self.marks.steps:
            self._end_run_with_step()
        flow = self._flow_of(request)
        now, reasons = time.perf_counter(), [part.finish_reason for part in output.outputs]
        tokens = sum(len(sequence.output_token_ids) for sequence in request.sequences)
        arguments = json.dumps(
            {"output_tokens": tokens, "cached_tokens": output.num_cached_tokens, "reason": reasons[0] if reasons else None}
        )
        self._events.append(self._slice(_REQUESTS, "end", now, now + 1e-6))
        self._link(flow, "f", _REQUESTS, now)
        self._mark(flow, "e", "request", now, arguments)
        del self._flows[request]
        self._decoding.discard(flow)

    def _flow_of(self, request: ActiveRequest) -> int:
        """Its number; one that is new, also one that runs since before the trace, becomes an async slice."""
        if request not in self._flows:
            self._num_flows += 1
            self._flows[request] = self._num_flows
            arguments = json.dumps({"id": request.request_id[:MAX_ID], "prompt_tokens": len(request.prompt_token_ids)})
            self._mark(self._num_flows, "b", "request", time.perf_counter(), arguments)
        return self._flows[request]

    def _follow_requests(self, schedule: Schedule, owners: Mapping[int, ActiveRequest]) -> None:
        now = time.perf_counter()
        for entry in schedule.entries:
            owner = owners.get(entry.sequence.sequence_id)
            if owner is None:
                continue  # it has ended: of a schedule from before the trace
            known, flow = owner in self._flows, self._flow_of(owner)
            decode = entry.is_decode or bool(entry.drafts)
            if decode and flow in self._decoding and known:
                continue
            if decode:
                self._decoding.add(flow)
            name = "first decode" if decode else "prefill chunk"
            self._mark(flow, "n", name, now, f'{{"start":{entry.start},"tokens":{entry.num_tokens}}}')
            self._link(flow, "t" if known else "s", _STEPS, now)

    # ---- events ----

    def _at(self, seconds: float) -> str:
        return f"{1e6 * (seconds - self._start):.3f}"

    def _slice(self, thread: int, name: str, start: float, end: float, arguments: str = "{}") -> str:
        return (
            f'{{"ph":"X","pid":1,"tid":{thread},"name":{_quoted(name)},"ts":{1e6 * (start - self._start):.3f},'
            f'"dur":{max(0.0, 1e6 * (end - start)):.3f},"args":{arguments}}}'
        )

    def _link(self, flow: int, kind: str, thread: int, now: float) -> None:
        bind = ',"bp":"e"' if kind == "f" else ""
        self._events.append(
            f'{{"ph":"{kind}","pid":1,"tid":{thread},"cat":"request","name":"request","id":{flow},"ts":{self._at(now)}{bind}}}'
        )

    def _mark(self, flow: int, kind: str, name: str, now: float, arguments: str) -> None:
        self._events.append(
            f'{{"ph":"{kind}","pid":1,"tid":{_REQUESTS},"cat":"request","name":"{name}","id":{flow},"ts":{self._at(now)},"args":{arguments}}}'
        )

    def _count_memory(self, now: float) -> None:
        pool = self._scheduler.pool
        used, cached = pool.num_blocks - pool.num_free, pool.num_evictable
        at = self._at(now)
        self._events.append(f'{{"ph":"C","pid":1,"name":"KV blocks","ts":{at},"args":{{"used":{used},"cached":{cached}}}}}')
        if (resident := resident_bytes()) is not None:
            self._events.append(f'{{"ph":"C","pid":1,"name":"RSS","ts":{at},"args":{{"MB":{resident / 1e6:.1f}}}}}')

    def _flush(self) -> None:
        events, self._events = self._events, []
        self._output.write(events)


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM; None where the system does not say it cheaply."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read(256).split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _name(thread: int, name: str) -> str:
    return f'{{"ph":"M","pid":1,"tid":{thread},"name":"thread_name","args":{{"name":"{name}"}}}}'


def _quoted(name: str) -> str:
    return f'"{name}"' if name.isascii() and name.replace("_", "").replace(" ", "").isalnum() else json.dumps(name)
