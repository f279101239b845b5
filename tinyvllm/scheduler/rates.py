"""How fast this engine has been recently: what waits are predicted from, what preemption weighs, and how long chunks may be."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

MIN_SAMPLES = 5  # comparable steps before a deadline is refused by a prediction
_WINDOW = 32  # observations; the median over them ignores a step that was captured or compiled
_MIN_CHUNK = 16  # tokens: the smallest chunk with decodes. Larger ones are powers of two: every size is a capture
_FIRST_CHUNK = 32  # tokens with decodes, before a step with prompt tokens was timed: 0.2 s for a model of 1.1B on two cores
_COPY_GUESS = 4e9  # bytes a second between the pool and host memory, before the first swap was timed


class Rates:
    """Medians of the last steps. Seconds and tokens; None before the first observation."""

    def __init__(self) -> None:
        self._prefill: deque[tuple[int, float]] = deque(maxlen=_WINDOW)  # tokens of the step, and seconds a token
        self._decode: deque[float] = deque(maxlen=_WINDOW)  # seconds a step
        self._copy: deque[float] = deque(maxlen=_WINDOW)  # bytes a second

    def observe_step(self, prefill_tokens: int, seconds: float) -> None:
        """A step with that many prompt tokens took so long; without any it was a step of decodes."""
        if not prefill_tokens:
            self._decode.append(seconds)
        else:
            self._prefill.append((prefill_tokens, max(seconds - (self.decode_step or 0.0), 1e-9) / prefill_tokens))

    def observe_copy(self, nbytes: int, seconds: float) -> None:
        self._copy.append(nbytes / max(seconds, 1e-9))

    @property
    def prefill_token(self) -> float | None:
        """Seconds of a prompt token."""
        return _median(seconds for _, seconds in self._prefill) if self._prefill else None

    @property
    def decode_step(self) -> float | None:
        """Seconds of a step of decodes."""
        return _median(self._decode) if self._decode else None

    def certain_prefill_token(self, tokens: int) -> float:
        """Seconds of a prompt token in a step with `tokens` of them; 0 before MIN_SAMPLES steps of at least half that size.

        Small steps say nothing about large ones: their tokens cost many times as much.
        """
        comparable = [seconds for size, seconds in self._prefill if _power(size) >= _power(tokens) - 1]
        return _median(comparable) if len(comparable) >= MIN_SAMPLES else 0.0

    @property
    def certain_decode_step(self) -> float:
        """Seconds of a step of decodes; 0 before MIN_SAMPLES of them."""
        return _median(self._decode) if len(self._decode) >= MIN_SAMPLES else 0.0

    def max_chunk_tokens(self, seconds: float, budget: int) -> int:
        """Tokens of chunks, up to `budget`, for which a step with decodes is predicted to take `seconds` at most; one of few sizes.

        At least _MIN_CHUNK: otherwise prompts would wait for ever on a machine that is too slow.
        """
        if budget <= _MIN_CHUNK:
            return budget
        if not self._prefill:
            return min(budget, _FIRST_CHUNK)
        spare = seconds - (self.decode_step or 0.0)
        if budget * self._chunk_token(budget) <= spare:
            return budget
        size = 1 << (budget.bit_length() - 1)
        while size > _MIN_CHUNK and size * self._chunk_token(size) > spare:
            size //= 2
        return size

    def _chunk_token(self, size: int) -> float:
        """Seconds a token in chunks of about `size`: the median over the steps of the nearest power of two, of two the larger.

        Longer chunks cost less a token, and the window is short: a size that was too slow once is tried again.
        """
        wanted = _power(size)
        nearest = min((_power(tokens) for tokens, _ in self._prefill), key=lambda power: (abs(power - wanted), -power))
        return _median(each for tokens, each in self._prefill if _power(tokens) == nearest)

    @property
    def copy_bandwidth(self) -> float:
        """Bytes a second of a swap."""
        return _median(self._copy) if self._copy else _COPY_GUESS


def _power(tokens: int) -> int:
    """The exponent of the power of two that a step with that many prompt tokens is padded to."""
    return (max(tokens, _MIN_CHUNK) - 1).bit_length()


def _median(numbers: Iterable[float]) -> float:
    """Of one number at least. Python's own is in a module whose imports take 4 ms of every start."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
