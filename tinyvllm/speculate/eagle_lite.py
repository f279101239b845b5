"""EAGLE-lite: the next hidden states extrapolated from the last two, through the model's own head. Needs no training and no cache.

h_(t+1) = h_t + alpha (h_t - h_(t-1)), so h_(t+k) = h_t + (alpha + alpha^2 + ... + alpha^k) (h_t - h_(t-1)). The states are those after the
final norm. The two rows of a sequence are kept on the host: 2 E numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Row

import numpy as np
from tinygrad import Tensor

from tinyvllm.bridge import Captured, copied, download, spans, upload
from tinyvllm.errors import ArgumentError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.ops.linear import linear
from tinyvllm.request import Sequence
from tinyvllm.runner.prepare import Shape
from tinyvllm.runner.runner import Runner
from tinyvllm.sampling.parameters import SamplingFlags
from tinyvllm.speculate.head_files import SPEAKER
from tinyvllm.speculate.last_states import Guessing, LastStates
from tinyvllm.speculate.picks import Guesses, Picks
from tinyvllm.speculate.protocol import FINAL, StateRows

DEFAULT_ALPHA = 0.5


@dataclass(frozen=True)
class _Pair:
    """The states [E] of a sequence's last computed token and of the one before, and the former's position."""

    last: np.ndarray
    before: np.ndarray
    position: int


@dataclass(frozen=True)
class _Guesser:
    """The captured guesses from extrapolated states [K B, E]."""

    states: Tensor
    count: Tensor  # int32 [1]
    picks: Picks
    guesses: Guesses
    captured: Captured


class EagleLiteDrafter(LastStates):
    """Drafts by extrapolated states; `alpha` is how much of the last change a state makes again."""

    method = "eagle_lite"
    state_layers: tuple[int, ...] = (FINAL,)

    def __init__(self, runner: Runner, max_drafts: int, alpha: float = DEFAULT_ALPHA):
        super().__init__(max_drafts, runner.max_num_seqs)
        if not (math.isfinite(alpha) and abs(alpha) <= 1):
            raise ArgumentError(f"{SPEAKER}: alpha={alpha} of eagle_lite must be a number from -1 to 1")
        self._head, self._E, self._V = runner.model.weights.head, runner.config.dim, runner.config.vocab_size
        self._device, self._alpha = runner.device, alpha
        self._pairs: dict[int, _Pair] = {}
        self._order: list[int] = []  # sequences by the row of their states
        self._guessers: dict[tuple[int, int, SamplingFlags], _Guesser] = {}

    def forget(self, sequence: Sequence) -> None:
        super().forget(sequence)
        self._pairs.pop(sequence.sequence_id, None)

    def _keep(self, states: Tensor, rows: Row[StateRows]) -> None:
        self._order = [each.sequence.sequence_id for each in rows]
        for each in rows:
            first = each.first_row + max(0, each.count - 2)
            places = [(row * self._E, self._E) for row in range(first, each.first_row + each.count)]
            *before, last = (download(part) for part in spans(states, places))
            position, known = each.start + each.count - 1, self._pairs.get(each.sequence.sequence_id)
            if known is not None and known.position == position - 1:
                before = before or [known.last]
            self._pairs[each.sequence.sequence_id] = _Pair(last, before[0] if before else last, position)

    def _capture_keep(self, states: Tensor, shape: Shape, R: int) -> None:
        """Nothing: the rows are kept on the host."""

    def _drop(self) -> None:
        self._guessers.clear()

    def _guess(self, batch: Guessing) -> tuple[np.ndarray, np.ndarray]:
        B, K = batch.bucket, batch.K
        if (B, K, batch.flags) not in self._guessers:
            self._guessers[B, K, batch.flags] = self._new_guesser(batch)
        guesser = self._guessers[B, K, batch.flags]
        pairs = [self._pairs[sequence.sequence_id] for sequence in batch.sequences]
        states = np.zeros((K, B, self._E), np.float32)
        for b, pair in enumerate(pairs):
            factors = np.cumsum(self._alpha ** np.arange(1, K + 1), dtype=np.float32)
            states[:, b] = pair.last + factors[:, None] * (pair.last - pair.before)
        upload(guesser.states, states.reshape(K * B, self._E))
        guesser.picks.place(batch.sequences)
        guesser.captured()
        return guesser.guesses.read()

    def _new_guesser(self, batch: Guessing) -> _Guesser:
        B, K = batch.bucket, batch.K
        states = copied(np.zeros((K * B, self._E), np.float32), self._device)
        count = copied(np.array([K * B], np.int32), self._device)
        picks, guesses = Picks(B, K, batch.flags, self._V, self._device), Guesses(K, B, self._device)

        def function() -> Tensor:
            logits = linear(states, self._head, count).contiguous().realize()
            for k in range(K):
                guesses.put(k, *picks.pick(k, logits[k * B : (k + 1) * B].contiguous().realize(), None))
            return logits

        return _Guesser(states, count, picks, guesses, Captured(function))
