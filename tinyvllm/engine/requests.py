"""The requests that an engine runs: which sequences belong to which request, which the sampler knows, and which have new output.

A token that was sampled comes in through `append`; all that follows from it (text, forced tokens, the next beams, the end) is done here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from tinyvllm.engine.beam import BeamState
from tinyvllm.engine.constraints import TokenConstraints
from tinyvllm.engine.observer import EngineObserver
from tinyvllm.engine.output import ActiveRequest, RequestState
from tinyvllm.errors import TinyvllmError
from tinyvllm.request import Logprob, RequestOutput, Sequence
from tinyvllm.scheduler import Schedule, Scheduler

if TYPE_CHECKING:
    from tinyvllm.sampling.sampler import Sampler


class ActiveRequests:
    """The requests of one engine from `add` until their last output is taken."""

    def __init__(
        self, scheduler: Scheduler, sampler: Sampler, constraints: TokenConstraints, observer: EngineObserver, eos_ids: Collection[int]
    ):
        self.scheduler = scheduler
        self.owners: dict[int, ActiveRequest] = {}  # by sequence id
        self._sampler, self._constraints, self._observer, self._eos_ids = sampler, constraints, observer, eos_ids
        self._by_id: dict[str, ActiveRequest] = {}
        self._rows: dict[int, int] = {}  # sequence id -> the row under which the sampler knows it
        self._changed: dict[str, ActiveRequest] = {}  # with output that the caller does not have yet

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __getitem__(self, request_id: str) -> ActiveRequest:
        return self._by_id[request_id]

    @property
    def have_output(self) -> bool:
        """Whether `take_outputs` may have something."""
        return bool(self._changed)

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
        """Queue a request. What the scheduler refuses is forgotten again, and its error raised."""
        first, *siblings = request.sequences
        try:
            self.scheduler.add(first, siblings)
        except TinyvllmError:
            for sequence in request.sequences:
                self._constraints.remove(sequence)
            raise
        self._by_id[request.request_id] = request
        self.owners |= {sequence.sequence_id: request for sequence in request.sequences}

    def settle(self, schedule: Schedule) -> None:
        """Take preempted sequences from the sampler, and end the requests whose sequences outgrew the cache or their deadline.

        Ending one beam ends its search, so the siblings of a sequence may also be listed, or be among the entries, which are dropped.
        """
        for sequence in schedule.preempted:
            self._leave_sampler(sequence)
        for ended, reason in ((schedule.exhausted, "length"), (schedule.expired, "deadline")):
            for sequence in ended:
                if sequence.sequence_id in self.owners:
                    self.finish(sequence, reason)
        if schedule.exhausted or schedule.expired:
            schedule.entries = [entry for entry in schedule.entries if not entry.sequence.finished]

    def join_sampler(self, schedule: Schedule) -> None:
        """Hand the sampler the sequences that were admitted, or admitted again, since their last token."""
        for sequence in [entry.sequence for entry in schedule.entries if entry.num_logits]:
            if self._rows.get(sequence.sequence_id) != sequence.row:
                self._sampler.add(sequence, self._eos_ids)
                self._constraints.forget_device_state(sequence)
                self._rows[sequence.sequence_id] = sequence.row

    def append(self, sequence: Sequence, token: int, logprobs: dict[int, Logprob] | None) -> None:
        """Append a sampled token to a sequence that runs; -1 means that its logits had none."""
        request = self.owners[sequence.sequence_id]
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
            self.owners[child.sequence_id] = search
            self.scheduler.fork(parent, child)
        for sequence, token in changes.tokens:
            sequence.output_token_ids.append(token)
        for sequence in changes.ended:
            self._release(sequence, "stop")

    def finish(self, sequence: Sequence, reason: str, error: str | None = None) -> None:
        """End a sequence that runs or waits. The end of one beam is the end of its search."""
        request = self.owners[sequence.sequence_id]
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
            if request_id in withheld or (output := request.output()) is None:
                continue
            if output.finished:
                del self._by_id[request_id]
                self._observer.request_finished(request, output)
            outputs.append(output)
        return outputs

    def has_beams(self, sequences: list[Sequence]) -> bool:
        """Whether one of them is a beam: the token that follows it need not be the one drawn, which the device would continue with."""
        return any(s.logprobs is not None and isinstance(self.owners[s.sequence_id], BeamState) for s in sequences)

    def _release(self, sequence: Sequence, reason: str) -> None:
        self._leave_sampler(sequence)
        self._constraints.remove(sequence)
        self.scheduler.finish(sequence, reason)
        self.owners.pop(sequence.sequence_id, None)

    def _leave_sampler(self, sequence: Sequence) -> None:
        row = self._rows.pop(sequence.sequence_id, None)
        if row is not None:
            self._sampler.remove(row)
