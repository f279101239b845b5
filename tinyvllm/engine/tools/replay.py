"""Replay of a recording: the same arrivals and aborts before the same steps, and the first difference between the results.

What depended on times is taken from the recording: the clock shows the recorded times, refused requests are not sent again, and blocks are
swapped in the recorded steps. Everything else is decided by the engine that runs now.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from collections.abc import Sequence as Row
from dataclasses import fields
from typing import Any

from tinyvllm.config.engine import EngineConfig, resolve
from tinyvllm.engine.engine import Engine
from tinyvllm.engine.segments import Segment
from tinyvllm.engine.tools.comparison import Outcome, compare
from tinyvllm.engine.tools.record import SWITCHES, Event, Recorder
from tinyvllm.engine.tools.recording import Run
from tinyvllm.errors import ArgumentError, RequestError, nearest
from tinyvllm.request import BeamSearchParams, LoRARequest, RequestOptions, SamplingParams, Sequence, StructuredOutputsParams
from tinyvllm.request.adapter import Adapter
from tinyvllm.scheduler import Rates
from tinyvllm.speculate.controller import FixedController
from tinyvllm.speculate.protocol import Draft, DraftRequest
from tinyvllm.speculative import MAX_DRAFTS
from tinyvllm.weights.identity import weights_digest

_BUDGETS = ("max_num_batched_tokens", "max_num_seqs", "num_blocks", "block_size", "max_model_len", "num_scheduler_steps")


def config_of(run: Run, overrides: dict[str, Any]) -> EngineConfig:
    """The recorded engine's configuration with some options overridden. ArgumentError for a recorded option that this version lacks."""
    settings = dict(run.header["config"])
    known = [f.name for f in fields(EngineConfig)]
    for name, value in list(settings.items()):
        if name not in known:
            hint = nearest(name, known)
            raise ArgumentError(f"replay: {run.path} was recorded with {name}={value!r}, which is not an option of this version{hint}")
    settings["speculative_config"] = settings.get("speculative_config") or "off"  # None asks for the default
    # the recording does not have the blocks that the folder had
    settings |= {"record": None, "profile": None, "energy": False, "prefix_cache_dir": None, "kv_events_config": None} | overrides
    if overrides.get("kv_memory") is not None and "num_blocks" not in overrides:
        settings["num_blocks"] = None
    return resolve(settings.pop("model"), **settings)


def replay(run: Run, config: EngineConfig, tokens_only: bool = False, remark: Callable[[str], None] = lambda text: None) -> Outcome:
    """Run it again and compare. With `tokens_only` the schedule may differ: then times do not count, and of a request that was aborted or
    late only the tokens that both runs have must agree.

    `remark` gets a line for each condition that differs from the recording. ArgumentError if the recording cannot be run: it has a request
    with logits processors (`tokens_only` skips it), or the model is not the recorded one.
    """
    skipped = [event["add"] for event in run.added if "functions" in event]
    if skipped and not tokens_only:
        raise ArgumentError(
            f"replay: request {skipped[0]} has logits processors, which cannot be recorded; --tokens-only skips it and compares the others"
        )
    events: list[Event] = []
    clock = _RecordedClock(run) if not tokens_only else time.monotonic
    engine = Engine(config, observers=[Recorder(events.append)], clock=clock)
    try:
        _check(run, engine, config, remark)
        if not tokens_only:
            _remark_budgets(run, engine, config, remark)
        if not tokens_only:
            engine.scheduler.rates = _RecordedRates()
            if engine.speculation is not None:
                engine.speculate(_RecordedDrafts(run, lambda: engine.loop.in_flight), FixedController(MAX_DRAFTS))
        _drive(run, _Arrivals(engine, clock, tokens_only, remark), tokens_only, lambda: sum("end" in event for event in events))
    finally:
        engine.close()
    return compare(run, events, tokens_only, skipped)


def _check(run: Run, engine: Engine, config: EngineConfig, remark: Callable[[str], None]) -> None:
    _check_context(run, engine)
    checkpoint = engine.runner.checkpoint
    recorded = run.header.get("weights")
    if recorded is None:
        remark("recorded before digests covered all of the weights: the model is not compared")
    elif weights_digest(checkpoint) != recorded:
        if config.model == run.header["config"]["model"]:
            raise ArgumentError(f"replay: {config.model} has changed since {run.path} was recorded; --model names another model")
        remark(f"another model than the recorded {run.header['config']['model']}")
    for name in ("device", "dtype"):
        now = str(engine.config.device_names if name == "device" else engine.runner.dtype)
        then = str(run.header["config"]["device"] if name == "device" else run.header.get("dtype"))
        if now != then:
            remark(f"{name} {now}, recorded with {then}")
    now, computed_by = engine.runner.architecture, run.header.get("architecture")
    if computed_by is not None and now != computed_by:
        remark(f"architecture {now}, recorded with {computed_by}: sums may be rounded in another order")
    switches = {name: os.environ[name] for name in SWITCHES if name in os.environ}
    if switches != run.header.get("switches"):
        remark(f"environment {switches or 'without switches'}, recorded with {run.header.get('switches') or 'none'}")
    if run.header["config"].get("prefix_cache_dir"):
        remark("recorded with a prefix cache from disk, which is empty here: the schedule may differ")
    if not run.complete:
        remark("the last line of the recording is cut off")


def _remark_budgets(run: Run, engine: Engine, config: EngineConfig, remark: Callable[[str], None]) -> None:
    """One line for the options that the schedule depends on and that are not the recorded ones."""
    differing = []
    for name in _BUDGETS:
        now = engine.scheduler.pool.num_blocks if name == "num_blocks" else getattr(config, name)
        then = run.header["config"].get(name, now)
        if now != then:
            differing.append(f"{name} {now} (recorded {then})")
    if differing:
        remark(f"the schedule may differ with {', '.join(differing)}; --tokens-only compares the tokens alone")


def _check_context(run: Run, engine: Engine) -> None:
    """ArgumentError for a request of the recording that is longer than the context or the KV cache of the engine."""
    room, scheduler = engine.max_model_len, engine.scheduler
    if scheduler.tables.most_blocks(room) > scheduler.pool.num_blocks:
        room = scheduler.tables.groups.num_tokens(scheduler.pool.num_blocks)
    lengths = {end["end"]: max(map(len, end["tokens"]), default=0) for end in run.ends}
    for event in run.added:
        needed = len(event["prompt"]) + lengths.get(event["add"], 0)
        if needed > room:
            raise ArgumentError(
                f"replay: request {event['add']} has {needed} tokens in the recording, and the engine has a context of "
                f"{room} tokens here; give it the recorded --num-blocks, --kv-memory and --max-model-len, or more"
            )


class _RecordedClock:
    """Shows the times of the recorded engine's clock. The loop that drives the engine sets `now`."""

    def __init__(self, run: Run):
        self._times = dict(run.times)
        self.now = run.added[0]["t"] if run.added else 0.0

    def set_step(self, step: int) -> None:
        self.now = self._times.get(step, self.now)

    def __call__(self) -> float:
        return self.now


class _RecordedDrafts:
    """Guesses what was guessed in the recorded step: what a drafter guesses may depend on measured times.

    With async_scheduling it is also asked after a launch whether the tokens of that step should be read before the next one is launched.
    They are read where they were: a sequence that ends in the step has a row in the next one or not.
    """

    method, looks_up = "recorded", True

    def __init__(self, run: Run, in_flight: Callable[[], bool]):
        self._drafts, self._ahead, self._in_flight, self.step = run.drafts, run.ahead, in_flight, 0
        self._numbers = {event["add"]: n for n, event in enumerate(run.added)}

    def propose(self, requests: Row[DraftRequest]) -> list[Draft]:
        if self._in_flight():
            reads = self.step + 1 not in self._ahead
            return [Draft([0] if reads else []) for _ in requests]
        keys = [(self.step, self._numbers.get(r.sequence.request_id, -1), r.sequence.index) for r in requests]
        return [Draft(list(self._drafts.get(key, ()))) for key in keys]

    def observe(self, sequence: Sequence, num_new: int) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass


class _RecordedRates(Rates):
    """Rates by which a swap costs nothing while `swaps` is set and too much otherwise, and by which no request would be late.

    `chunk_tokens` is what was allowed the chunks of steps with decodes; None, as in recordings of versions without a target, is no limit.
    """

    swaps = False
    chunk_tokens: int | None = None

    def max_chunk_tokens(self, seconds: float, budget: int) -> int:
        return budget if self.chunk_tokens is None else min(budget, self.chunk_tokens)

    @property
    def prefill_token(self) -> float | None:
        return math.inf if self.swaps else 0.0

    @property
    def decode_step(self) -> float | None:
        return 0.0

    def certain_prefill_token(self, tokens: int) -> float:
        return 0.0

    @property
    def certain_decode_step(self) -> float:
        return 0.0


def _drive(run: Run, arrivals: _Arrivals, tokens_only: bool, num_ended: Callable[[], int]) -> None:
    """Step through the recording. Another schedule may need more steps: then until as many requests have ended as in the recording."""
    engine, clock = arrivals.engine, arrivals.clock
    late: dict[int, list[str]] = {}
    for event in run.ends if tokens_only else ():
        if "deadline" in event["reasons"]:
            late.setdefault(event["step"], []).append(event["end"])
    step = 0
    waiting = iter(run.arrivals)
    arrival = next(waiting, None)
    while arrival is not None or step < run.last_step or (engine.has_work() and (tokens_only or num_ended() < len(run.ends))):
        while arrival is not None and arrival["step"] <= step:
            arrivals.apply(arrival)
            arrival = next(waiting, None)
        step += 1
        for request_id in late.get(step, ()):
            engine.abort(request_id)
        if isinstance(clock, _RecordedClock):
            clock.set_step(step)
        if engine.speculation is not None and isinstance(engine.speculation.drafter, _RecordedDrafts):
            engine.speculation.drafter.step = step
        rates = engine.scheduler.rates
        if isinstance(rates, _RecordedRates):
            rates.swaps = step in run.swapped
            rates.chunk_tokens = run.max_chunk_tokens.get(step, rates.chunk_tokens)
        engine.step()
        if isinstance(rates, _RecordedRates):
            rates.swaps = False  # between steps they predict which requests would be late


class _Arrivals:
    """Applies the recorded arrivals to the engine that runs now."""

    def __init__(self, engine: Engine, clock: Callable[[], float], tokens_only: bool, remark: Callable[[str], None]):
        self.engine, self.clock = engine, clock
        self._tokens_only, self._remark = tokens_only, remark
        self._tried: dict[int, Event] = {}  # the first event of each segment that is not held yet: it has the tokens
        self._segments: dict[int, Segment] = {}

    def apply(self, event: Event) -> None:
        if "abort" in event:
            self.engine.abort(event["abort"])
        elif "add" in event and "functions" not in event:
            self._add(event)
        elif "hold" in event:
            self._hold(event)
        elif "release" in event and (segment := self._segments.pop(event["release"], None)) is not None:
            segment.release()

    def _add(self, event: Event) -> None:
        if isinstance(self.clock, _RecordedClock):
            self.clock.now = event["t"]
        options = dict(event["options"])
        if self._tokens_only:
            options = {name: value for name, value in options.items() if "deadline" not in name}
        if "adapter" in options:
            options["adapter"] = self._adapter(options["adapter"])
        try:
            self.engine.add(event["add"], list(event["prompt"]), _params(event), None, RequestOptions(**options))
        except RequestError as error:
            raise ArgumentError(f"replay: the recorded {error}") from error

    def _adapter(self, recorded: Event) -> Adapter:
        """The recorded adapter, loaded from where it was. ArgumentError if its content has changed."""
        adapter = self.engine.adapters.use(LoRARequest(recorded["name"], lora_path=recorded["path"]))
        if adapter.digest != recorded["digest"]:
            raise ArgumentError(f"replay: the adapter at {recorded['path']!r} has changed since the recording")
        return adapter

    def _hold(self, event: Event) -> None:
        """One try, as in the recording. With other limits its result may differ; then there is a remark, and the run continues."""
        number, segments, held = event["hold"], self.engine.segments, False
        first = self._tried.setdefault(number, event)
        with contextlib.suppress(RequestError):  # too many blocks, or no prefix cache
            segment = segments.new(first["tokens"], [], None, first.get("salt"))
            if held := segments.hold(segment):
                self._segments[number] = segment
        if held != event["held"]:
            words = ("is not held", "was") if event["held"] else ("is held", "was not")
            self._remark(f"segment {number} {words[0]} before step {event['step'] + 1}, and {words[1]} in the recording")
        if event["held"]:
            del self._tried[number]


def _params(event: Event) -> SamplingParams | BeamSearchParams:
    fields = dict(event["params"])
    if event.get("beams"):
        return BeamSearchParams(**fields)
    if fields.get("logit_bias"):
        fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    if fields.get("structured_outputs"):
        fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
    return SamplingParams(**fields)
