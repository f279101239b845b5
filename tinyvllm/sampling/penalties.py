"""What the sampler remembers of each row on the device: tokens seen, and the bias added to logits. Written by the host a row at a time.

Rows are those of `Sequence.row`; one row more, the last, is scratch: padding writes to it, and its bias stays 0. The memory is taken
at the first write, since most batches use none of it. Knows what a request asks, not how tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from tinygrad import Tensor, dtypes

from tinyvllm.ops.launch import upload
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
    """table [R, V] float32, added to the logits after the penalties. Grammars and processors of logits have their place here too."""

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
