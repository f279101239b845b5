"""From logits to tokens for a batch: each row drawn with its sequence's parameters, in one captured step on the device.

Knows sequences and their parameters, not how the logits were computed nor what the tokens mean. `add` reduces what a sequence needs to a
parameter row of twelve 32-bit numbers; a step gathers these rows, fills in the positions, copies them to the device and replays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Row

import numpy as np
from tinygrad import Tensor

from tinyvllm.bridge import Captured, CapturedCall, KeptSteps, copied, download, spans, upload
from tinyvllm.errors import ArgumentError
from tinyvllm.ops import sample as ops
from tinyvllm.request import Logprob, SamplingParams, Sequence
from tinyvllm.sampling.draw import Draw, Tables
from tinyvllm.sampling.logprobs import logprobs_of
from tinyvllm.sampling.parameters import Column, SamplingFlags, flags_of, parameter_row
from tinyvllm.sampling.penalties import LogitBias, TokenCounts, TokenMasks

__all__ = ["Column", "Rows", "Sampler", "SamplingFlags"]

Rows = Row[Sequence | None]  # the sequence of each row of logits; None: nothing is drawn there


class Sampler:
    """Draws tokens. The scheduler assigns rows 0 to max_num_seqs - 1 to sequences; `add` and `remove` follow it.

    A drawn token is a function of its logits and of its sequence's parameters, seed, position in the output and tokens so far. It does not
    depend on other sequences, on the order of the batch, or on what their parameters make the step compute.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, device: str, kept: KeptSteps | None = None):
        """`kept` is where captured draws are kept on disk."""
        self.vocab_size, self.device, self._kept = vocab_size, device, kept
        self._scratch = max_num_seqs
        self._parameters = np.zeros((max_num_seqs + 1, len(Column)), dtype=np.int32)  # by row; the last is of padding
        self._parameters[:] = parameter_row(SamplingParams(temperature=0.0), SamplingFlags(), self._scratch, self._scratch, vocab_size)
        self._flags = [SamplingFlags()] * (max_num_seqs + 1)
        self._withheld: dict[int, frozenset[int]] = {}  # row -> tokens that min_tokens forbids for now
        self._changes = 0  # of parameters and flags
        # all by N, the number of rows of logits
        self._inputs: dict[int, tuple[np.ndarray, Tensor]] = {}  # parameter rows on the host and on the device, [N, columns]
        self._prepared: dict[int, tuple[int, SamplingFlags, list[int]]] = {}  # changes so far, flags and rows at the last `prepare`
        self._on_device: dict[int, np.ndarray] = {}  # parameter rows as they are on the device: each draw advances the positions
        self._mask_rows: dict[int, tuple[np.ndarray, Tensor]] = {}  # rows of the masks' table on the host and on the device, [N]
        self._steps: dict[tuple[int, SamplingFlags], Captured] = {}
        self._functions: dict[tuple[int, SamplingFlags], Callable[[Tensor], Tensor]] = {}
        self._search_steps = ops.search_steps(device)
        self._counts: TokenCounts | None = None
        self._bias: LogitBias | None = None
        self._masks: TokenMasks | None = None

    # ---- sequences ----

    def add(self, sequence: Sequence, eos_ids: Collection[int]) -> None:
        """Register a sequence that has got its `row`, at admission and again after preemption, with the output that it has."""
        params, row, flags = sequence.params, sequence.row, flags_of(sequence.params)
        if flags.sampled and params.seed is None:
            raise ArgumentError(f"sampler: sequence {sequence.sequence_id} is sampled and has no seed; draw one with params.with_seed")
        self._withheld.pop(row, None)
        if len(sequence.output_token_ids) < params.min_tokens:
            self._withheld[row] = frozenset(params.stop_token_ids or ()) | frozenset(() if params.ignore_eos else eos_ids)
            flags |= SamplingFlags(biased=True)
        size = self._scratch + 1, self.vocab_size, self.device
        if flags.penalized:
            self._counts = self._counts or TokenCounts(*size)
            self._counts.write(sequence)
        if flags.biased:
            self._bias = self._bias or LogitBias(*size)
            self._bias.write(row, params.logit_bias, self._withheld.get(row, ()))
        if flags.masked:
            self._masks = self._masks or TokenMasks(*size)
            self._masks.start(row, params.allowed_token_ids)
        self._set_parameters(row, params, flags)

    def remove(self, row: int) -> None:
        """The sequence of this row has finished or was preempted."""
        self._withheld.pop(row, None)
        self._flags[row] = SamplingFlags()
        self._parameters[row] = self._parameters[self._scratch]
        self._changes += 1

    def flags(self, sequences: Rows) -> SamplingFlags:
        """What a step with these sequences has to compute."""
        distinct = {self._flags[sequence.row] for sequence in sequences if sequence is not None}
        flags = distinct.pop() if distinct else SamplingFlags()
        for other in distinct:
            flags |= other
        return flags

    def withholds(self, sequences: list[Sequence]) -> bool:
        """Whether min_tokens still forbids tokens to one of them: the host must look after every step."""
        return any(sequence.row in self._withheld for sequence in sequences)

    def changes_with_tokens(self, sequence: Sequence) -> bool:
        """Whether each token changes how the next one is drawn: by its counts, or because min_tokens is reached.

        Such a sequence has one row in a draw.
        """
        return self._flags[sequence.row].penalized or sequence.row in self._withheld

    # ---- a draw ----

    def prepare(self, sequences: Rows, N: int, reused: bool = False) -> SamplingFlags:
        """Copy to the device what the next `draw` from N rows of logits reads. Row r is of sequences[r], the rest is padding, as is None.

        A sequence that is listed several times, one after another, draws its next tokens there: from the logits of the last known token and
        of the drafts after it. `reused`: the sequences of the last call, each with the tokens drawn since; the device has advanced
        by itself.

        The copy may wait for what is in flight on the device. Called before the forward pass is launched, it lets the pass and the draw run
        back to back.
        """
        if self._withheld:
            self._release_withheld(sequences)
        if N not in self._inputs:
            device = copied(np.zeros((N, len(Column)), np.int32), self.device)
            self._inputs[N] = np.empty((N, len(Column)), dtype=np.int32), device
        changes, flags, known_rows = self._prepared.get(N, (-1, SamplingFlags(), []))
        if reused and changes == self._changes:
            return flags
        host, device = self._inputs[N]
        n, rows = len(sequences), [self._scratch if sequence is None else sequence.row for sequence in sequences]
        if changes == self._changes and not flags and rows == known_rows:  # plainly greedy: no parameter depends on the position
            return flags
        host[:n], host[n:] = self._parameters[rows], self._parameters[self._scratch]
        flags = self.flags(sequences)
        self._prepared[N] = self._changes, flags, rows
        host[:n, Column.POSITION] = self._positions(sequences)
        known = self._on_device.get(N)
        if known is None or not np.array_equal(host, known):
            upload(device, host)
            self._on_device[N] = host.copy()
        if flags.masked:
            self._place_masks(sequences, N)
        return flags

    def draw(self, logits: Tensor, flags: SamplingFlags) -> Tensor:
        """Tokens int32 [N] from logits [N, V] float32, a realized buffer, as last prepared for N rows.

        The result is on the device, in a buffer that the next draw with the same N and flags overwrites. -1 marks a row that has no
        token: NaNs, or everything at -inf. Penalised rows count their token on the device; what is drawn must become output.
        """
        self.mark_drawn(int(logits.shape[0]), flags, 1)
        captured, tensors, _ = self.call(logits, flags)
        tokens: Tensor = captured(*tensors)
        return tokens

    def call(self, logits: Tensor, flags: SamplingFlags) -> CapturedCall:
        """What `draw` does, to be repeated on the device; the caller reports it by `mark_drawn`."""
        N = int(logits.shape[0])
        if (N, flags) not in self._steps:
            step = self.step(N, flags)
            kept = None if self._kept is None else self._kept.step("draw", draw=step.__self__)  # type: ignore[attr-defined]
            self._steps[N, flags] = Captured(step, kept=kept)
        return self._steps[N, flags], (logits,), {}

    def step(self, N: int, flags: SamplingFlags) -> Callable[[Tensor], Tensor]:
        """What `draw` captures, to be part of a larger capture; the caller reports each run of it by `mark_drawn`."""
        if (N, flags) not in self._functions:
            tables = Tables(
                self._counts if flags.penalized else None,
                self._bias if flags.biased else None,
                self._masks if flags.masked else None,
                self._scratch,
            )
            mask_rows = self._mask_rows[N][1] if flags.masked and N in self._mask_rows else None
            self._functions[N, flags] = Draw(flags, tables, self._inputs[N][1], mask_rows, self._search_steps).run
        return self._functions[N, flags]

    def mark_drawn(self, N: int, flags: SamplingFlags, times: int) -> None:
        """The device draws, or has drawn, from N rows that many times without a `prepare` in between."""
        if flags.sampled:
            self._on_device[N][:, Column.POSITION] += times

    def logprobs(self, logits: Tensor, sequences: Rows, tokens: list[int]) -> list[dict[int, Logprob] | None]:
        """For each row the log-probabilities of its token and of the most probable ones, None if its sequence did not ask for them.

        `logits` [N, V] as drawn from; row r is of sequences[r].
        """
        found: list[dict[int, Logprob] | None] = [None] * len(sequences)
        wanting = [(r, sequence) for r, sequence in enumerate(sequences) if sequence is not None and sequence.logprobs is not None]
        if wanting:
            rows, top = [r for r, _ in wanting], [sequence.logprobs or 0 for _, sequence in wanting]
            values = self.rows(logits, rows)  # only these: all of them are megabytes
            named = [sequence.params.logprob_token_ids for _, sequence in wanting]
            for r, logprobs in zip(rows, logprobs_of(values, [int(tokens[r]) for r in rows], top, named), strict=True):
                found[r] = logprobs
        return found

    @staticmethod
    def rows(logits: Tensor, rows: Iterable[int]) -> np.ndarray:
        """Some rows of logits [N, V] float32, on the host."""
        V = int(logits.shape[1])
        return np.stack([download(part) for part in spans(logits, [(r * V, V) for r in rows])])

    @staticmethod
    def change_row(logits: Tensor, r: int, change: Callable[[np.ndarray], np.ndarray]) -> None:
        """Replace row r of logits [N, V] float32 by what `change` returns for it, on the host; if it raises, the row is unchanged."""
        V = int(logits.shape[1])
        (part,) = spans(logits, [(r * V, V)])
        row = np.asarray(change(download(part)), np.float32)
        if row.shape != (V,):
            raise ValueError(f"expected logits of shape ({V},), got {row.shape}")
        upload(part, row)

    def forget_device_state(self) -> None:
        """A step failed: what it has copied is unknown. The next `prepare` copies everything; sequences are added again.

        Draws that were not captured are dropped.
        """
        self._steps = {key: captured for key, captured in self._steps.items() if captured.captured}
        self._prepared.clear()
        self._on_device.clear()
        for host, _ in self._mask_rows.values():
            host[:] = -1

    # ---- masks ----

    @property
    def masks(self) -> TokenMasks:
        """The table of masks. ArgumentError before the first sequence with a mask was added."""
        if self._masks is None:
            raise ArgumentError(
                "sampler: there are no masks: no sequence with structured_outputs, allowed_token_ids or bad_words was added"
            )
        return self._masks

    def mask(self, row: int) -> np.ndarray:
        """The words int32 [ceil(V/32)] of a masked row on the host, to be filled for the next draw and sent by `send_masks`."""
        words: np.ndarray = self.masks.host[row]
        return words

    def send_masks(self, rows: Iterable[int], banned: Mapping[int, Collection[int]] | None = None) -> None:
        """Copy these rows of masks to the device for the next draw, without the tokens `banned` by row; any time before that draw."""
        self.masks.send(rows, banned)

    def write_mask(self, row: int, bits: np.ndarray) -> None:
        """Fill a row's mask with `bits` (words of 32 bits, [ceil(V/32)]) and send it."""
        self.mask(row)[:] = bits.view(np.int32)
        self.send_masks([row])

    # ---- the parts of `prepare` ----

    def _set_parameters(self, row: int, params: SamplingParams, flags: SamplingFlags) -> None:
        self._flags[row] = flags
        self._parameters[row] = parameter_row(params, flags, row, self._scratch, self.vocab_size)
        self._changes += 1

    def _release_withheld(self, sequences: Rows) -> None:
        """Allow the end of sequences that have their min_tokens."""
        for sequence in sequences:
            if sequence is None:
                continue
            row, params = sequence.row, sequence.params
            if row in self._withheld and len(sequence.output_token_ids) >= params.min_tokens:
                del self._withheld[row]
                flags = flags_of(params)
                self._set_parameters(row, params, flags)
                if flags.biased and self._bias is not None:
                    self._bias.write(row, params.logit_bias, ())

    def _positions(self, sequences: Rows) -> list[int]:
        """The position in the output of each row's token; 0 for greedy rows, which do not depend on it."""
        positions: list[int] = []
        offset, before = 0, None
        for sequence in sequences:
            offset = offset + 1 if sequence is before else 0
            if sequence is not None and offset == 1 and self.changes_with_tokens(sequence):
                raise ArgumentError(
                    f"sampler: sequence {sequence.sequence_id} has several rows in one draw, and its penalties or min_tokens change with "
                    "every token; draw its rows one after another"
                )
            sampled = sequence is not None and self._flags[sequence.row].sampled
            positions.append(len(sequence.output_token_ids) + offset if sequence is not None and sampled else 0)
            before = sequence
        return positions

    def _place_masks(self, sequences: Rows, N: int) -> None:
        """Point each of N rows to its row of the masks' table, or to the one that allows every token."""
        if N not in self._mask_rows:
            device = copied(np.full(N, self._scratch, np.int32), self.device)
            self._mask_rows[N] = np.full(N, self._scratch, dtype=np.int32), device
        host, on_device = self._mask_rows[N]
        rows = [s.row if s is not None and self._flags[s.row].masked else self._scratch for s in sequences]
        rows += [self._scratch] * (N - len(rows))
        if rows != host.tolist():
            host[:] = rows
            upload(on_device, host)
