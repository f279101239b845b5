"""Whether the last tokens of a text occurred in it before: by a search of its bytes, so that a text without repetitions needs no index."""

from __future__ import annotations

from array import array

from tinyvllm.request import Sequence

CALL_TOKENS = 1 << 16  # tokens that one call takes over at most, of all sequences: some 0.5 ms
_TYPE = "I"
_BYTES = array(_TYPE).itemsize
_MAX_MISALIGNED = 16  # occurrences that begin within a token, after which the answer is yes: crafted text must not cost more than an index


class Tails:
    """The tokens of running sequences as bytes, until `forget`."""

    def __init__(self, length: int, call_tokens: int = CALL_TOKENS):
        """`length`: how many tokens must have occurred before."""
        self._length, self._call_tokens, self._room = length, call_tokens, call_tokens
        self._texts: dict[int, bytearray] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def begin_call(self) -> None:
        """From here on, `call_tokens` tokens may be taken over."""
        self._room = self._call_tokens

    def recur(self, sequence: Sequence) -> bool:
        """Whether the sequence's last tokens occurred before. False as long as not all of its tokens were taken over."""
        text = self._texts.setdefault(sequence.sequence_id, bytearray())
        known = len(text) // _BYTES
        count = min(len(sequence) - known, self._room)
        if count < 0:
            raise ValueError(f"sequence {sequence.sequence_id} has {len(sequence)} tokens; its text knows {known}")
        text += array(_TYPE, sequence.token_ids(known, known + count)).tobytes()
        self._room -= count
        return known + count == len(sequence) and _recurs(text, self._length * _BYTES)

    def forget(self, sequence: Sequence) -> None:
        """Drop the sequence's text, if there is one."""
        self._texts.pop(sequence.sequence_id, None)


def _recurs(text: bytearray, size: int) -> bool:
    """Whether the last `size` bytes are also elsewhere, at the beginning of a token."""
    tail, end = text[-size:], len(text) - 1
    for _ in range(_MAX_MISALIGNED):
        at = text.rfind(tail, 0, end)
        if at % _BYTES == 0 or at < 0:
            return at >= 0
        end = at + size - 1
    return True
