"""From the logits of a head to its guess: the most probable token, or the draw that the target's own noise makes of them.

A request that samples draws token t by adding Gumbel noise of (seed, position) to its logits (ops/sample.py). A guess is drawn from the
head's logits with the same noise at the same position, so that it is the target's token as often as the two distributions allow: at least
(1 - TV) / (1 + TV) with their total variation TV (Daliri et al. 2024, arXiv:2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import replace

import numpy as np
from tinygrad import Tensor, dtypes

from tinyvllm.bridge import copied, download, resident, spans, upload
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.ops import sample as ops
from tinyvllm.request import SamplingParams, Sequence
from tinyvllm.runner.arrays import aligned
from tinyvllm.sampling.draw import Draw, Tables
from tinyvllm.sampling.parameters import Column, SamplingFlags, flags_of, parameter_row

_GREEDY = SamplingParams(temperature=0.0)


def guess_flags(sequence: Sequence) -> SamplingFlags:
    """What a sequence's guesses need. Penalties, bias and masks are left to the target: a guess that they change is not accepted."""
    return replace(flags_of(sequence.params), penalized=False, biased=False, masked=False)


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """The tokens that heads can guess: `targets` int32 [V'] are their ids in the target, `index` int32 [V] the inverse, -1 for others."""

    targets: Tensor
    index: Tensor

    @classmethod
    def of(cls, targets: np.ndarray, vocab_size: int, device: str) -> DraftVocabulary:
        index = np.full(vocab_size, -1, np.int32)
        index[targets] = np.arange(len(targets), dtype=np.int32)
        return cls(copied(targets.astype(np.int32), device), copied(index, device))


class Picks:
    """Turns the logits of `B` rows and `K` guesses into tokens, inside of a captured function.

    `flags` is what at least one row needs; `vocabulary` is the heads' own where it is not the target's. `place` fills in the rows'
    parameters before a replay.
    """

    def __init__(self, B: int, K: int, flags: SamplingFlags, vocab_size: int, device: str, vocabulary: DraftVocabulary | None = None):
        self.flags, self._V, self._vocabulary = flags, vocab_size, vocabulary
        if not flags.sampled:
            return
        width = len(Column)
        size = aligned(B * width)
        self._flat = np.zeros((K, size), np.int32)
        self._host = self._flat[:, : B * width].reshape(K, B, width)
        self._device = copied(self._flat, device)
        lines = spans(self._device, [(k * size, B * width) for k in range(K)])  # one a guess: a draw advances the positions in its own
        steps, tables = ops.search_steps(device), Tables(None, None, None, 0)
        self._draws = [Draw(flags, tables, rows.reshape(B, width), None, steps) for rows in lines]

    def place(self, sequences: Row[Sequence]) -> None:
        """Row b guesses the next tokens of sequences[b]; further rows are padding."""
        if not self.flags.sampled:
            return
        for b, sequence in enumerate(sequences):
            row = parameter_row(sequence.params, guess_flags(sequence), 0, 0, self._V)
            self._host[:, b] = row
            self._host[:, b, Column.POSITION] = len(sequence.output_token_ids) + np.arange(len(self._host))
        self._host[:, len(sequences) :] = parameter_row(_GREEDY, SamplingFlags(), 0, 0, self._V)
        upload(self._device, self._flat)

    def pick(self, k: int, logits: Tensor, best: Tensor | None) -> tuple[Tensor, Tensor]:
        """The target's tokens int32 [B] of guess k and the head's probability of each float32 [B]; logits [B, V'] is a realized buffer.

        `best` are the tokens of the largest logits where a kernel has found them.
        """
        if self.flags.sampled:
            tokens = self._draws[k].run(self._spread(logits)).maximum(0).contiguous()
            own = tokens if self._vocabulary is None else self._vocabulary.index[tokens].maximum(0)
            return tokens, _probability(logits, own)
        own = (ops.argmax(logits) if best is None else best).maximum(0).contiguous()
        tokens = own if self._vocabulary is None else self._vocabulary.targets[own].contiguous()
        return tokens, _probability(logits, own)

    def _spread(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary: the noise of a token goes by its id there. Realized, as a draw wants them."""
        if self._vocabulary is None:
            return logits
        index = self._vocabulary.index
        return (index < 0).where(-float("inf"), logits[:, index.maximum(0)]).contiguous().realize()


class Guesses:
    """K guesses of B rows, tokens and probabilities, in one buffer that a captured function writes and the host reads at once."""

    def __init__(self, K: int, B: int, device: str):
        self._K, self._B, self._pitch = K, B, aligned(B)
        self._buffer = copied(np.zeros((2, K, self._pitch), np.int32), device)
        self._memory = resident(self._buffer)
        self._rows = spans(self._buffer, [(row * self._pitch, B) for row in range(2 * K)])

    def put(self, k: int, token: Tensor, probability: Tensor) -> None:
        """Guess k of each row, within a captured function: int32 [B] and float32 [B]."""
        own = self._rows[k], self._rows[self._K + k]
        Tensor.realize(own[0].assign(token), own[1].assign(probability.bitcast(dtypes.int32)))

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32 [K, B] and probabilities float32 [K, B], once they are there."""
        found = download(self._buffer) if self._memory is None else self._memory.copy()
        tokens, probabilities = found[:, :, : self._B]
        return tokens, probabilities.view(np.float32)


def _probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """softmax(logits)[token] of each row, float32 [B]; 0 where it is no number.

    Summed in parts whose elements are side by side, as `_total` in ops/sample.py: a CPU computes 2048 exponentials in 0.6 us, else in 6.4.
    """
    B, V = (int(d) for d in logits.shape)
    parts = 32 if V % 32 == 0 else 1
    drawn = logits.gather(1, tokens.cast(dtypes.int32).reshape(B, 1)).contiguous()
    share = (logits - drawn).exp().reshape(B, parts, V // parts).sum(1).contiguous().sum(1).reciprocal()
    return (share > 0).where(share, 0.0).contiguous()
