"""What the sampler keeps for each row on the device: tokens seen, the bias added to logits, tokens allowed. Written by the host.

Rows are those of `Sequence.row`. One more, the last, is scratch: padding writes to it, its bias stays 0, and it allows every token. The
memory is allocated at the first write, since most batches use none of it. Knows what a request wants, not how tokens are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from tinygrad import Tensor, dtypes

from tinyvllm.bridge import upload
from tinyvllm.request import SamplingParams, Sequence


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def needs_mask(params: SamplingParams) -> bool:
    """Whether some tokens are forbidden: by a structure, a list of ids, or words; or by a mark that must come next and must be drawn."""
    forced_draw = params.thinking_token_budget is not None and (params.wants_logprobs or has_penalties(params))
    return forced_draw or params.structured_outputs is not None or params.allowed_token_ids is not None or params.bad_words is not None


class TokenCounts:
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


class LogitBias:
    """table [R, V] float32, added to the logits after the penalties."""

    def __init__(self, R: int, V: int, device: str):
        self.table = Tensor.zeros(R, V, dtype=dtypes.float32, device=device).contiguous().realize()

    def write(self, row: int, logit_bias: dict[int, float] | None, withheld: Collection[int]) -> None:
        """A row's bias: `logit_bias`, and -inf for the `withheld` tokens, which must not be drawn yet."""
        V = int(self.table.shape[1])
        bias = np.zeros(V, dtype=np.float32)
        for token, value in (logit_bias or {}).items():
            bias[token] = value
        bias[[token for token in withheld if token < V]] = -np.inf  # a stop id beyond the vocabulary is never drawn
        upload(self.table, bias, row * V)


def mask_words(V: int) -> int:
    """How many 32-bit words hold a bit for each of V tokens."""
    return -(-V // 32)


class TokenMasks:
    """table [R, ceil(V/32)] int32: bit t % 32 of word t // 32 says whether token t is allowed. `host` is the same array on the host.

    A row starts from what its request always allows. To narrow it further for a step, fill `host[row]` and call `send`.
    """

    def __init__(self, R: int, V: int, device: str):
        self._vocab_size = V
        self.host = np.full((R, mask_words(V)), -1, dtype=np.int32)
        self.table = Tensor(self.host, device=device).contiguous().realize()
        self._bits = Tensor((1 << np.arange(32, dtype=np.int64)).astype(np.uint32).view(np.int32), device=device).realize()
        self._always: dict[int, np.ndarray] = {}  # row -> the words of allowed_token_ids

    def start(self, row: int, allowed: Collection[int] | None) -> None:
        """A new sequence in a row: every token is allowed, or those of `allowed`."""
        self._always.pop(row, None)
        if allowed is not None:
            self._always[row] = self._words_of(allowed)
        self.reset(row)
        self.send([row])

    def reset(self, row: int) -> None:
        """Set the row on the host to what it was at its start."""
        self.host[row] = self._always.get(row, -1)

    def allow(self, row: int, tokens: Collection[int]) -> None:
        """Allow these tokens too, in the row on the host."""
        self.host[row] |= self._words_of(tokens)

    def send(self, rows: Iterable[int], banned: Mapping[int, Collection[int]] | None = None) -> None:
        """Copy rows from the host to the device, without the tokens `banned` by row; adjacent rows in one copy.

        A row never allows more than its request always does.
        """
        ordered = sorted(rows)
        for row in ordered:
            if row in self._always:
                self.host[row] &= self._always[row]
            if banned and banned.get(row):
                self.host[row] &= ~self._words_of(banned[row])
        first = 0
        for n, row in enumerate(ordered):
            if n + 1 == len(ordered) or ordered[n + 1] != row + 1:
                upload(self.table, self.host[ordered[first] : row + 1], ordered[first] * self.host.shape[1])
                first = n + 1

    def apply(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Logits [N, V] float32 with -inf for tokens that `rows` [N] int32 of the table do not allow; a buffer, as draws need it."""
        N, V = (int(d) for d in logits.shape)
        words = self.table[rows].reshape(N, -1, 1)
        allowed = (words & self._bits.reshape(1, 1, 32)) != 0
        return allowed.reshape(N, -1)[:, :V].where(logits, -math.inf).contiguous()

    def _words_of(self, tokens: Collection[int]) -> np.ndarray:
        words = np.zeros(self.host.shape[1], dtype=np.uint32)
        ids = np.fromiter((t for t in tokens if t < self._vocab_size), dtype=np.int64)
        np.bitwise_or.at(words, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
        return words.view(np.int32)
