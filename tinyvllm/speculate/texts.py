"""An index of each running sequence's text, brought up to date in slices and held within a limit of bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from tinyvllm.request import Sequence

CALL_TOKENS = 2048  # tokens that one call of `propose` learns at most, of all sequences: a long prompt is learned over several steps
MAX_MISSING = 64  # tokens that an index may lack until it is brought up to date, whether or not the text recurs: then a call is short
TEXT_BYTES = 128 << 20  # of all sequences' indexes


class TextIndex(Protocol):
    """An index of the tokens of one text, in two generations: `drop_old` forgets the old one and makes the young one old."""

    known: int  # tokens learned

    @property
    def nbytes(self) -> int: ...

    def learn(self, tokens: list[int]) -> None: ...

    def drop_old(self) -> None: ...


Index = TypeVar("Index", bound=TextIndex)


class Texts(Generic[Index]):
    """The indexes by sequence. Together they hold at most `max_bytes`: beyond that the largest one drops its old generation."""

    def __init__(self, new_index: Callable[[], Index], max_bytes: int, call_tokens: int = CALL_TOKENS):
        self.max_bytes, self.nbytes, self.room = max_bytes, 0, call_tokens
        self._new_index, self._call_tokens = new_index, call_tokens
        self.indexes: dict[int, Index] = {}  # by sequence id

    def __len__(self) -> int:
        return len(self.indexes)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self.indexes

    def lacks_much(self, sequence: Sequence) -> bool:
        """Whether the sequence has an index that lacks more than MAX_MISSING of its tokens."""
        index = self.indexes.get(sequence.sequence_id)
        return index is not None and len(sequence) - index.known > MAX_MISSING

    def begin_call(self) -> None:
        """From here on, `call_tokens` tokens may be learned; `room` is what remains of them."""
        self.room = self._call_tokens

    def up_to_date(self, sequence: Sequence) -> Index | None:
        """The sequence's index if it knows all of its tokens; learns what `room` permits."""
        index = self.indexes.get(sequence.sequence_id)
        if index is None:
            index = self.indexes[sequence.sequence_id] = self._new_index()
        missing = len(sequence) - index.known
        if missing:
            if missing < 0:
                raise ValueError(f"sequence {sequence.sequence_id} has {len(sequence)} tokens; its index knows {index.known}")
            self._learn(index, sequence, min(missing, self.room))
        return index if index.known == len(sequence) else None

    def forget(self, sequence: Sequence) -> Index | None:
        """Drop and return the sequence's index, if there is one."""
        index = self.indexes.pop(sequence.sequence_id, None)
        if index is not None:
            self.nbytes -= index.nbytes
        return index

    def _learn(self, index: Index, sequence: Sequence, count: int) -> None:
        before = index.nbytes
        index.learn(sequence.token_ids(index.known, index.known + count))
        self.room -= count
        self.nbytes += index.nbytes - before
        while self.nbytes > self.max_bytes:
            largest = max(self.indexes.values(), key=lambda index: index.nbytes)
            before = largest.nbytes
            largest.drop_old()
            self.nbytes += largest.nbytes - before
