"""Drafts by prompt lookup: method "ngram". The last tokens occurred before; what followed them then may follow again. No model.

As vLLM's method of that name (prompt lookup decoding, Saxena 2023), over prompt and output, with an index instead of a scan.
"""

from __future__ import annotations

from collections.abc import Sequence as Row

from tinyvllm.errors import ArgumentError
from tinyvllm.request import Sequence
from tinyvllm.speculate.protocol import Draft, DraftRequest
from tinyvllm.speculate.tails import Tails
from tinyvllm.speculate.texts import CALL_TOKENS, TEXT_BYTES, Texts
from tinyvllm.speculative import MAX_LOOKUP

DEFAULT_LOOKUP = 5  # vLLM's, if neither bound is set
_LEARN_TOKENS = 64  # between two looks at the limit


class NgramIndex:
    """The end of the last occurrence of each n-gram that a token followed. At most about `max_bytes`; generations as in ContextCounts."""

    __slots__ = ("_lengths", "_max_entries", "_old", "_tail", "_young", "entry_bytes", "known")

    def __init__(self, lengths: tuple[int, ...], max_bytes: int):
        """`lengths`: longest first."""
        self.known, self.entry_bytes = 0, 200 + 8 * lengths[0]  # slot of the table right after it has grown, the tuple, the integer
        self._lengths, self._max_entries = lengths, max_bytes // self.entry_bytes
        self._young: dict[tuple[int, ...], int] = {}
        self._old: dict[tuple[int, ...], int] = {}
        self._tail: list[int] = []  # the last tokens, as many as the longest n-gram has

    @property
    def nbytes(self) -> int:
        """Bytes of both generations, at most."""
        return (len(self._young) + len(self._old)) * self.entry_bytes

    def learn(self, tokens: list[int]) -> None:
        """Append tokens: the n-grams that end before each of them have now occurred with a continuation."""
        longest = self._lengths[0]
        for start in range(0, len(tokens), _LEARN_TOKENS):
            part = tokens[start : start + _LEARN_TOKENS]
            text, offset = self._tail + part, self.known - len(self._tail)
            for end in range(len(self._tail), len(text)):
                for n in self._lengths:
                    if n <= end:
                        self._young[tuple(text[end - n : end])] = end + offset
            self._tail, self.known = text[-longest:], self.known + len(part)
            if len(self._young) > self._max_entries // 2:
                self.drop_old()

    def drop_old(self) -> None:
        """Forget the old generation; the young one takes its place."""
        self._old, self._young = self._young, {}

    def find(self) -> int | None:
        """The position after the last earlier occurrence of the longest n-gram that ends the text."""
        for n in self._lengths:
            if n <= len(self._tail):
                ngram = tuple(self._tail[-n:])
                end = self._young.get(ngram)
                if end is None:
                    end = self._old.get(ngram)
                if end is not None:
                    return end
        return None


class NgramDrafter:
    """Continues the last earlier occurrence of the longest n-gram, of `lookup_max` to `lookup_min` tokens, that ends the text.

    A continuation that reaches the end of the text repeats itself: after "a b a b" the draft is "a b a b ...". A sequence of which more
    is new than a call may index (CALL_TOKENS) gets no drafts yet.
    """

    method = "ngram"
    looks_up = True

    def __init__(
        self, lookup_max: int | None = None, lookup_min: int | None = None, max_bytes: int = TEXT_BYTES, call_tokens: int = CALL_TOKENS
    ):
        """If one of the bounds is None, it is the other one; if both are, DEFAULT_LOOKUP. `max_bytes` is for all sequences."""
        longest = (lookup_min or DEFAULT_LOOKUP) if lookup_max is None else lookup_max
        shortest = longest if lookup_min is None else lookup_min
        if not 1 <= shortest <= longest <= MAX_LOOKUP:
            raise ArgumentError(
                f"speculation: expected 1 <= prompt_lookup_min <= prompt_lookup_max <= {MAX_LOOKUP}, "
                f"got prompt_lookup_min={lookup_min}, prompt_lookup_max={lookup_max}"
            )
        lengths = tuple(range(longest, shortest - 1, -1))
        self._texts = Texts(lambda: NgramIndex(lengths, max_bytes), max_bytes, call_tokens)
        self._tails, self._shortest = Tails(), shortest

    @property
    def nbytes(self) -> int:
        """Bytes of all indexes, at most."""
        return self._texts.nbytes

    def propose(self, requests: Row[DraftRequest]) -> list[Draft]:
        """Drafts without confidences."""
        self._texts.begin_call()
        return [self._draft(request) for request in requests]

    def recurs(self, sequence: Sequence, tenant: str, times: int = 1) -> bool:
        """Whether the shortest n-gram that ends the text occurred before."""
        return self._texts.lacks_much(sequence) or self._tails.recur(sequence, times * self._shortest)

    def learn_past(self, max_tokens: int) -> bool:
        """Nothing is learned from past outputs."""
        return False

    def observe(self, sequence: Sequence, num_new: int) -> None:
        """Nothing: `propose` indexes what is new."""

    def forget(self, sequence: Sequence) -> None:
        """Drop the sequence's index."""
        self._texts.forget(sequence)
        self._tails.forget(sequence)

    def _draft(self, request: DraftRequest) -> Draft:
        index = self._texts.up_to_date(request.sequence)
        start = None if index is None else index.find()
        if start is None:
            return Draft()
        tokens = request.sequence.token_ids(start, start + request.max_drafts)
        period = len(tokens)
        for i in range(request.max_drafts - period):  # the continuation reaches the end of the text
            tokens.append(tokens[i])
        return Draft(tokens)
