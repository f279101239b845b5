"""Drafts by the contexts of a sequence's own text and of past outputs: method "suffix" (suffix decoding, arXiv:2411.04975). No model."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence as Row

from tinyvllm.request import Sequence
from tinyvllm.speculate.contexts import LENGTHS, ContextCounts, Trail, context_key, guess
from tinyvllm.speculate.protocol import Draft, DraftRequest
from tinyvllm.speculate.tails import Tails
from tinyvllm.speculate.texts import CALL_TOKENS, TEXT_BYTES, Texts

MIN_SURVIVAL = 0.1  # vLLM's suffix_decoding_min_token_prob
OUTPUT_BYTES = 64 << 20  # of past outputs
FIRST_MATCH = 4  # tokens that must recur before a text is learned: a shorter context alone hardly ever gives a draft that pays
LEARNED_MATCH = LENGTHS[-1]  # the same of a text that is learned: the shortest context that it is guessed from
# Tokens that must recur of a past output. At the beginning of an answer the last ones are a chat template's, which are those of every chat.
PAST_MATCH, FIRST_PAST_MATCH = 4, 8
PENDING_TOKENS = 1 << 16  # of outputs that wait to be learned; beyond, the oldest output is dropped
TENANT_BYTES = 1024  # counted for a tenant in addition to its contexts


class ContextText:
    """The contexts of one text, with the trail at its end."""

    __slots__ = ("counts", "known", "trail")

    def __init__(self, max_bytes: int):
        self.counts, self.trail, self.known = ContextCounts(max_bytes), Trail(), 0

    @property
    def nbytes(self) -> int:
        """Bytes of the contexts, at most."""
        return self.counts.nbytes

    def learn(self, tokens: list[int]) -> None:
        """Append tokens."""
        self.counts.learn(self.trail, tokens)
        self.known += len(tokens)

    def drop_old(self) -> None:
        """Forget the old generation of contexts."""
        self.counts.drop_old()


class PastOutputs:
    """The contexts of outputs that have ended, of each tenant apart. Beyond `max_bytes` the least recently used tenant is dropped."""

    def __init__(self, max_bytes: int):
        self.max_bytes, self.nbytes = max_bytes, 0
        self.tenants: OrderedDict[str, ContextCounts] = OrderedDict()
        self._pending: deque[tuple[str, Trail | list[int], list[int]]] = deque()  # tenant, the tokens before or a trail, an output
        self._num_pending = 0

    def of(self, tenant: str) -> ContextCounts | None:
        """A tenant's contexts, if there are any."""
        counts = self.tenants.get(tenant)
        if counts is not None:
            self.tenants.move_to_end(tenant)
        return counts

    def know(self, tenant: str, sequence: Sequence, length: int = PAST_MATCH) -> bool:
        """Whether the end of the sequence, PAST_MATCH or FIRST_PAST_MATCH tokens, is a context of its tenant's past outputs."""
        counts, output = self.tenants[tenant], sequence.output_token_ids
        tokens = output[-length:]
        if len(tokens) < length:
            tokens = sequence.prompt_token_ids[len(tokens) - FIRST_PAST_MATCH :] + tokens
        return len(tokens) in (PAST_MATCH, FIRST_PAST_MATCH) and context_key(tokens) in counts

    def add(self, tenant: str, sequence: Sequence) -> None:
        """Take over a sequence's output, its last PENDING_TOKENS tokens; `learn` learns it later."""
        tokens = sequence.output_token_ids[-PENDING_TOKENS:]
        if self.max_bytes == 0 or not tokens:
            return
        start = len(sequence) - len(tokens)
        self._pending.append((tenant, sequence.token_ids(max(0, start - LENGTHS[0]), start), tokens))
        self._num_pending += len(tokens)
        while self._num_pending > PENDING_TOKENS:
            self._num_pending -= len(self._pending.popleft()[2])

    def learn(self, max_tokens: int) -> bool:
        """Learn at most that many of the tokens taken over; whether some are left."""
        while self._pending and max_tokens > 0:
            tenant, before, tokens = self._pending.popleft()
            trail = Trail(before) if isinstance(before, list) else before
            part = tokens[:max_tokens]
            max_tokens, self._num_pending = max_tokens - len(part), self._num_pending - len(part)
            if len(part) < len(tokens):
                self._pending.appendleft((tenant, trail, tokens[len(part) :]))
            self._learn(tenant, trail, part)
        return bool(self._pending)

    def _learn(self, tenant: str, trail: Trail, tokens: list[int]) -> None:
        counts = self.of(tenant)
        if counts is None:
            counts = self.tenants[tenant] = ContextCounts(self.max_bytes)
            self.nbytes += TENANT_BYTES
        before = counts.nbytes
        counts.learn(trail, tokens)
        self.nbytes += counts.nbytes - before
        while self.nbytes > self.max_bytes and len(self.tenants) > 1:
            self.nbytes -= self.tenants.popitem(last=False)[1].nbytes + TENANT_BYTES


class SuffixDrafter:
    """Guesses by the longest context, of 16, 8, 4 or 2 tokens, that occurred before: in the sequence, or in a past output of its tenant.

    A draft ends where its estimated chance falls below `min_survival`. A text is learned from the first time on that its last
    `first_match` tokens recur in it: one that repeats nothing costs a search of its bytes. Memory is bounded: sequences beyond `text_bytes`
    forget their oldest contexts. A sequence of which more is new than a call may learn (CALL_TOKENS) gets no drafts yet.
    """

    method = "suffix"
    looks_up = True

    def __init__(
        self,
        min_survival: float = MIN_SURVIVAL,
        text_bytes: int = TEXT_BYTES,
        output_bytes: int = OUTPUT_BYTES,
        call_tokens: int = CALL_TOKENS,
        first_match: int = 0,
    ):
        """`text_bytes` is for the texts of all running sequences, `output_bytes` for past outputs; 0 keeps none.

        With `first_match` 0 every text is learned at once; FIRST_MATCH is what an engine takes.
        """
        self.min_survival, self.outputs = min_survival, PastOutputs(output_bytes)
        self._texts = Texts(lambda: ContextText(text_bytes), text_bytes, call_tokens)
        self._tails, self._first_match = Tails() if first_match else None, first_match
        self._tenants: dict[int, str] = {}  # by sequence

    @property
    def nbytes(self) -> int:
        """Bytes of all contexts, at most."""
        return self._texts.nbytes + self.outputs.nbytes

    def propose(self, requests: Row[DraftRequest]) -> list[Draft]:
        """Drafts with confidences: how often the token followed the context."""
        self._texts.begin_call()
        drafts = [self._draft(request) for request in requests]
        self.outputs.learn(self._texts.room)
        return drafts

    def recurs(self, sequence: Sequence, tenant: str, times: int = 1) -> bool:
        """Whether the last tokens occurred before, in the text or in a past output of the tenant: FIRST_MATCH of them, or LEARNED_MATCH."""
        if self._tails is None:
            return True
        number, length = sequence.sequence_id, self._first_match
        past = PAST_MATCH if times == 1 else FIRST_PAST_MATCH
        self._tenants[number] = tenant
        if number in self._texts.indexes:
            if self._texts.lacks_much(sequence):
                return True
            length = LEARNED_MATCH
        return self._tails.recur(sequence, times * length) or (tenant in self.outputs.tenants and self.outputs.know(tenant, sequence, past))

    def learn_past(self, max_tokens: int) -> bool:
        """Learn from outputs that have ended."""
        return self.outputs.learn(max_tokens)

    def observe(self, sequence: Sequence, num_new: int) -> None:
        """Nothing: `propose` learns what is new, so that a sequence without drafts costs nothing."""

    def forget(self, sequence: Sequence) -> None:
        """Drop the sequence's contexts; its output becomes a past output of its tenant."""
        self._texts.forget(sequence)
        if self._tails is not None:
            self._tails.forget(sequence)
        tenant = self._tenants.pop(sequence.sequence_id, None)
        if tenant is not None:
            self.outputs.add(tenant, sequence)

    def _draft(self, request: DraftRequest) -> Draft:
        sequence, past = request.sequence, self.outputs.of(request.tenant)
        self._tenants[sequence.sequence_id] = request.tenant
        if not self._learns(sequence):
            if past is None:
                return Draft()
            end = len(sequence)
            trail = Trail(sequence.token_ids(max(0, end - LENGTHS[0]), end))
            return guess(trail, (past,), request.max_drafts, self.min_survival)
        text = self._texts.up_to_date(sequence)
        if text is None:
            return Draft()
        sources = (text.counts,) if past is None else (text.counts, past)
        return guess(text.trail, sources, request.max_drafts, self.min_survival)

    def _learns(self, sequence: Sequence) -> bool:
        """Whether the sequence's text is worth learning: it has repeated something."""
        if self._tails is None or sequence in self._texts:
            return True
        return self._tails.recur(sequence, self._first_match)
