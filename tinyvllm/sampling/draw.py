"""The graph of one draw: tokens from logits, on the device, for a batch of rows with different parameters."""

from __future__ import annotations

import math

import numpy as np
from tinygrad import Tensor, dtypes

from tinyvllm.bridge import alias, copied, scatter_add
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.ops import sample as ops
from tinyvllm.sampling.parameters import Column, SamplingFlags
from tinyvllm.sampling.penalties import LogitBias, TokenCounts, TokenMasks


@dataclass(frozen=True)
class Tables:
    """Per-row tables that a draw reads, those that its flags need. `scratch_row` is the row that padding points to."""

    counts: TokenCounts | None
    bias: LogitBias | None
    masks: TokenMasks | None
    scratch_row: int


def call_draw(V: int, neutral_row: int, device: str, flags: SamplingFlags) -> None:
    """Call the op of a sampled draw with the filters of `flags`, for the kernel that it needs (`collecting_kernels`)."""
    parameters = Tensor.empty(1, len(Column), dtype=dtypes.int32, device=device)
    count = Tensor.empty(1, dtype=dtypes.int32, device=device)
    inputs = ops.DrawInputs(parameters, count, neutral_row, sampled=True, top_k=flags.top_k, top_p=flags.top_p, min_p=flags.min_p)
    ops.draw(Tensor.empty(1, V, dtype=dtypes.float32, device=device), inputs)


class Draw:
    """Draws for N rows at once. Everything but the logits is in persistent buffers, so that a captured draw can be replayed.

    `parameters` int32 [N, 12] are the rows of sampling/parameters.py, `mask_rows` int32 [N] the rows of the masks' table.
    """

    def __init__(self, flags: SamplingFlags, tables: Tables, parameters: Tensor, mask_rows: Tensor | None, search_steps: list[Tensor]):
        self._flags, self._tables, self._parameters, self._mask_rows, self._search_steps = (
            flags,
            tables,
            parameters,
            mask_rows,
            search_steps,
        )
        self._N, self._device = int(parameters.shape[0]), str(parameters.device)
        self._count = copied(np.array([self._N], np.int32), self._device)
        self._column = {c: parameters[:, c : c + 1] for c in Column}
        self._float = {c: self._column[c].bitcast(dtypes.float32) for c in Column}
        self._bits = {c: self._column[c].bitcast(dtypes.uint32) for c in Column}

    def run(self, logits: Tensor) -> Tensor:
        """Tokens int32 [N] from logits float32 [N, V], a buffer. Advances the positions and counts the tokens drawn."""
        if self._tables.masks is not None and self._mask_rows is not None:  # first: -inf stays -inf whatever penalties and bias do
            logits = self._tables.masks.apply(logits, self._mask_rows)
        tokens = self._by_kernel(logits)
        return self._by_reference(logits) if tokens is None else tokens.realize()

    def _by_kernel(self, logits: Tensor) -> Tensor | None:
        """The whole draw and its side effects in one kernel, or None if there is none."""
        flags, tables = self._flags, self._tables
        counts = (tables.counts.counts, tables.counts.prompted) if tables.counts is not None else None
        bias = tables.bias.table if tables.bias is not None else None
        filters = {"top_k": flags.top_k, "top_p": flags.top_p, "min_p": flags.min_p}
        inputs = ops.DrawInputs(self._parameters, self._count, tables.scratch_row, flags.sampled, **filters, seen=counts, bias=bias)
        return ops.draw(logits, inputs)

    def _by_reference(self, logits: Tensor) -> Tensor:
        logits = scores = self._adjust(logits)
        if self._flags.sampled:
            key = self._bits[Column.SEED_LOW], self._bits[Column.SEED_HIGH], self._bits[Column.POSITION]
            scores = ops.perturb(logits, self._float[Column.INVERSE_TEMPERATURE], *key)
        if self._flags.filtered:
            scores = (logits < self._threshold(logits)).where(-math.inf, scores)
        tokens = ops.argmax(scores).contiguous()
        Tensor.realize(tokens, *self._side_effects(tokens))
        return tokens

    def _adjust(self, logits: Tensor) -> Tensor:
        """Penalties and bias."""
        counts, bias = self._tables.counts, self._tables.bias
        if counts is not None:
            rows = self._parameters[:, Column.SEEN_ROW]
            scales = self._float[Column.REPETITION], self._float[Column.PRESENCE], self._float[Column.FREQUENCY]
            logits = ops.penalize(logits, counts.counts[rows], counts.prompted[rows], *scales)
        if bias is not None:
            logits = logits + bias.table[self._parameters[:, Column.BIAS_ROW]]
        return logits.contiguous() if self._flags.penalized or self._flags.biased else logits

    def _threshold(self, logits: Tensor) -> Tensor:
        """The lowest logit that each row's filters keep, [N, 1]."""
        flags = self._flags
        lowest = Tensor.full((self._N, 1), -math.inf, device=self._device)
        peaks = ops.peak(logits) if flags.min_p or flags.top_p else lowest
        if flags.min_p:
            lowest = peaks + self._float[Column.MIN_P]
        if flags.top_k:
            lowest = lowest.maximum(ops.top_k_threshold(logits, self._column[Column.TOP_K], self._search_steps))
        if flags.top_p:
            inverse, top_p = self._float[Column.INVERSE_TEMPERATURE], self._column[Column.TOP_P].cast(dtypes.int64)
            lowest = ops.top_p_threshold(logits, peaks, lowest, inverse, top_p, self._search_steps)
        return lowest.contiguous()

    def _side_effects(self, tokens: Tensor) -> list[Tensor]:
        """The next draw's positions, and the tokens counted."""
        effects = []
        if self._flags.sampled:
            # Computed from the tokens, so that nothing reads the positions afterwards; and written through an alias, because tinygrad
            # would change a copy of a tensor that this step also reads.
            columns = (tokens < -1).where(0, Column.POSITION).cast(dtypes.int32).contiguous()
            effects.append(scatter_add(alias(self._parameters), ops.row_numbers(self._N, self._device), columns))
        if self._tables.counts is not None:
            rows = self._parameters[:, Column.SEEN_ROW].contiguous()
            effects.append(scatter_add(self._tables.counts.counts, rows, tokens.maximum(0).contiguous()))
        return effects
