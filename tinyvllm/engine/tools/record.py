"""Recording of traffic: what an engine got and what it did, one JSON object a line, so that replay.py can run it again.

    {"format": 2, ...}                                the engine: configuration, model, versions
    {"add": id, "step", "t", "prompt", "params", "options"}   a request as the engine runs it, its drawn seed among the parameters
    {"refused": id, "step", "t", "why"}               a request that the scheduler refused
    {"abort": id, "step"}
    {"hold": s, "step", "held", "tokens", "salt"}     the blocks of segment s were looked up to be held; its tokens at the first try
    {"release": s, "step"}                            segment s gave its blocks up
    {"step", "run": [n, index, start, tokens, ...], "rounds", "t"}   the entries of a schedule; n is the number of the request's `add` line
    {"step", "run": [...], "drafts": {i: [...]}}      entry i of the schedule has these drafts; they count among its tokens
    {"step", "on": rounds}                            the last step again: all of its decodes, each `rounds` tokens further
    {"step", ..., "ahead": true}                      this step was launched before the tokens of the one before it were read
    {"step", "swap": true}, {"step", "expired": [n, ...], "t"}   decisions that depended on times
    {"step", "chunks": tokens}                        from here on, what the rates allow the chunks of a step with decodes
    {"end": id, "step", "tokens": [[...], ...], "reasons": [...], "chain"}   the end of a request; the chain is a hash of all ends so far

`step` counts calls of Engine.step: events between two calls have the number of the later one. `t` is in seconds of the engine's clock.
Format 1 has "terms" for "options", and "thinking" for the parameter "reasoning"; replay reads it too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tinyvllm.config.engine import EngineConfig
from tinyvllm.config.values import expand_home
from tinyvllm.engine.beam import BeamState
from tinyvllm.engine.observer import Clock, EngineObserver
from tinyvllm.engine.output import ActiveRequest
from tinyvllm.errors import OutputError, TinyvllmError
from tinyvllm.request import BeamSearchParams, RequestOutput
from tinyvllm.scheduler import Schedule
from tinyvllm.version import VERSION
from tinyvllm.weights.checkpoint import Checkpoint
from tinyvllm.weights.identity import weights_digest

if TYPE_CHECKING:
    from tinyvllm.runner.runner import Runner

FORMAT = 2
Event = dict[str, Any]
SWITCHES = ("TINYVLLM_KERNELS", "TINYVLLM_THREADS", "TINYVLLM_AUTOTUNE")  # that may change a token or how the work is divided


class Recorder(EngineObserver):
    """Turns the events of an engine into recorded ones, and hands each to `write`; `close` is called after the last."""

    def __init__(self, write: Callable[[Event], None], close: Callable[[], None] = lambda: None):
        self._write, self._close = write, close
        self._step = 0
        self._numbers: dict[str, int] = {}  # of the requests that run: the number of their add lines
        self._num_added = 0
        self._tried: set[int] = set()  # segments whose tokens are written
        self._next_decodes: list[int] | None = None  # the next run, if it is the last one's decodes again
        self._max_chunk_tokens: int | None = None  # as written last
        self._clock_read: float | None = None  # the last time that the scheduler read in this step
        self._chain = hashlib.blake2b(digest_size=8)

    def engine_started(self, config: EngineConfig, runner: Runner) -> None:
        checkpoint = runner.checkpoint
        self._write(header_of(config, runner.pool.num_blocks, str(runner.dtype), runner.architecture, checkpoint))

    def engine_closed(self) -> None:
        self._close()

    def watch_clock(self, clock: Clock) -> Clock:
        """The clock for the scheduler. Its readings decide which requests are late, so they are part of the recording."""

        def read() -> float:
            self._clock_read = clock()
            return self._clock_read

        return read

    def step_started(self) -> None:
        self._step += 1
        self._clock_read = None

    def request_added(self, request: ActiveRequest) -> None:
        self._numbers[request.request_id], self._num_added = self._num_added, self._num_added + 1
        self._next_decodes = None
        params = request.params
        event = {
            "add": request.request_id,
            "step": self._step,
            "t": request.metrics.arrival,
            "prompt": request.prompt_token_ids,
            "params": changed_fields(params),
            "options": changed_fields(request.options),
        }
        if isinstance(params, BeamSearchParams):
            event["beams"] = True
        elif params.logits_processors:
            event["functions"] = "logits_processors"  # no text can hold them
        self._write(event)

    def request_refused(self, request: ActiveRequest, error: TinyvllmError) -> None:
        self._write({"refused": request.request_id, "step": self._step, "t": request.metrics.arrival, "why": str(error)})

    def request_aborted(self, request_id: str) -> None:
        self._write({"abort": request_id, "step": self._step})

    def segment_tried(self, number: int, token_ids: list[int], cache_salt: str | None, held: bool) -> None:
        event: Event = {"hold": number, "step": self._step, "held": held}
        if number not in self._tried:
            self._tried.add(number)
            event |= {"tokens": token_ids} | ({} if cache_salt is None else {"salt": cache_salt})
        self._write(event)

    def segment_released(self, number: int) -> None:
        self._tried.discard(number)
        self._write({"release": number, "step": self._step})

    def step_scheduled(self, schedule: Schedule) -> None:
        if schedule.max_chunk_tokens not in (None, self._max_chunk_tokens):
            self._max_chunk_tokens = schedule.max_chunk_tokens
            self._write({"step": self._step, "chunks": schedule.max_chunk_tokens})
        if schedule.swap_out:
            self._write({"step": self._step, "swap": True})
        if schedule.expired:
            numbers = sorted({self._numbers.get(sequence.request_id, -1) for sequence in schedule.expired})
            self._write({"step": self._step, "expired": numbers, "t": self._clock_read})

    def step_launched(self, schedule: Schedule, owners: Mapping[int, ActiveRequest], num_steps: int = 1) -> None:
        run: list[int] = []
        decodes_only = True
        for entry in schedule.entries:
            sequence = entry.sequence
            run += (self._numbers.get(sequence.request_id, -1), sequence.index, entry.start, entry.num_tokens)
            decodes_only = decodes_only and entry.is_decode
        repeated = run == self._next_decodes
        event: Event = {"step": self._step, "on": num_steps} if repeated else {"step": self._step, "run": run}
        if num_steps != 1 and not repeated:
            event["rounds"] = num_steps
        if drafts := {str(i): list(entry.drafts) for i, entry in enumerate(schedule.entries) if entry.drafts}:
            event["drafts"] = drafts
        if any(entry.start == len(entry.sequence) for entry in schedule.entries):  # its token is not known to the host
            event["ahead"] = True
        if self._clock_read is not None:
            event["t"] = self._clock_read
        self._write(event)
        self._next_decodes = advanced_run(run, num_steps) if decodes_only else None

    def request_finished(self, request: ActiveRequest, output: RequestOutput) -> None:
        """Token ids and reason of every continuation that ran: with best_of more than the output has, of beams those that it has."""
        self._numbers.pop(request.request_id, None)
        if isinstance(request, BeamState):
            ends = [(part.token_ids, part.finish_reason) for part in output.outputs]
        else:
            ends = [(sequence.output_token_ids, sequence.finish_reason) for sequence in request.sequences]
        tokens, reasons = [ids for ids, _ in ends], [reason for _, reason in ends]
        self._chain.update(json.dumps([request.request_id, tokens, reasons]).encode())
        self._write({"end": request.request_id, "step": self._step, "tokens": tokens, "reasons": reasons, "chain": self._chain.hexdigest()})


def advanced_run(run: list[int], num_steps: int) -> list[int]:
    """A step's run with each of its decodes `num_steps` tokens further."""
    later = run.copy()
    later[2::4] = [start + num_steps for start in run[2::4]]
    return later


def record_to(path: str) -> Recorder:
    """A recorder into a new file. OutputError if the file exists and is not empty, or cannot be written.

    A disk that is full later ends the recording, with a line on stderr, and not the run.
    """
    target = expand_home("record", path)
    if target.exists() and target.stat().st_size:
        raise OutputError(f"record: {path} exists already; move it away or name another file")
    try:
        file = open(target, "w", encoding="utf-8", buffering=1)  # noqa: SIM115  open as long as the engine; each line is written at once
    except OSError as error:
        raise OutputError(f"record: cannot write {path}: {error.strerror or error}") from error
    encode = json.JSONEncoder(separators=(",", ":")).encode

    def write(event: Event) -> None:
        if file.closed:
            return
        try:
            file.write(encode(event) + "\n")
        except OSError as error:
            print(f"tinyvllm: record: {path} ends here, the engine continues: {error.strerror or error}", file=sys.stderr)
            close()

    def close() -> None:
        with contextlib.suppress(OSError):  # what is still buffered could not be written
            file.close()

    return Recorder(write, close)


def header_of(config: EngineConfig, num_blocks: int, dtype: str, architecture: str, checkpoint: Checkpoint) -> Event:
    """The first line. The engine chose `num_blocks` and `dtype`; `architecture` is what computed the tokens."""
    # the number of blocks replaces what it was computed from; max_model_len stays as it was given: positions of some models depend on it
    from importlib.metadata import version  # it parses mail, which takes 10 ms

    settings = dataclasses.asdict(config) | {"num_blocks": num_blocks, "kv_memory": None, "record": None, "profile": None, "energy": False}
    for name in ("more_devices", "data_parallel_size", "data_parallel_rank"):
        del settings[name]
    settings["device"] = config.device_names
    return {
        "format": FORMAT,
        "config": settings,
        "dtype": dtype,
        "architecture": architecture,
        "weights": weights_digest(checkpoint),
        "switches": {name: os.environ[name] for name in SWITCHES if name in os.environ},
        "versions": {"tinyvllm": VERSION, "python": platform.python_version()} | {name: version(name) for name in ("tinygrad", "numpy")},
    }


def changed_fields(params: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, as JSON has them; functions are left out."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if field.name == "logits_processors" or value == field.default:
            continue
        if dataclasses.is_dataclass(value):
            value = changed_fields(value)
        elif isinstance(value, tuple):
            if not value:
                continue
            value = list(value)
        fields[field.name] = value
    return fields
