"""What all drafters that read hidden states share: which sequences may be guessed for, and the shapes of their captures.

After a step, the drafter keeps for each running sequence a row of a device tensor that the next guesses start from. A sequence has guesses
only if that row is of its last computed token, the one before its newest: then the step's states are all that its text has.
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import dataclass

import numpy as np
from tinygrad import Tensor

from tinyvllm.bridge import download
from tinyvllm.errors import ArgumentError
from tinyvllm.request import Sequence
from tinyvllm.runner.prepare import decode_bucket
from tinyvllm.sampling.parameters import SamplingFlags
from tinyvllm.speculate.head_files import MAX_DRAFTS, SPEAKER
from tinyvllm.speculate.picks import guess_flags
from tinyvllm.speculate.protocol import Draft, DraftRequest, StateRows


@dataclass(frozen=True)
class Guessing:
    """A batch to guess for: sequences, the rows that their last states have, and K guesses each. `flags` is what a row of it needs."""

    sequences: list[Sequence]
    rows: list[int]
    K: int
    flags: SamplingFlags

    @property
    def bucket(self) -> int:
        return decode_bucket(len(self.sequences))

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

    def __init__(self, max_drafts: int):
        if not 1 <= max_drafts <= MAX_DRAFTS:
            raise ArgumentError(f"{SPEAKER}: num_speculative_tokens={max_drafts} must be from 1 to {MAX_DRAFTS} for {self.method} heads")
        self.max_drafts = max_drafts
        self._kept: dict[int, tuple[int, int]] = {}  # by sequence: the row of its last state, and that token's position

    def observe(self, sequence: Sequence, num_new: int) -> None:
        """Nothing: a step's states come after its tokens were appended."""

    def forget(self, sequence: Sequence) -> None:
        self._kept.pop(sequence.sequence_id, None)

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
            flags |= guess_flags(sequence)
        K = min(self.max_drafts, max(requests[n].max_drafts for n in ready))
        rows = [self._kept[sequence.sequence_id][0] for sequence in sequences]
        tokens, confidences = (np.stack([download(part) for part in parts]) for parts in self._guess(Guessing(sequences, rows, K, flags)))
        for b, n in enumerate(ready):
            k = min(K, requests[n].max_drafts)
            drafts[n] = Draft(tokens[:k, b].tolist(), np.clip(np.nan_to_num(confidences[:k, b]), 0, 1).tolist())
        return drafts

    def _is_ready(self, sequence: Sequence) -> bool:
        kept = self._kept.get(sequence.sequence_id)
        return kept is not None and kept[1] == len(sequence) - 2

    def _keep(self, states: Tensor, rows: Row[StateRows]) -> None:
        """Store a row for each of `rows`, in their order, that of its last token."""
        raise NotImplementedError

    def _guess(self, batch: Guessing) -> tuple[Row[Tensor], Row[Tensor]]:
        """Tokens int32 [bucket] of each of K guesses and their probabilities float32 [bucket], in buffers."""
        raise NotImplementedError
