"""How fast this engine has been recently: what waits are predicted from, and what preemption weighs."""

from __future__ import annotations

from collections import deque
from statistics import median

_WINDOW = 32  # observations; the median over them ignores a step that was captured or compiled
_COPY_GUESS = 4e9  # bytes a second between the pool and host memory, before the first swap was timed


class Rates:
    """Medians of the last steps. Seconds and tokens; None before the first observation."""

    def __init__(self) -> None:
        self._prefill: deque[float] = deque(maxlen=_WINDOW)  # seconds a token
        self._decode: deque[float] = deque(maxlen=_WINDOW)  # seconds a step
        self._copy: deque[float] = deque(maxlen=_WINDOW)  # bytes a second

    def observe_step(self, prefill_tokens: int, seconds: float) -> None:
        """A step with that many prompt tokens took so long; without any it was a step of decodes."""
        if not prefill_tokens:
            self._decode.append(seconds)
        else:
            self._prefill.append(max(seconds - (self.decode_step or 0.0), 1e-9) / prefill_tokens)

    def observe_copy(self, nbytes: int, seconds: float) -> None:
        self._copy.append(nbytes / max(seconds, 1e-9))

    @property
    def prefill_token(self) -> float | None:
        """Seconds of a prompt token."""
        return median(self._prefill) if self._prefill else None

    @property
    def decode_step(self) -> float | None:
        """Seconds of a step of decodes."""
        return median(self._decode) if self._decode else None

    @property
    def copy_bandwidth(self) -> float:
        """Bytes a second of a swap."""
        return median(self._copy) if self._copy else _COPY_GUESS
