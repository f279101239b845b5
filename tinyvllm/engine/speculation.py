"""Asks a drafter for drafts, on its own terms: whatever it returns or raises, no request is harmed.

What comes back is checked before it reaches the scheduler. A drafter or a controller that raises, breaks its contract or is far too slow is
switched off for good, with one warning; bad tokens in a draft end that draft.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from operator import index
from typing import TYPE_CHECKING

from tinyvllm.engine.beam import BeamState
from tinyvllm.engine.requests import ActiveRequests
from tinyvllm.request import Sequence
from tinyvllm.scheduler import Schedule, Scheduled
from tinyvllm.scheduler.drafts import num_confirmed
from tinyvllm.speculate.cost_curve import MAX_FEW
from tinyvllm.speculate.protocol import CapturesAhead, Controller, Draft, Drafter, DraftRequest, LookupDrafter, StateDrafter, StateRows
from tinyvllm.speculate.watch import Watch, tenant_of

if TYPE_CHECKING:
    from tinygrad import Tensor

    from tinyvllm.runner.prepare import Shape
    from tinyvllm.runner.runner import PreparedStep, Runner

log = logging.getLogger("tinyvllm")

MAX_PROPOSE_SECONDS = 2.0  # one call; all requests wait for it
IDLE_TOKENS = 2048  # of past outputs that an idle engine learns in a row, some 2 ms: a request that comes waits for them
MAX_ENDED, MAX_ENDED_TOKENS = 256, 1 << 16  # sequences that wait to be forgotten, and their tokens: further ones do not wait
# Of past outputs, learned next to a step with prompts, as an engine may never be idle: some 40 us. A large batch has prompts in most steps.
PROMPT_TOKENS, PROMPT_TOKENS_LARGE = 48, 12

Drafts = dict[int, list[int]]  # by sequence id; none of them empty


class Speculation:
    """The drafter of one engine, and the controller that says how many drafts pay. `method` names the drafter."""

    def __init__(
        self,
        drafter: Drafter,
        controller: Controller,
        requests: ActiveRequests,
        vocab_size: int,
        max_model_len: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.method, self.on = drafter.method, True
        self.drafter, self._controller, self._requests, self._clock = drafter, controller, requests, clock
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._observed: dict[int, int] = {}  # by sequence id: how many of its tokens the drafter has observed
        self._candidates: list[Sequence] = []  # with a watch: those that recur
        self._wanting: list[Sequence] = []  # those that the controller was called for last
        # Until this output, of a sequence of the last step, has that length, steps of the same sequences have no drafts.
        self.rest_output: list[int] = []
        self.rest_until = 0
        self._lookup = drafter if isinstance(drafter, LookupDrafter) else None
        self._states = drafter if isinstance(drafter, StateDrafter) else None  # once: such a test of a protocol takes 40 us
        self._watch = Watch(self._lookup, controller.batch_pause) if self._lookup is not None and controller.pauses else None
        self._ended: list[Sequence] = []  # sequences that the drafter has not forgotten yet
        self._num_ended_tokens = 0
        self._learns = False  # there is something for `_learn_past`
        requests.on_release = self.release

    # ---- before a step ----

    def rests(self, schedule: Schedule) -> bool:
        """Whether the next step has no drafts: neither drafter nor controller need be called for it.

        The loop calls it only where `rest_output` does not say so already.
        """
        self.rest_until = 0
        if self._watch is None or not self.on:
            return not self.on
        try:  # as _Guard, for less
            return not self._any_recurs(schedule, self._watch)
        except Exception as error:
            self.switch_off("recurs", error)
            return True

    def _any_recurs(self, schedule: Schedule, watch: Watch) -> bool:
        """Whether a decode of the schedule may get drafts; else it rests until the watch looks again."""
        entries = schedule.entries
        if not schedule.reused:
            large = len(entries) > MAX_FEW
            if large and watch.sleeps:
                return False
            if not entries[-1].is_decode:  # parts of prompts come last
                if self._learns:
                    self._learn_past(PROMPT_TOKENS_LARGE if large else PROMPT_TOKENS)
                if large:  # no row is cheap, and what they cost next to prompts is not known
                    return False
                entries = [entry for entry in entries if entry.is_decode]
                if not entries:
                    return False
        self._candidates = watch.recurring(entries, schedule.reused)
        if self._candidates:
            return True
        self._begin_rest(entries[0].sequence, watch.pause)
        return False

    def _begin_rest(self, sequence: Sequence, num_tokens: int) -> None:
        """Steps of the same sequences have no drafts until this one has that many more tokens."""
        self.rest_output = sequence.output_token_ids
        self.rest_until = len(self.rest_output) + num_tokens

    def propose(self, schedule: Schedule) -> Drafts:
        """Drafts for the decodes of a schedule, as far as the controller wants them."""
        if not self.on:
            return {}
        with _Guard(self, "propose"):
            decodes = [entry.sequence for entry in schedule.entries if entry.is_decode]
            return self._propose(decodes if self._watch is None else self._candidates, len(decodes))
        return {}

    def would_guess(self, sequences: list[Sequence]) -> bool:
        """Whether it pays to read the tokens of the step in flight before the next one is launched: drafts may follow them."""
        if not self.on:
            return False
        with _Guard(self, "propose"):
            running = [s for s in (sequences if self._watch is None else self._candidates) if not s.finished]
            look = self._propose if self.drafter.looks_up else self._requests_of
            return bool(look(running, len(sequences)))
        return False

    def _propose(self, sequences: list[Sequence], num_sequences: int) -> Drafts:
        """Drafts for some of a step's `num_sequences` decodes."""
        requests, drafts = self._requests_of(sequences, num_sequences), Drafts()
        if requests:
            drafts = self._choose(requests, self._ask(requests), num_sequences)
        if not drafts and sequences:
            rests = [self._controller.rest(self._wanting)] if self._wanting else []
            if self._watch is not None:
                rests.append(self._watch.pause)
            self._begin_rest(sequences[0], min(rests, default=0))
        return drafts

    def _ask(self, requests: list[DraftRequest]) -> list[Draft]:
        """The drafter's drafts, with usable tokens only."""
        start = self._clock()
        drafts = self.drafter.propose(requests)
        seconds = self._clock() - start
        self._controller.observe_proposal(max(request.max_drafts for request in requests), seconds)
        if seconds > MAX_PROPOSE_SECONDS:
            raise TimeoutError(f"one call took {seconds:.1f} s, the limit is {MAX_PROPOSE_SECONDS:g} s")
        if len(drafts) != len(requests):
            raise ValueError(f"expected a draft for each of {len(requests)} sequences, got {len(drafts)}")
        for request, draft in zip(requests, drafts, strict=True):
            draft.tokens = self._usable(draft, request.max_drafts)
        return drafts

    def _choose(self, requests: list[DraftRequest], drafts: list[Draft], num_sequences: int) -> Drafts:
        """What the controller wants verified."""
        if not any(draft.tokens for draft in drafts):
            return {}
        counts = self._controller.choose(requests, drafts, num_sequences)
        chosen = {r.sequence.sequence_id: d.tokens[: max(0, n)] for r, d, n in zip(requests, drafts, counts, strict=True)}
        return {number: tokens for number, tokens in chosen.items() if tokens}

    def _requests_of(self, sequences: list[Sequence], num_sequences: int) -> list[DraftRequest]:
        """The sequences that may get drafts. Beams get none: which of them continues is decided by comparing them after each token."""
        self._wanting = sequences = [s for s in sequences if not isinstance(self._requests.owners.get(s.sequence_id), BeamState)]
        for sequence in sequences:
            self._observe(sequence)
        if not sequences:
            return []
        limits = self._controller.limits(sequences, num_sequences)
        wanted = [min(limit, self._room(s)) for s, limit in zip(sequences, limits, strict=True)]
        return [DraftRequest(s, n, tenant_of(s)) for s, n in zip(sequences, wanted, strict=True) if n > 0]

    def _room(self, sequence: Sequence) -> int:
        """How many drafts could become output, with the token that follows the last of them."""
        room, limit = self._max_model_len - len(sequence), sequence.params.max_tokens
        return (room if limit is None else min(room, limit - len(sequence.output_token_ids))) - 1

    def _usable(self, draft: Draft, count: int) -> list[int]:
        """The tokens up to the first that is none of the vocabulary, at most `count`."""
        tokens: list[int] = []
        for token in draft.tokens[:count]:
            try:
                number = index(token)
            except TypeError:
                break
            if not 0 <= number < self._vocab_size:
                break
            tokens.append(number)
        return tokens

    def _observe(self, sequence: Sequence) -> None:
        known = self._observed.get(sequence.sequence_id, len(sequence.prompt_token_ids))
        if len(sequence) > known:
            self.drafter.observe(sequence, len(sequence) - known)
            self._observed[sequence.sequence_id] = len(sequence)

    # ---- ahead of requests ----

    @property
    def reads_states(self) -> bool:
        """Whether the drafter reads the hidden states of every step."""
        return self._states is not None

    def capture(self, shape: Shape, states: Tensor | None) -> None:
        """Let a drafter that runs on the device capture what belongs to steps of a shape, the last of which has these hidden states."""
        if self.on and isinstance(self.drafter, CapturesAhead):
            with _Guard(self, "capture"):
                self.drafter.capture(shape, states)

    def drop_captures(self) -> None:
        """The drafter's captures have slower kernels than are known now."""
        if self.on and isinstance(self.drafter, CapturesAhead):
            with _Guard(self, "drop_captures"):
                self.drafter.drop_captures()

    def on_idle(self) -> bool:
        """Learn some of the outputs that have ended, while nothing runs; whether some are left."""
        if self.on and self._learns:
            with _Guard(self, "learn_past"):
                return self._learn_past(IDLE_TOKENS)
        return False

    def _learn_past(self, max_tokens: int) -> bool:
        """Forget what has ended, and learn at most that many of its tokens; whether some are left."""
        ended, self._ended, self._num_ended_tokens = self._ended, [], 0
        for sequence in ended:
            self._forget(sequence)
        self._learns = self._lookup is not None and self._lookup.learn_past(max_tokens)
        return self._learns

    # ---- after a step ----

    def checked(self, entry: Scheduled, num_accepted: int) -> None:
        """A step has checked the drafts of an entry, and accepted the first `num_accepted`."""
        if self.on:
            with _Guard(self, "the controller's observe"):
                self._controller.observe(entry.sequence, len(entry.drafts), num_accepted)
            if num_accepted and self._watch is not None:
                self._watch.trust(entry.sequence)

    def take_states(self, inputs: PreparedStep, states: Tensor) -> None:
        """Hand the hidden states of a step to a drafter that reads them, without rows of rejected drafts and of ended sequences."""
        if self.on and self._states is not None:
            alive = [(entry, row) for entry, row in inputs.entries if not entry.sequence.finished]
            rows = [StateRows(e.sequence, e.start, row, e.num_tokens - len(e.drafts) + num_confirmed(e)) for e, row in alive]
            with _Guard(self, "observe_states"):
                self._states.observe_states(states, rows)

    def timed(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        """A step of decodes and drafts took so long."""
        if self.on:
            with _Guard(self, "the controller's observe_step"):
                self._controller.observe_step(num_sequences, num_drafts, seconds)

    def release(self, sequence: Sequence) -> None:
        """The sequence has ended. A lookup drafter forgets it later, out of its request's time: `on_idle`, or next to the next prompt."""
        if self.on and self._watch is not None:
            if sequence not in self._watch:  # as in large batches: it was never looked at, so nothing is known of it
                return
            num_tokens = self._num_ended_tokens + len(sequence)
            if len(self._ended) < MAX_ENDED and num_tokens <= MAX_ENDED_TOKENS:
                self._ended.append(sequence)
                self._num_ended_tokens, self._learns = num_tokens, True
                return
        self._learns = self.on and self._lookup is not None
        with _Guard(self, "forget"):
            self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        if self._watch is not None:
            self._watch.forget(sequence)
        if self.on:
            self._observe(sequence)
            self.drafter.forget(sequence)
            self._controller.forget(sequence)
        self._observed.pop(sequence.sequence_id, None)

    def switch_off(self, where: str, error: Exception) -> None:
        """The drafter or the controller has failed: no more drafts."""
        self.on = self._learns = False
        self._observed.clear()
        self._ended.clear()
        log.warning(
            "speculation: the drafter %r is switched off, requests continue without drafts: %s: %s: %s",
            self.method, where, type(error).__name__, error, exc_info=error,
        )  # fmt: skip


class _Guard:
    """An exception of the drafter or the controller ends speculation, and nothing else. A class: a generator takes 1 us more a step."""

    __slots__ = ("_speculation", "_where")

    def __init__(self, speculation: Speculation, where: str):
        self._speculation, self._where = speculation, where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, Exception):
            self._speculation.switch_off(self._where, error)
            return True
        return False


def time_without_captures(runner: Runner) -> float:
    """Seconds that do not count captures: the first call of a drafter that runs a model compiles its kernels."""
    return time.perf_counter() - runner.capture_work().seconds
