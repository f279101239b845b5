"""Whether the last tokens of a text occurred in it before: by a search of its bytes, so that a text without repetitions needs no index."""

from __future__ import annotations

from array import array

from tinyvllm.request import Sequence

CALL_TOKENS = 1 << 16  # tokens of a sequence that one call takes over at most: some 0.5 ms
_TYPE = "I"
_BYTES = array(_TYPE).itemsize
_MAX_MISALIGNED = 16  # occurrences that begin within a token, after which the answer is yes: crafted text must not cost more than an index


class Tails:
    """The tokens of running sequences as bytes, until `forget`."""

    def __init__(self, call_tokens: int = CALL_TOKENS):
        self._call_tokens = call_tokens
        self._texts: dict[int, bytearray] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def recur(self, sequence: Sequence, length: int) -> bool:
        """Whether the sequence's last `length` tokens occurred before. False as long as not all of its tokens were taken over."""
        text = self._texts.get(sequence.sequence_id)
        if text is None:
            text = self._texts[sequence.sequence_id] = bytearray()
        output = sequence.output_token_ids
        known = len(text) // _BYTES
        missing = len(sequence.prompt_token_ids) + len(output) - known
        if missing < 0:
            raise ValueError(f"sequence {sequence.sequence_id} has {known + missing} tokens; its text knows {known}")
        if missing:
            count = min(missing, self._call_tokens)
            new = output[-missing:] if count == missing <= len(output) else sequence.token_ids(known, known + count)
            text += array(_TYPE, new).tobytes()
            if count < missing:
                return False
        size = length * _BYTES
        tail, end = text[-size:], len(text) - 1
        for _ in range(_MAX_MISALIGNED):
            at = text.rfind(tail, 0, end)
            if at % _BYTES == 0 or at < 0:
                return at >= 0
            end = at + size - 1
        return True

    def forget(self, sequence: Sequence) -> None:
        """Drop the sequence's text, if there is one."""
        self._texts.pop(sequence.sequence_id, None)
