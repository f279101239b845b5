"""What all drafters that read hidden states share: which sequences may be guessed for, and the shapes of their captures.

After a step, the drafter keeps for each running sequence a row of a device tensor that the next guesses start from. A sequence has guesses
only if that row is of its last computed token, the one before its newest: then the step's states are all that its text has.
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from itertools import product

import numpy as np
from tinygrad import Tensor

from tinyvllm.errors import ArgumentError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import Sequence
from tinyvllm.runner.prepare import Shape, decode_bucket, power_bucket
from tinyvllm.runner.warmup import PLAIN_DRAWS
from tinyvllm.sampling.parameters import SamplingFlags
from tinyvllm.speculate.head_files import MAX_DRAFTS, SPEAKER
from tinyvllm.speculate.picks import guess_flags
from tinyvllm.speculate.protocol import Draft, DraftRequest, StateRows

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)  # numbers of guesses that are captured, with `max_drafts`: a guess too many costs less than a capture
FEW_SEQUENCES = 4  # up to which steps with less than `max_drafts` drafts are captured ahead of time, too


@dataclass(frozen=True)
class Guessing:
    """A batch to guess for: sequences, the rows that their last states have, and K guesses each. `flags` is what a row of it needs.

    `bucket` is the number of rows, padding included.
    """

    sequences: list[Sequence]
    rows: list[int]
    K: int
    flags: SamplingFlags
    bucket: int

    @property
    def padded_rows(self) -> np.ndarray:
        """int32 [bucket]: the rows; padding repeats row 0."""
        out = np.zeros(self.bucket, np.int32)
        out[: len(self.rows)] = self.rows
        return out


class LastStates:
    """Base of drafters: `_keep` stores the rows of a step, `_guess` makes tokens of them."""

    method = ""
    looks_up = False
    state_layers: tuple[int, ...] = ()

    def __init__(self, max_drafts: int, max_num_seqs: int):
        if not 1 <= max_drafts <= MAX_DRAFTS:
            raise ArgumentError(f"{SPEAKER}: num_speculative_tokens={max_drafts} must be from 1 to {MAX_DRAFTS} for {self.method} heads")
        self.max_drafts, self._max_num_seqs = max_drafts, decode_bucket(max_num_seqs)
        self._guessed: set[int] = set()  # numbers of sequences for which guesses were captured ahead of time
        self._flags: dict[int, SamplingFlags] = {}  # by sequence
        self._kept: dict[int, tuple[int, int]] = {}  # by sequence: the row of its last state, and that token's position

    def observe(self, sequence: Sequence, num_new: int) -> None:
        """Nothing: a step's states come after its tokens were appended."""

    def forget(self, sequence: Sequence) -> None:
        self._kept.pop(sequence.sequence_id, None)
        self._flags.pop(sequence.sequence_id, None)

    def observe_states(self, states: Tensor, rows: Row[StateRows]) -> None:
        self._kept.clear()
        rows = [each for each in rows if not each.sequence.finished]
        if not rows:
            return
        self._keep(states, rows)
        # a chunk of a prompt has more known tokens after it, and no guesses
        last = {each.sequence.sequence_id: (r, each.start + each.count - 1) for r, each in enumerate(rows)}
        self._kept.update(last)

    def propose(self, requests: Row[DraftRequest]) -> list[Draft]:
        drafts = [Draft() for _ in requests]
        ready = [n for n, request in enumerate(requests) if self._is_ready(request.sequence)]
        if not ready:
            return drafts
        sequences = [requests[n].sequence for n in ready]
        flags = SamplingFlags()
        for sequence in sequences:
            flags |= self._flags_of(sequence)
        K = self._count(max(requests[n].max_drafts for n in ready))
        rows = [self._kept[sequence.sequence_id][0] for sequence in sequences]
        batch = Guessing(sequences, rows, K, flags, decode_bucket(len(sequences)))
        tokens, probabilities = self._guess(batch)
        for b, n in enumerate(ready):
            k = min(K, requests[n].max_drafts)
            drafts[n] = Draft(tokens[:k, b].tolist(), probabilities[:k, b].tolist())
        return drafts

    def capture(self, shape: Shape, states: Tensor | None) -> None:
        """Keep rows of such a step, and guess from them: with the usual K for any number of sequences, with smaller ones for few."""
        assert states is not None, "the runner keeps the states of a drafter's layers"
        for R in self._numbers_of_sequences(shape):
            self._capture_keep(states, shape, R)
            if R in self._guessed:
                continue
            self._guessed.add(R)
            counts = {self.max_drafts} if R > FEW_SEQUENCES else {self._count(k) for k in range(1, self.max_drafts + 1)}
            for K, flags in product(sorted(counts), PLAIN_DRAWS):
                self._guess(Guessing([], [], K, flags, R))
        self._kept.clear()

    def drop_captures(self) -> None:
        self._guessed.clear()
        self._kept.clear()
        self._drop()

    def _numbers_of_sequences(self, shape: Shape) -> list[int]:
        """Of how many sequences, padding included, rows are kept after steps of this shape, without drafts or with.

        Near its last token a sequence has fewer drafts, and the controller may want fewer of all: of few sequences any number is expected.
        """
        if shape.chunks:
            return [decode_bucket(shape.sequences)]
        K, T = self.max_drafts, shape.decodes
        drafted = [n for n in range(1, FEW_SEQUENCES + 1) if power_bucket(n + 1) <= T <= power_bucket(n * (K + 1))]
        drafted += [n for n in range(FEW_SEQUENCES + 1, T) if power_bucket(n * (K + 1)) == T]
        return sorted({decode_bucket(n) for n in (*drafted, T) if n <= self._max_num_seqs})

    def _count(self, wanted: int) -> int:
        """How many guesses to make where `wanted` are asked for."""
        return min(self.max_drafts, next((count for count in _COUNTS if count >= wanted), self.max_drafts))

    def _is_ready(self, sequence: Sequence) -> bool:
        kept = self._kept.get(sequence.sequence_id)
        return kept is not None and kept[1] == len(sequence) - 2

    def _flags_of(self, sequence: Sequence) -> SamplingFlags:
        if (known := self._flags.get(sequence.sequence_id)) is None:
            known = self._flags[sequence.sequence_id] = guess_flags(sequence)
        return known

    def _capture_keep(self, states: Tensor, shape: Shape, R: int) -> None:
        """Capture what `_keep` runs after a step of this shape, for R sequences."""
        raise NotImplementedError

    def _drop(self) -> None:
        """Forget all captures."""
        raise NotImplementedError

    def _keep(self, states: Tensor, rows: Row[StateRows]) -> None:
        """Store a row for each of `rows`, in their order, that of its last token."""
        raise NotImplementedError

    def _guess(self, batch: Guessing) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32 [K, bucket] of K guesses, and their probabilities float32 [K, bucket]."""
        raise NotImplementedError
