"""What came in and what was done with it, one JSON object a line, so that a run can be run again (replay.py).

    {"format": 1, ...}                                the engine: configuration, model, versions
    {"add": id, "step", "t", "prompt", "params", "terms"}   a request as the engine took it, its drawn seed among the parameters
    {"refused": id, "step", "t", "why"}               one that it did not take
    {"abort": id, "step"}
    {"hold": c, "step", "held", "tokens", "salt"}   a segment's blocks were to be held; its tokens where it is tried for the first time
    {"release": c, "step"}   a segment that was held gave them up
    {"step", "run": [n, index, start, tokens, ...], "rounds", "t"}   who computed what; n is the number of the request's `add` line
    {"step", "on": rounds}                            the same again: all of the last step's decodes, each as many tokens on
    {"step", "swap": true}, {"step", "expired": [n, ...], "t"}   what times have decided
    {"end": id, "step", "tokens": [[...], ...], "reasons": [...], "chain"}   a request is over; the chain is a hash of all ends so far

`step` counts calls of Engine.step: what came between two has the number of the later one. `t` is in seconds of the engine's clock.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tinyvllm.config import VERSION, EngineConfig
from tinyvllm.errors import OutputError
from tinyvllm.request import BeamSearchParams, RequestOptions, SamplingParams
from tinyvllm.scheduler import Schedule

FORMAT = 1
Event = dict[str, Any]
SWITCHES = ("TINYVLLM_KERNELS", "TINYVLLM_THREADS", "TINYVLLM_AUTOTUNE")  # that may change a token or how the work is cut


class Recorder:
    """Turns what the engine tells it into events and hands each to `write`."""

    def __init__(self, write: Callable[[Event], None]):
        self._write = write
        self._step = 0
        self._numbers: dict[str, int] = {}  # of the requests that run: their add lines, counted
        self._added = 0
        self._tried: set[int] = set()  # segments whose tokens are written down
        self._decodes: list[int] | None = None  # what the next step is, if everybody just goes on
        self._read: float | None = None  # the clock, as the scheduler read it last in this step
        self._chain = hashlib.blake2b(digest_size=8)

    def watched(self, clock: Callable[[], float]) -> Callable[[], float]:
        """The clock for the scheduler. What it has read decides who is late, so it belongs to the record."""

        def read() -> float:
            self._read = clock()
            return self._read

        return read

    def begin_step(self) -> None:
        self._step += 1
        self._read = None

    def added(
        self, request_id: str, prompt: list[int], params: SamplingParams | BeamSearchParams, options: RequestOptions, arrival: float
    ) -> None:
        """The engine has taken a request; `params` are those that it runs with."""
        self._numbers[request_id], self._added = self._added, self._added + 1
        self._decodes = None
        event = {
            "add": request_id,
            "step": self._step,
            "t": arrival,
            "prompt": prompt,
            "params": changed(params),
            "terms": changed(options),
        }
        if isinstance(params, BeamSearchParams):
            event["beams"] = True
        elif params.logits_processors:
            event["functions"] = "logits_processors"  # no text holds them
        self._write(event)

    def refused(self, request_id: str, why: str, now: float) -> None:
        self._write({"refused": request_id, "step": self._step, "t": now, "why": why})

    def aborted(self, request_id: str) -> None:
        """Only of a request that runs."""
        self._write({"abort": request_id, "step": self._step})

    def tried(self, segment: int, token_ids: list[int], salt: str | None, held: bool) -> None:
        """The blocks of a segment of this number were to be held. Also a failure belongs to the record: the look-up counts as a use."""
        event: Event = {"hold": segment, "step": self._step, "held": held}
        if segment not in self._tried:
            self._tried.add(segment)
            event |= {"tokens": token_ids} | ({} if salt is None else {"salt": salt})
        self._write(event)

    def released(self, segment: int) -> None:
        self._tried.discard(segment)
        self._write({"release": segment, "step": self._step})

    def settled(self, schedule: Schedule) -> None:
        """What a new schedule has taken from whom, before anything runs."""
        if schedule.swap_out:
            self._write({"step": self._step, "swap": True})
        if schedule.expired:
            numbers = sorted({self._numbers.get(sequence.request_id, -1) for sequence in schedule.expired})
            self._write({"step": self._step, "expired": numbers, "t": self._read})

    def launched(self, schedule: Schedule, rounds: int = 1) -> None:
        """A schedule runs, `rounds` times over."""
        run: list[int] = []
        decodes = True
        for entry in schedule.entries:
            sequence = entry.sequence
            run += (self._numbers.get(sequence.request_id, -1), sequence.index, entry.start, entry.num_tokens)
            decodes = decodes and entry.num_tokens == entry.num_logits == 1
        same = run == self._decodes
        event: Event = {"step": self._step, "on": rounds} if same else {"step": self._step, "run": run}
        if rounds != 1 and not same:
            event["rounds"] = rounds
        if self._read is not None:
            event["t"] = self._read
        self._write(event)
        self._decodes = onward(run, rounds) if decodes else None

    def finished(self, request_id: str, results: Iterable[tuple[list[int], str | None]]) -> None:
        """A request is over: tokens and reason of every continuation that ran."""
        self._numbers.pop(request_id, None)
        tokens, reasons = [], []
        for ids, reason in results:
            tokens.append(ids)
            reasons.append(reason)
        self._chain.update(json.dumps([request_id, tokens, reasons]).encode())
        self._write({"end": request_id, "step": self._step, "tokens": tokens, "reasons": reasons, "chain": self._chain.hexdigest()})


def onward(run: list[int], rounds: int) -> list[int]:
    """A step's run, when each of its decodes has gone on by so many tokens."""
    later = run.copy()
    later[2::4] = [start + rounds for start in run[2::4]]
    return later


def record_to(path: str, header: Event) -> Recorder:
    """A recorder into a new file. OutputError if it is there already, or cannot be written.

    A disk that fills up later ends the record, with a word on stderr, and not the run.
    """
    target = Path(path).expanduser()
    if target.exists() and target.stat().st_size:
        raise OutputError(f"record: {path} is there already; move it away or name another file")
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
            print(f"tinyvllm: record: {path} ends here, the run goes on: {error.strerror or error}", file=sys.stderr)
            try:
                file.close()
            except OSError:
                pass  # what is buffered is what could not be written

    write(header)
    return Recorder(write)


def header_of(config: EngineConfig, num_blocks: int, dtype: str, model: Mapping[str, Any], tensors: Mapping[str, Any]) -> Event:
    """The first line. `num_blocks` and `dtype` are what the engine came to; `model` and `tensors` the checkpoint's description and data."""
    # the blocks stand for what sized them; max_model_len stays as it was given, as positions of some models depend on it
    settings = dataclasses.asdict(config) | {"num_blocks": num_blocks, "kv_memory": None, "record": None}
    return {
        "format": FORMAT,
        "config": settings,
        "dtype": dtype,
        "fingerprint": fingerprint(model, tensors),
        "switches": {name: os.environ[name] for name in SWITCHES if name in os.environ},
        "versions": {"tinyvllm": VERSION, "python": platform.python_version()}
        | {name: version(name) for name in ("tinygrad", "numpy")},
    }


def fingerprint(model: Mapping[str, Any], tensors: Mapping[str, Any]) -> str:
    """A hash of a checkpoint's description and of each tensor's name, format, shape and first bytes: a page of each is read, no more."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(model, sort_keys=True, default=str).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.format} {tuple(tensor.shape)}".encode())
        digest.update(tensor.data.reshape(-1)[:64].tobytes())
    return digest.hexdigest()


def changed(params: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not as by default, as JSON knows them; functions are left out."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if field.name == "logits_processors" or value == field.default:
            continue
        if dataclasses.is_dataclass(value):
            value = changed(value)
        elif isinstance(value, tuple):
            if not value:
                continue
            value = list(value)
        found[field.name] = value
    return found
