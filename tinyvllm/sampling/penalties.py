"""What the sampler remembers of each row on the device: tokens seen, the bias added to logits, tokens allowed. Written by the host.

Rows are those of `Sequence.row`; one row more, the last, is scratch: padding writes to it, its bias stays 0, and it allows every token. The
memory is taken at the first write, since most batches use none of it. Knows what a request asks, not how tokens are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from tinygrad import Tensor, dtypes

from tinyvllm.bridge import upload
from tinyvllm.request import SamplingParams, Sequence


def penalizes(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class SeenTokens:
    """counts [R, V] int32: how often each token is in a row's output; prompted [R, V] uint8: whether it is in the prompt."""

    def __init__(self, R: int, V: int, device: str):
        self.counts = Tensor.zeros(R, V, dtype=dtypes.int32, device=device).contiguous().realize()
        self.prompted = Tensor.zeros(R, V, dtype=dtypes.uint8, device=device).contiguous().realize()

    def write(self, sequence: Sequence) -> None:
        """Start a row from the tokens that the sequence has by now. Later outputs are counted on the device, as they are drawn."""
        V = int(self.counts.shape[1])
        counts = np.bincount(np.asarray(sequence.output_token_ids, dtype=np.int64), minlength=V).astype(np.int32)
        prompted = np.zeros(V, dtype=np.uint8)
        prompted[sequence.prompt_token_ids] = 1
        upload(self.counts, counts, sequence.row * V)
        upload(self.prompted, prompted, sequence.row * V)


class Bias:
    """table [R, V] float32, added to the logits after the penalties."""

    def __init__(self, R: int, V: int, device: str):
        self.table = Tensor.zeros(R, V, dtype=dtypes.float32, device=device).contiguous().realize()

    def write(self, row: int, logit_bias: dict[int, float] | None, withheld: Collection[int]) -> None:
        """A row's bias: `logit_bias`, and -inf for the tokens that must not come yet."""
        V = int(self.table.shape[1])
        bias = np.zeros(V, dtype=np.float32)
        for token, value in (logit_bias or {}).items():
            bias[token] = value
        bias[[token for token in withheld if token < V]] = -np.inf  # a stop id beyond the vocabulary never comes anyway
        upload(self.table, bias, row * V)


def words_of(V: int) -> int:
    """How many 32-bit words hold a bit for each of V tokens."""
    return -(-V // 32)


def restricts(params: SamplingParams) -> bool:
    """Whether some tokens are forbidden outright: by a structure, a list of ids, or words; or by a mark that must come and be drawn."""
    drawn = params.thinking_token_budget is not None and (params.wants_logprobs or penalizes(params))
    return drawn or params.structured_outputs is not None or params.allowed_token_ids is not None or params.bad_words is not None


class Masks:
    """table [R, ceil(V/32)] int32: bit t % 32 of word t // 32 says whether token t is allowed. `host` is the same array as it is sent.

    A row starts from what its request allows all along. Who narrows it further for a step fills `host[row]` and says `send`.
    """

    def __init__(self, R: int, V: int, device: str):
        self._vocab_size = V
        self.host = np.full((R, words_of(V)), -1, dtype=np.int32)
        self.table = Tensor(self.host, device=device).contiguous().realize()
        self._bits = Tensor((1 << np.arange(32, dtype=np.int64)).astype(np.uint32).view(np.int32), device=device).realize()
        self._lasting: dict[int, np.ndarray] = {}  # row -> the words of allowed_token_ids

    def start(self, row: int, allowed: Collection[int] | None) -> None:
        """A new sequence in a row: every token is allowed, or those of `allowed`."""
        self._lasting.pop(row, None)
        if allowed is not None:
            self._lasting[row] = self._bits_of(allowed)
        self.reset(row)
        self.send([row])

    def reset(self, row: int) -> None:
        """The row on the host as it was at its start."""
        self.host[row] = self._lasting.get(row, -1)

    def allow(self, row: int, tokens: Collection[int]) -> None:
        """Let these come too, as far as the row on the host goes."""
        self.host[row] |= self._bits_of(tokens)

    def send(self, rows: Iterable[int], banned: Mapping[int, Collection[int]] | None = None) -> None:
        """Copy rows to the device as they stand on the host, less the tokens `banned` by row; neighbouring rows in one copy.

        What a row's request allows all along stays the most that is allowed.
        """
        ordered = sorted(rows)
        for row in ordered:
            if row in self._lasting:
                self.host[row] &= self._lasting[row]
            if banned and banned.get(row):
                self.host[row] &= ~self._bits_of(banned[row])
        first = 0
        for n, row in enumerate(ordered):
            if n + 1 == len(ordered) or ordered[n + 1] != row + 1:
                upload(self.table, self.host[ordered[first] : row + 1], ordered[first] * self.host.shape[1])
                first = n + 1

    def apply(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Logits [B, V] float32 with -inf for what `rows` [B] int32 of the table do not allow; a buffer, as draws want it."""
        B, V = (int(d) for d in logits.shape)
        words = self.table[rows].reshape(B, -1, 1)
        allowed = (words & self._bits.reshape(1, 1, 32)) != 0
        return allowed.reshape(B, -1)[:, :V].where(logits, -math.inf).contiguous()

    def _bits_of(self, tokens: Collection[int]) -> np.ndarray:
        words = np.zeros(self.host.shape[1], dtype=np.uint32)
        ids = np.fromiter((t for t in tokens if t < self._vocab_size), dtype=np.int64)
        np.bitwise_or.at(words, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
        return words.view(np.int32)
