"""The requests that an engine runs: which sequences belong to which request, which the sampler knows, and which have new output.

A token that was sampled comes in through `append`; all that follows from it (text, forced tokens, the next beams, the end) is done here.
Whatever is done for one request is done inside `boundary`, so that an exception ends that request only; see boundary.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from tinyvllm.engine.beam import BeamState
from tinyvllm.engine.boundary import RequestBoundary
from tinyvllm.engine.constraints import TokenConstraints
from tinyvllm.engine.observer import EngineObserver
from tinyvllm.engine.output import ActiveRequest, RequestState, failed_output
from tinyvllm.errors import TinyvllmError
from tinyvllm.request import Logprob, RequestOutput, Sequence
from tinyvllm.scheduler import Schedule, Scheduler
from tinyvllm.scheduler.requeue import requeue_running

if TYPE_CHECKING:
    from tinyvllm.sampling.sampler import Sampler


class ActiveRequests:
    """The requests of one engine from `add` until their last output is taken."""

    def __init__(
        self, scheduler: Scheduler, sampler: Sampler, constraints: TokenConstraints, observer: EngineObserver, eos_ids: Collection[int]
    ):
        self.scheduler = scheduler
        self.owners: dict[int, ActiveRequest] = {}  # by sequence id
        self.boundary = RequestBoundary(self.fail)
        self.on_failure: Callable[[str], None] = lambda request_id: None  # called with the id of a request that `fail` ends
        self.on_release: Callable[[Sequence], None] = lambda sequence: None  # called with each sequence that has ended
        self._live: dict[int, Sequence] = {}  # the sequences that have owners
        self._sampler, self._constraints, self._observer, self._eos_ids = sampler, constraints, observer, eos_ids
        self._by_id: dict[str, ActiveRequest] = {}
        self._rows: dict[int, int] = {}  # sequence id -> the row under which the sampler knows it
        self._changed: dict[str, ActiveRequest] = {}  # with output that the caller does not have yet
        self._failed: dict[str, RequestOutput] = {}  # last outputs of requests that `fail` has ended

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __getitem__(self, request_id: str) -> ActiveRequest:
        return self._by_id[request_id]

    @property
    def have_output(self) -> bool:
        """Whether `take_outputs` may have something."""
        return bool(self._changed or self._failed)

    def adapters_in_use(self) -> set[int]:
        """The numbers of the adapters of the sequences that have not ended."""
        return {sequence.adapter for sequence in self._live.values()}

    def constrain(self, request: ActiveRequest) -> None:
        """Compile the constraints of a new request and append the tokens that they force at its beginning.

        RequestError if they cannot be enforced. Forced tokens that would end the output at once are left to be drawn.
        """
        if isinstance(request, BeamState):
            return
        self._constraints.add(request.sequences)
        for sequence in request.sequences:
            forced = self._constraints.initial_tokens(sequence)
            if request.max_tokens is None or len(forced) < request.max_tokens:
                for token in forced:
                    request.append(sequence, token, None)
                    self._constraints.accept(sequence)

    def add(self, request: ActiveRequest) -> None:
        """Queue a request. If this or what follows raises, `withdraw` removes what it has left."""
        first, *siblings = request.sequences
        self.scheduler.add(first, siblings)
        self._by_id[request.request_id] = request
        for sequence in request.sequences:
            self._own(sequence, request)

    def withdraw(self, request: ActiveRequest) -> None:
        """Remove every trace of a request whose admission failed; it has no output."""
        for sequence in request.sequences:
            self._constraints.remove(sequence)
        self._free(request)
        self._by_id.pop(request.request_id, None)

    def fail(self, request: ActiveRequest, error: TinyvllmError) -> None:
        """End a request whose own work raised, whatever state that has left it in; its last output has the error and no text.

        Raises only if its blocks cannot be freed.
        """
        self._failed[request.request_id] = failed_output(request, error)
        self._changed.pop(request.request_id, None)
        self.on_failure(request.request_id)
        self._free(request)

    def _own(self, sequence: Sequence, request: ActiveRequest) -> None:
        self.owners[sequence.sequence_id] = request
        self._live[sequence.sequence_id] = sequence

    def _free(self, request: ActiveRequest) -> None:
        """Take all sequences of a request from the sampler, the constraints and the scheduler."""
        for sequence in [s for i, s in self._live.items() if self.owners[i] is request]:
            self._release(sequence, "error")

    def settle(self, schedule: Schedule) -> None:
        """Take preempted sequences from the sampler, and end the requests whose sequences outgrew the cache or their deadline.

        Ending one beam ends its search, so the siblings of a sequence may also be listed, or be among the entries, which are dropped.
        """
        for sequence in schedule.preempted:
            self._leave_sampler(sequence)
        for ended, reason in ((schedule.exhausted, "length"), (schedule.expired, "deadline")):
            for sequence in ended:
                self.finish(sequence, reason)
        if schedule.exhausted or schedule.expired:
            schedule.drop_finished()

    def join_sampler(self, schedule: Schedule) -> None:
        """Hand the sampler the sequences that were admitted, or admitted again, since their last token."""
        joining = [e.sequence for e in schedule.entries if e.num_logits and self._rows.get(e.sequence.sequence_id) != e.sequence.row]
        for sequence in joining:
            with self.boundary(self.owners[sequence.sequence_id], "its row of sampling parameters"):
                self._rows[sequence.sequence_id] = sequence.row
                self._sampler.add(sequence, self._eos_ids)
                self._constraints.forget_device_state(sequence)
        if any(sequence.finished for sequence in joining):
            schedule.drop_finished()

    def requeue_running(self) -> list[Sequence]:
        """After a step that failed: every running sequence waits again, and the sampler knows none. Those that it ended are reported."""
        for sequence in list(self._live.values()):
            self._leave_sampler(sequence)
            if sequence.finished:
                self.finish(sequence, sequence.finish_reason or "error")
        paused = [s for i, s in self._live.items() if isinstance(beams := self.owners[i], BeamState) and beams.has_candidates(s)]
        return requeue_running(self.scheduler, self._live.values(), paused)

    def append(self, sequence: Sequence, token: int, logprobs: dict[int, Logprob] | None) -> None:
        """Append a sampled token to a sequence that runs; -1 means that its logits had none. Nothing, if its request has ended."""
        request = self.owners.get(sequence.sequence_id)
        if request is not None:
            with self.boundary(request, "taking a token"):
                self._append(request, sequence, token, logprobs)

    def _append(self, request: ActiveRequest, sequence: Sequence, token: int, logprobs: dict[int, Logprob] | None) -> None:
        if token < 0:  # a row of finite logits always has a token: the weights or the activations of this request are broken
            self.finish(sequence, "error", "the model gave no finite logits; its weights or its cache are broken")
            return
        reason = request.append(sequence, token, logprobs)
        self._observer.tokens_appended(request, 1)
        self._changed[request.request_id] = request
        if isinstance(request, BeamState):
            if request.ready:
                self._next_beams(request)
        elif reason is not None:
            self._release(sequence, reason)
        else:
            self._append_forced(request, sequence)

    def _append_forced(self, request: RequestState, sequence: Sequence) -> None:
        """Append the tokens that the last one leaves no choice about, or end the sequence if its constraints do."""
        accepted = self._constraints.accept(sequence)
        forced = accepted.forced
        while forced and accepted.reason is None:
            ended = request.append(sequence, forced.pop(0), None)
            self._observer.tokens_appended(request, 1, forced=True)
            if ended is not None:
                self._release(sequence, ended)
                return
            accepted = self._constraints.accept(sequence)
            forced = forced or accepted.forced
        if accepted.reason is not None:
            self.finish(sequence, accepted.reason, accepted.error)

    def _next_beams(self, search: BeamState) -> None:
        """The next round of a beam search: forks first, while the sequences that they come from are unchanged."""
        changes = search.next_round()
        for parent, child in changes.forks:
            self.scheduler.fork(parent, child)
            self._own(child, search)
        for sequence, token in changes.tokens:
            sequence.output_token_ids.append(token)
        for sequence in changes.ended:
            self._release(sequence, "stop")

    def finish(self, sequence: Sequence, reason: str, error: str | None = None) -> None:
        """End a sequence that runs or waits. The end of one beam is the end of its search. Nothing, if its request has ended."""
        request = self.owners.get(sequence.sequence_id)
        if request is None:
            return
        with self.boundary(request, "its end"):
            request.finish(sequence, reason, error)
            self._changed[request.request_id] = request
            self._release(sequence, reason)
            if isinstance(request, BeamState):
                for other in [s for s in request.sequences if not s.finished]:
                    self._release(other, reason)

    def finish_request(self, request_id: str, reason: str, error: str | None = None) -> None:
        """End all sequences of a request that still run or wait."""
        for sequence in self._by_id[request_id].sequences:
            if not sequence.finished:
                self.finish(sequence, reason, error)

    def set_prompt_logprobs(self, request_id: str, logprobs: list[dict[int, Logprob] | None]) -> None:
        """The log-probabilities of a prompt's tokens, which the next output has."""
        request = self._by_id[request_id]
        assert isinstance(request, RequestState)
        request.prompt_logprobs = request.with_token_texts(logprobs)
        self._changed[request_id] = request

    def take_outputs(self, withheld: Collection[str]) -> list[RequestOutput]:
        """The outputs, so far or final, of every request that changed and whose caller wants it now; none of the `withheld` ids."""
        changed, self._changed = self._changed, {}
        outputs: list[RequestOutput] = []
        for request_id, request in changed.items():
            if request_id not in withheld:
                with self.boundary(request, "its output"):
                    output = request.output()
                    if output is not None and output.finished:
                        self._observer.request_finished(request, output)
                        del self._by_id[request_id]
                    if output is not None:
                        outputs.append(output)
        if self._failed:
            outputs += self._take_failed()
        return outputs

    def _take_failed(self) -> list[RequestOutput]:
        failed, self._failed = self._failed, {}
        for request_id, output in failed.items():
            request = self._by_id.pop(request_id)
            with RequestBoundary(lambda request, error: None)(request, "counting its failure"):  # logged: it has its error already
                self._observer.request_finished(request, output)
        return list(failed.values())

    def has_beams(self, sequences: list[Sequence]) -> bool:
        """Whether one of them is a beam: the token that follows it need not be the one drawn, which the device would continue with."""
        return any(s.logprobs is not None and isinstance(self.owners.get(s.sequence_id), BeamState) for s in sequences)

    def _release(self, sequence: Sequence, reason: str) -> None:
        self._leave_sampler(sequence)
        self._constraints.remove(sequence)
        self.scheduler.finish(sequence, reason)
        self.owners.pop(sequence.sequence_id, None)
        if self._live.pop(sequence.sequence_id, None) is not None:
            self.on_release(sequence)

    def _leave_sampler(self, sequence: Sequence) -> None:
        row = self._rows.pop(sequence.sequence_id, None)
        if row is not None:
            self._sampler.remove(row)
