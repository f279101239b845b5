"""From logits to tokens for a batch: each row drawn as its sequence asks, in one captured step on the device.

Knows sequences and their parameters, not how logits came about nor what the tokens mean. What a row needs is reduced once, at `join`,
to a line of twelve 32-bit numbers; a step gathers the lines, fills in the position, copies them to the device and replays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from tinygrad import Tensor, dtypes

from tinyvllm.bridge import Captured, CapturedCall, alias, download, scatter_add, spans, upload
from tinyvllm.errors import ArgumentError
from tinyvllm.ops import sample as ops
from tinyvllm.request import Logprob, SamplingParams, Sequence
from tinyvllm.sampling.logprobs import logprobs_of
from tinyvllm.sampling.penalties import Bias, Masks, SeenTokens, penalizes, restricts

COLDEST = 1e-5  # temperatures below it are greedy: logits divided by less leave float32


class Column(IntEnum):
    """The line of a row: 32-bit integers, and float32 by their bits."""

    SEEN_ROW = 0  # of the tables in penalties.py; the scratch row for sequences that need none
    BIAS_ROW = 1
    SEED_LOW = 2
    SEED_HIGH = 3
    POSITION = 4  # number of output tokens before this one
    INVERSE_TEMPERATURE = 5  # float; 0 is greedy
    TOP_K = 6  # V is off
    TOP_P = 7  # in units of 1 / TOP_P_ONE, rounded down; TOP_P_ONE is off
    MIN_P = 8  # float: how far below the largest logit a token may be, temperature * log(min_p); -inf is off
    REPETITION = 9  # float
    PRESENCE = 10  # float
    FREQUENCY = 11  # float


@dataclass(frozen=True)
class SamplingFlags:
    """What at least one row of a batch needs, and therefore what its step computes. All off is the plain argmax."""

    sampled: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalized: bool = False
    biased: bool = False
    masked: bool = False

    def __or__(self, other: SamplingFlags) -> SamplingFlags:
        return SamplingFlags(*(a or b for a, b in zip(_fields(self), _fields(other), strict=True)))

    def __bool__(self) -> bool:
        return any(_fields(self))

    @property
    def filtered(self) -> bool:
        return self.top_k or self.top_p or self.min_p


def _fields(flags: SamplingFlags) -> tuple[bool, ...]:
    return (flags.sampled, flags.top_k, flags.top_p, flags.min_p, flags.penalized, flags.biased, flags.masked)


def flags_of(params: SamplingParams) -> SamplingFlags:
    """What one sequence needs; `biased` as far as logit_bias goes. Filters are nothing to a greedy row."""
    sampled = params.temperature >= COLDEST
    return SamplingFlags(
        sampled=sampled,
        top_k=sampled and params.top_k > 0,
        top_p=sampled and params.top_p < 1.0,
        min_p=sampled and params.min_p > 0.0,
        penalized=penalizes(params),
        biased=bool(params.logit_bias),
        masked=restricts(params),
    )


class Sampler:
    """Draws tokens. Rows 0 to max_num_seqs - 1 are handed out by whoever admits sequences; `join` and `leave` follow that.

    A row's token is a function of its logits, parameters, seed, position in the output and the tokens so far: not of its neighbours,
    its place in the batch, or what their parameters make the step compute.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, device: str):
        self.vocab_size, self.device = vocab_size, device
        self._scratch = max_num_seqs
        self._lines = np.zeros((max_num_seqs + 1, len(Column)), dtype=np.int32)
        self._lines[:] = self._line(SamplingParams(temperature=0.0), self._scratch, SamplingFlags())
        self._flags = [SamplingFlags()] * (max_num_seqs + 1)
        self._withheld: dict[int, frozenset[int]] = {}  # row -> tokens that min_tokens keeps away for now
        self._inputs: dict[int, tuple[np.ndarray, Tensor]] = {}  # B -> lines on the host and on the device, [B, columns]
        self._changes = 0  # of lines and flags
        self._laid: dict[int, tuple[int, SamplingFlags]] = {}  # B -> changes so far, and flags, when lines were laid out
        self._on_device: dict[int, np.ndarray] = {}  # B -> the lines as they are there: each draw moves the positions on
        self._steps: dict[tuple[int, SamplingFlags], Captured] = {}
        self._functions: dict[tuple[int, SamplingFlags], Callable[[Tensor], Tensor]] = {}
        self._search_steps = ops.search_steps(device)
        self._seen: SeenTokens | None = None
        self._bias: Bias | None = None
        self._masks: Masks | None = None
        self._mask_rows: dict[int, tuple[np.ndarray, Tensor]] = {}  # B -> rows of the table of masks on the host and on the device, [B]

    def join(self, sequence: Sequence, eos_ids: Collection[int]) -> None:
        """Take in a sequence whose `row` has been given, at admission and again after preemption, with the output it has."""
        params, row, flags = sequence.params, sequence.row, flags_of(sequence.params)
        if flags.sampled and params.seed is None:
            raise ArgumentError(f"sampler: sequence {sequence.sequence_id} is sampled and has no seed; draw one with params.with_seed")
        self._withheld.pop(row, None)
        if len(sequence.output_token_ids) < params.min_tokens:
            self._withheld[row] = frozenset(params.stop_token_ids or ()) | frozenset(() if params.ignore_eos else eos_ids)
            flags |= SamplingFlags(biased=True)
        if flags.penalized:
            self._seen = self._seen or SeenTokens(self._scratch + 1, self.vocab_size, self.device)
            self._seen.write(sequence)
        if flags.biased:
            self._bias = self._bias or Bias(self._scratch + 1, self.vocab_size, self.device)
            self._bias.write(row, params.logit_bias, self._withheld.get(row, ()))
        if flags.masked:
            self._masks = self._masks or Masks(self._scratch + 1, self.vocab_size, self.device)
            self._masks.start(row, params.allowed_token_ids)
        self._flags[row] = flags
        self._lines[row] = self._line(params, row, flags)
        self._changes += 1

    def leave(self, row: int) -> None:
        """The sequence of this row has finished or was preempted."""
        self._withheld.pop(row, None)
        self._flags[row] = SamplingFlags()
        self._lines[row] = self._lines[self._scratch]
        self._changes += 1

    def flags(self, sequences: list[Sequence]) -> SamplingFlags:
        """What a step with these sequences has to compute."""
        distinct = {self._flags[sequence.row] for sequence in sequences}
        flags = distinct.pop() if distinct else SamplingFlags()
        for other in distinct:
            flags |= other
        return flags

    def prepare(self, sequences: list[Sequence], B: int, reused: bool = False) -> SamplingFlags:
        """Copy to the device what the next `draw` with B rows reads; row b is sequences[b], the rest is padding.

        `reused` says that they are those of the last call, each with the tokens drawn since: the device has advanced by itself.

        The copy may wait for whatever is in flight on the device: call this before the forward pass is launched, and the pass and the draw
        run back to back.
        """
        if self._withheld:
            self._release(sequences)
        if B not in self._inputs:
            device = Tensor.zeros(B, len(Column), dtype=dtypes.int32, device=self.device).contiguous().realize()
            self._inputs[B] = np.empty((B, len(Column)), dtype=np.int32), device
        changes, flags = self._laid.get(B, (-1, SamplingFlags()))
        if reused and changes == self._changes:
            return flags
        lines, inputs = self._inputs[B]
        n, rows = len(sequences), [sequence.row for sequence in sequences]
        lines[:n], lines[n:] = self._lines[rows], self._lines[self._scratch]
        flags = self.flags(sequences)
        self._laid[B] = self._changes, flags
        lines[:n, Column.POSITION] = [len(s.output_token_ids) if self._flags[s.row].sampled else 0 for s in sequences]
        known = self._on_device.get(B)
        if known is None or not np.array_equal(lines, known):
            upload(inputs, lines)
            self._on_device[B] = lines.copy()
        if flags.masked:
            self._place_masks(sequences, B)
        return flags

    def _place_masks(self, sequences: list[Sequence], B: int) -> None:
        """Say which row of the table of masks each of B rows reads: its own, or the one that allows everything."""
        if B not in self._mask_rows:
            device = Tensor.full((B,), self._scratch, dtype=dtypes.int32, device=self.device).contiguous().realize()
            self._mask_rows[B] = np.full(B, self._scratch, dtype=np.int32), device
        host, on_device = self._mask_rows[B]
        rows = [sequence.row if self._flags[sequence.row].masked else self._scratch for sequence in sequences]
        rows += [self._scratch] * (B - len(rows))
        if rows != host.tolist():
            host[:] = rows
            upload(on_device, host)

    def mask(self, row: int) -> np.ndarray:
        """The words int32 [ceil(V/32)] of a masked row on the host, to be filled for the next draw and sent by `send_masks`."""
        words: np.ndarray = self.masks.host[row]
        return words

    @property
    def masks(self) -> Masks:
        """The table of masks. ArgumentError unless a sequence that is masked has joined before."""
        if self._masks is None:
            raise ArgumentError("sampler: there are no masks: nobody with structured_outputs, allowed_token_ids or bad_words has joined")
        return self._masks

    def send_masks(self, rows: Iterable[int], banned: Mapping[int, Collection[int]] | None = None) -> None:
        """Copy these rows of masks to the device for the next draw, less the tokens `banned` by row; any time before that draw."""
        self.masks.send(rows, banned)

    def write_mask(self, row: int, bits: np.ndarray) -> None:
        """`mask`, filled with `bits` (words of 32 bits, [ceil(V/32)]), and `send_masks` for one row."""
        self.mask(row)[:] = bits.view(np.int32)
        self.send_masks([row])

    def draw(self, logits: Tensor, flags: SamplingFlags) -> Tensor:
        """Tokens int32 [B] from logits [B, V] float32, a realized buffer, as last prepared for B rows.

        The result is on the device, in a buffer that the next draw with the same B and flags overwrites. -1 stands for a row that has no
        token: NaNs, or everything at -inf. Penalised rows count their token on the device; what is drawn must become output.
        """
        self.drawn(int(logits.shape[0]), flags, 1)
        captured, tensors, _ = self.call(logits, flags)
        tokens: Tensor = captured(*tensors)
        return tokens

    def call(self, logits: Tensor, flags: SamplingFlags) -> CapturedCall:
        """What `draw` does, to be repeated on the device; say `drawn` then."""
        B = int(logits.shape[0])
        if (B, flags) not in self._steps:
            self._steps[B, flags] = Captured(self.step(B, flags))
        return self._steps[B, flags], (logits,), {}

    def step(self, B: int, flags: SamplingFlags) -> Callable[[Tensor], Tensor]:
        """What `draw` captures, to be part of a larger capture; say `drawn` for each time that it runs."""
        if (B, flags) not in self._functions:
            self._functions[B, flags] = self._new_step(B, flags)
        return self._functions[B, flags]

    def drawn(self, B: int, flags: SamplingFlags, times: int) -> None:
        """The device draws, or has drawn, for B rows so many times without a `prepare` between."""
        if flags.sampled:
            self._on_device[B][:, Column.POSITION] += times

    def withholds(self, sequences: list[Sequence]) -> bool:
        """Whether min_tokens keeps tokens away from one of them for now: the host must look after every step."""
        return any(sequence.row in self._withheld for sequence in sequences)

    def logprobs(self, logits: Tensor, sequences: list[Sequence], tokens: list[int]) -> list[dict[int, Logprob] | None]:
        """Of each sequence's drawn token and the most probable ones, None for those that did not ask; `logits` [B, V] as drawn from."""
        found: list[dict[int, Logprob] | None] = [None] * len(sequences)
        asking = [b for b, sequence in enumerate(sequences) if sequence.logprobs is not None]
        if asking:
            top = [sequences[b].logprobs or 0 for b in asking]
            V = int(logits.shape[1])  # only their rows: all of them are megabytes
            asked = np.stack([download(part) for part in spans(logits, [(b * V, V) for b in asking])])
            for b, logprobs in zip(asking, logprobs_of(asked, [int(tokens[b]) for b in asking], top), strict=True):
                found[b] = logprobs
        return found

    @staticmethod
    def change_row(logits: Tensor, b: int, change: Callable[[np.ndarray], np.ndarray]) -> None:
        """Replace row b of logits [B, V] float32 by what `change` makes of it, on the host; what it raises leaves the row as it was."""
        V = int(logits.shape[1])
        (part,) = spans(logits, [(b * V, V)])
        row = np.asarray(change(download(part)), np.float32)
        if row.shape != (V,):
            raise ValueError(f"expected logits of shape ({V},), got {row.shape}")
        upload(part, row)

    def _line(self, params: SamplingParams, row: int, flags: SamplingFlags) -> np.ndarray:
        line = np.zeros(len(Column), dtype=np.uint32)
        floats, seed, temperature = line.view(np.float32), params.seed or 0, params.temperature
        line[Column.SEEN_ROW] = row if flags.penalized else self._scratch
        line[Column.BIAS_ROW] = row if flags.biased else self._scratch
        line[Column.SEED_LOW], line[Column.SEED_HIGH] = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
        floats[Column.INVERSE_TEMPERATURE] = 1.0 / temperature if flags.sampled else 0.0
        line[Column.TOP_K] = min(params.top_k, self.vocab_size) if flags.top_k else self.vocab_size
        line[Column.TOP_P] = int(params.top_p * ops.TOP_P_ONE) if flags.top_p else ops.TOP_P_ONE
        floats[Column.MIN_P] = temperature * math.log(params.min_p) if flags.min_p else -math.inf
        floats[Column.REPETITION], floats[Column.PRESENCE] = params.repetition_penalty, params.presence_penalty
        floats[Column.FREQUENCY] = params.frequency_penalty
        return line.view(np.int32)

    def _release(self, sequences: list[Sequence]) -> None:
        """Let the end of sequence come where min_tokens are there."""
        for sequence in sequences:
            row, params = sequence.row, sequence.params
            if row in self._withheld and len(sequence.output_token_ids) >= params.min_tokens:
                del self._withheld[row]
                self._flags[row] = flags = flags_of(params)
                self._lines[row] = self._line(params, row, flags)
                self._changes += 1
                if flags.biased and self._bias is not None:
                    self._bias.write(row, params.logit_bias, ())

    def _new_step(self, B: int, flags: SamplingFlags) -> Callable[[Tensor], Tensor]:
        """The graph of a draw, as a function of the logits; everything else lies in buffers that stay."""
        inputs = self._inputs[B][1]
        count = Tensor([B], dtype=dtypes.int32, device=self.device).realize()
        column = {c: inputs[:, c : c + 1] for c in Column}
        real = {c: column[c].bitcast(dtypes.float32) for c in Column}
        bits = {c: column[c].bitcast(dtypes.uint32) for c in Column}

        def adjust(logits: Tensor) -> Tensor:
            if flags.penalized and self._seen is not None:
                rows, seen = inputs[:, Column.SEEN_ROW], self._seen
                scales = real[Column.REPETITION], real[Column.PRESENCE], real[Column.FREQUENCY]
                logits = ops.penalize(logits, seen.counts[rows], seen.prompted[rows], *scales)
            if flags.biased and self._bias is not None:
                logits = logits + self._bias.table[inputs[:, Column.BIAS_ROW]]
            return logits.contiguous() if flags.penalized or flags.biased else logits

        def floor(logits: Tensor) -> Tensor:
            """The lowest logit that each row's filters let live, [B, 1]."""
            lowest = Tensor.full((B, 1), -math.inf, device=self.device)
            peaks = ops.peak(logits) if flags.min_p or flags.top_p else lowest
            if flags.min_p:
                lowest = peaks + real[Column.MIN_P]
            if flags.top_k:
                lowest = lowest.maximum(ops.top_k_threshold(logits, column[Column.TOP_K], self._search_steps))
            if flags.top_p:
                inverse, top_p = real[Column.INVERSE_TEMPERATURE], column[Column.TOP_P].cast(dtypes.int64)
                lowest = ops.top_p_threshold(logits, peaks, lowest, inverse, top_p, self._search_steps)
            return lowest.contiguous()

        def kernel(logits: Tensor) -> Tensor | None:
            """All of it at once, with what it changes: positions and counts."""
            seen = (self._seen.counts, self._seen.prompted) if flags.penalized and self._seen is not None else None
            bias = self._bias.table if flags.biased and self._bias is not None else None
            filters = {"top_k": flags.top_k, "top_p": flags.top_p, "min_p": flags.min_p}
            return ops.draw(logits, inputs, count, self._scratch, sampled=flags.sampled, **filters, seen=seen, bias=bias)

        def step(logits: Tensor) -> Tensor:
            if flags.masked and self._masks is not None:  # first of all: -inf stays -inf whatever penalties and bias do
                logits = self._masks.apply(logits, self._mask_rows[B][1])
            tokens = kernel(logits)
            if tokens is not None:
                return tokens.realize()
            logits = scores = adjust(logits)
            if flags.sampled:
                key = bits[Column.SEED_LOW], bits[Column.SEED_HIGH], bits[Column.POSITION]
                scores = ops.perturb(logits, real[Column.INVERSE_TEMPERATURE], *key)
            if flags.filtered:
                scores = (logits < floor(logits)).where(-math.inf, scores)
            tokens = ops.argmax(scores).contiguous()
            after = []
            if flags.sampled:  # the next draw's positions. By way of the tokens, so that nothing reads them afterwards; and through an
                # alias, as of a tensor that this step also reads tinygrad would change a copy
                places = (tokens < -1).where(0, Column.POSITION).cast(dtypes.int32).contiguous()
                after.append(scatter_add(alias(inputs), ops.row_numbers(B, self.device), places))
            if flags.penalized and self._seen is not None:
                counts = scatter_add(self._seen.counts, inputs[:, Column.SEEN_ROW].contiguous(), tokens.maximum(0).contiguous())
                after.append(counts)
            Tensor.realize(tokens, *after)
            return tokens

        return step
