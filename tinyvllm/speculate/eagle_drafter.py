"""Drafts by EAGLE heads: their cache, kept up with the target's steps, and the chain of guesses.

The heads' keys and values are in blocks of their own with the numbers of the target's blocks, so that prefix hits and preemption need no
second book-keeping. Two captured functions run them:

    extend  after a step: the target's states of its tokens through the layer, which writes their entries; keeps each sequence's last state
    chain   K guesses: head, draw, then the layer on the guess and its own state, K - 1 times, as one capture

A guess's entry is in the sequence's block where it has one, else in a block of the drafter, and is overwritten by the entry of the true
token. An entry that a sequence's block should have and has not, because a swap, a fork or a cache on disk filled the target's block, is
made of its token with a state of zeros: every entry that a guess reads is then of this sequence's tokens, never of the block's last owner.
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import dataclass
from typing import cast

import numpy as np
from tinygrad import Tensor, UOp
from tinygrad.dtype import DType

from tinyvllm.batch import NO_SLOT, Batch
from tinyvllm.bridge import Captured, copied, upload
from tinyvllm.models.config import ModelConfig
from tinyvllm.ops.rope import rope_table
from tinyvllm.request import Sequence
from tinyvllm.runner.kv import BlockShape, KVPool
from tinyvllm.runner.memory import DrafterMemory
from tinyvllm.runner.prepare import Shape, StepInputs, decode_bucket, shape_of
from tinyvllm.runner.runner import Runner
from tinyvllm.sampling.parameters import SamplingFlags
from tinyvllm.scheduler import Scheduled
from tinyvllm.speculate.eagle import EagleHeads
from tinyvllm.speculate.last_states import Guessing, LastStates
from tinyvllm.speculate.picks import DraftVocabulary, Picks
from tinyvllm.speculate.protocol import StateRows

_MAX_SINGLES = 16  # rows of one sequence that are laid out as decodes; more of them are a chunk
_MAX_PADDED = 64  # rows of a step up to which there is an entry for each, most of them padding: one capture for all numbers of entries
_MAX_FILLED = 512  # missing entries that one call makes


def own_blocks(max_drafts: int, block_size: int) -> int:
    """Blocks of the drafter's own for the guesses of one row."""
    return -(-max_drafts // block_size) + 1


def entry_shape(layer: ModelConfig, block_size: int, dtype: DType) -> BlockShape:
    """A block of the heads' cache: always numbers of a dtype, never packed."""
    return BlockShape.of(layer, block_size, "auto", dtype)


def eagle_memory(layer: ModelConfig, block_size: int, dtype: DType, max_drafts: int, max_num_seqs: int) -> DrafterMemory:
    """What the heads' cache takes."""
    nbytes = entry_shape(layer, block_size, dtype).nbytes
    return DrafterMemory(0, nbytes, nbytes * (own_blocks(max_drafts, block_size) * decode_bucket(max_num_seqs) + 1))


@dataclass(frozen=True)
class _Entries:
    """Entries to write: of positions start .. start + count, their states from row `first_row` of a step's on; None: states of zeros."""

    sequence: Sequence
    start: int
    count: int
    first_row: int | None

    def state_row(self, position: int) -> int:
        return -1 if self.first_row is None else self.first_row + position - self.start


@dataclass(frozen=True)
class _NextTokens:
    """A sequence as `StepInputs` lays it out for heads: at each position the token after it."""

    sequence: Sequence

    @property
    def sequence_id(self) -> int:
        return self.sequence.sequence_id

    @property
    def block_table(self) -> list[int]:
        return self.sequence.block_table

    def token_at(self, position: int) -> int:
        return self.sequence.token_at(position + 1)

    def token_ids(self, start: int, stop: int) -> list[int]:
        return self.sequence.token_ids(start + 1, stop + 1)


@dataclass(frozen=True)
class _Extend:
    """The captured extension by T rows, R of which are kept: `index` int32 [T] rows of the states, -1 for zeros; `last` int32 [R]."""

    inputs: StepInputs
    index: Tensor
    last: Tensor
    captured: Captured


class EagleDrafter(LastStates):
    """Drafts by EAGLE-1, 2 or 3 heads, or by the model's own MTP layer."""

    def __init__(self, runner: Runner, heads: EagleHeads, max_drafts: int):
        self.method = heads.config.method
        super().__init__(max_drafts, runner.max_num_seqs)
        self.state_layers = heads.config.state_layers
        self._heads, self._device, self._vocab_size = heads, runner.device, runner.config.vocab_size
        S, c = runner.pool.block_size, heads.config.layer
        self._own = own_blocks(self.max_drafts, S)
        self._first_own = runner.pool.num_blocks
        blocks = self._first_own + self._own * decode_bucket(runner.max_num_seqs)
        self._pool = KVPool(c, blocks, S, entry_shape(c, S, heads.dtype), runner.device)
        self._cache = self._pool.layers[0]
        self._width = -(-runner.max_model_len // S) + self._own
        table = rope_table(c.rope_dim, c.rope_theta, self._width * S, c.scaling, runner.max_model_len)
        self._rope = copied(table, runner.device)
        self._vocabulary = None if heads.tokens is None else DraftVocabulary.of(heads.tokens, self._vocab_size, runner.device)
        self._book = EntryBook(self._first_own, S)
        self._extends: dict[tuple[Shape, int, int], _Extend] = {}
        self._chains: dict[tuple[int, int, int, SamplingFlags], _Chain] = {}
        self._states: Tensor | None = None  # [R, E], the last states

    @property
    def nbytes(self) -> int:
        """Bytes of the heads' cache."""
        return self._pool.block_bytes * (self._pool.num_blocks + 1)

    def forget(self, sequence: Sequence) -> None:
        super().forget(sequence)
        self._book.forget(sequence)

    # ---- after a step

    def _keep(self, states: Tensor, rows: Row[StateRows]) -> None:
        entries: list[_Entries | None] = []
        missing: list[_Entries] = []
        for each in rows:
            count = min(each.count, len(each.sequence) - 1 - each.start)  # an entry needs the token after its own
            if count < 1 or len(each.sequence.block_table) * self._pool.block_size < each.start + count:
                entries.append(None)
                continue
            missing += [_Entries(each.sequence, start, n, None) for start, n in self._book.missing(each.sequence, each.start)]
            entries.append(_Entries(each.sequence, each.start, count, each.first_row))
        for part in _split(missing):
            self._extend(states, part)
        if any(entries):
            self._states = self._extend(states, entries)

    def _extend(self, states: Tensor, entries: Row[_Entries | None]) -> Tensor:
        """Write entries; the states [R, E] after their last rows, in the order of `entries`."""
        laid: list[tuple[Scheduled, int]] = []  # with the row of the states that its first position has
        for each in entries:
            if each is not None:
                laid += _laid_out(each)
                self._book.write(each.sequence, each.start, each.count)
        singles = [scheduled for scheduled, _ in laid if scheduled.num_tokens == 1]
        chunks = [scheduled for scheduled, _ in laid if scheduled.num_tokens > 1]
        T, R = int(states.shape[0]), decode_bucket(len(entries))
        shape = Shape(max(T, decode_bucket(len(singles))) if T <= _MAX_PADDED else decode_bucket(len(singles)), 0, 0, 1)
        extend = self._extend_of(shape_of(singles, chunks) if chunks else shape, T, R)
        shape = extend.inputs.shape
        blocks = extend.inputs.fill(singles, chunks, self._pool.block_size)
        places = self._places(extend.inputs, singles, chunks)
        index, last = np.full(shape.tokens, -1, np.int32), np.zeros(R, np.int32)
        for scheduled, row in laid:
            first = places[id(scheduled)]
            index[first : first + scheduled.num_tokens] = -1 if row < 0 else np.arange(row, row + scheduled.num_tokens)
        ends = {id(scheduled.sequence): places[id(scheduled)] + scheduled.num_tokens - 1 for scheduled, _ in laid}
        by_sequence = {cast(_NextTokens, s.sequence).sequence_id: ends[id(s.sequence)] for s, _ in laid}
        last[: len(entries)] = [0 if each is None else by_sequence[each.sequence.sequence_id] for each in entries]
        upload(extend.index, index)
        upload(extend.last, last)
        kept: Tensor = extend.captured(states, num_blocks=blocks)
        return kept

    def _capture_keep(self, states: Tensor, shape: Shape, R: int) -> None:
        T = shape.tokens
        if not shape.chunks and T > _MAX_PADDED:  # the number of entries, which few steps share, is the shape there
            shape = Shape(decode_bucket(R), 0, 0, 1)
        elif T <= _MAX_SINGLES:
            shape = Shape(T, 0, 0, 1)
        extend = self._extend_of(shape, T, R)
        blocks = extend.inputs.fill([], [], self._pool.block_size)
        self._states = extend.captured(states, num_blocks=blocks)

    def _drop(self) -> None:
        self._extends.clear()
        self._chains.clear()

    def _extend_of(self, shape: Shape, T: int, R: int) -> _Extend:
        if (shape, T, R) not in self._extends:
            self._extends[shape, T, R] = self._new_extend(shape, R)
        return self._extends[shape, T, R]

    @staticmethod
    def _places(inputs: StepInputs, singles: list[Scheduled], chunks: list[Scheduled]) -> dict[int, int]:
        """The first row of each entry; `fill` has put `singles` into the order of the rows."""
        starts = inputs.query_starts[inputs.shape.decodes :].tolist()
        return {id(entry): b for b, entry in enumerate(singles)} | {id(entry): starts[b] for b, entry in enumerate(chunks)}

    def _new_extend(self, shape: Shape, R: int) -> _Extend:
        inputs = StepInputs(shape, self._width, self._device)
        index, last = copied(np.zeros(shape.tokens, np.int32), self._device), copied(np.zeros(R, np.int32), self._device)

        def function(states: Tensor, num_blocks: int | UOp = 1) -> Tensor:
            batch = inputs.batch(num_blocks)
            rows = (index < 0).unsqueeze(1).where(0.0, states[index.maximum(0)]).contiguous()
            hidden = self._heads.combine(rows, batch.rows)
            angles = self._rope[batch.positions].contiguous()
            out = self._heads.layer(batch.tokens, hidden, batch, self._cache, angles)
            return out[last].contiguous().realize()

        return _Extend(inputs, index, last, Captured(function, {"num_blocks": (1, self._width)}))

    # ---- before a step

    def _guess(self, batch: Guessing) -> tuple[Row[Tensor], Row[Tensor]]:
        assert self._states is not None
        key = int(self._states.shape[0]), batch.bucket, batch.K, batch.flags
        if key not in self._chains:
            picks = Picks(batch.bucket, batch.K, batch.flags, self._vocab_size, self._device, self._vocabulary)
            self._chains[key] = _Chain(self._heads, self._pool, self._rope, self._width, picks, batch)
        return self._chains[key].run(self._states, batch, self._tables(batch), self._book)

    def _tables(self, batch: Guessing) -> list[list[int]]:
        """Each sequence's blocks, and after them those of the drafter's own."""
        own = (range(self._first_own + b * self._own, self._first_own + (b + 1) * self._own) for b in range(len(batch.sequences)))
        return [[*sequence.block_table, *blocks][: self._width] for sequence, blocks in zip(batch.sequences, own, strict=True)]


class _Chain:
    """The captured chain of K guesses for B rows, with its inputs: for each further guess the place of its entry."""

    def __init__(self, heads: EagleHeads, pool: KVPool, rope: Tensor, width: int, picks: Picks, batch: Guessing):
        self._heads, self._pool, self._rope, self._width, self._picks = heads, pool, rope, width, picks
        B, K, device = batch.bucket, batch.K, pool.device
        self._places = np.zeros((3, K, B), np.int32)  # positions, slots and lengths of context; those of guess 0 are unused
        self._tables = np.zeros((B, width), np.int32)
        self._rows, self._count = copied(np.zeros(B, np.int32), device), copied(np.zeros(1, np.int32), device)
        self._device_places = [[copied(row, device) for row in rows] for rows in self._places]
        self._device_tables = copied(self._tables, device)
        self._starts = copied(np.arange(B + 1, dtype=np.int32), device)
        self._samples, self._chunks = copied(np.arange(B, dtype=np.int32), device), copied(np.array([B, 0], np.int32), device)
        self._captured = Captured(self._guesses, {"num_blocks": (1, width)})

    def run(self, states: Tensor, batch: Guessing, tables: list[list[int]], book: EntryBook) -> tuple[list[Tensor], list[Tensor]]:
        """Tokens [B] and probabilities [B] of each of K guesses."""
        S, K = self._pool.block_size, batch.K
        self._places[:] = np.array([0, NO_SLOT, 0], np.int32).reshape(3, 1, 1)
        blocks = 1
        for b, (sequence, table) in enumerate(zip(batch.sequences, tables, strict=True)):
            positions = np.arange(len(sequence) - 2, len(sequence) - 2 + K)
            slots = np.asarray(table, np.int32)[positions // S] * S + positions % S
            self._places[:, :, b] = positions, slots, positions + 1
            self._tables[b, : len(table)] = table
            book.erase(slots[1:])
            blocks = max(blocks, int(positions[-1]) // S + 1)
        for host_rows, device_rows in zip(self._places, self._device_places, strict=True):
            for host, device in zip(host_rows[1:], device_rows[1:], strict=True):
                upload(device, host)
        upload(self._device_tables, self._tables)
        upload(self._rows, batch.padded_rows)
        upload(self._count, np.array([len(batch.sequences)], np.int32))
        self._picks.place(batch.sequences)
        found: tuple[list[Tensor], list[Tensor]] = self._captured(states, num_blocks=blocks)
        return found

    def _guesses(self, states: Tensor, num_blocks: int | UOp = 1) -> tuple[list[Tensor], list[Tensor]]:
        """All guesses, each from the one before and the state that it came from: one capture."""
        found = [self._guess(0, states[self._rows].contiguous().realize())]
        for k in range(1, len(self._places[0])):
            token, _, state = found[-1]
            batch = self._batch(k, token, num_blocks)
            angles = self._rope[batch.positions].contiguous()
            found.append(self._guess(k, self._heads.layer(token, self._heads.feed(state), batch, self._pool.layers[0], angles).realize()))
        return [token for token, _, _ in found], [confidence for _, confidence, _ in found]

    def _guess(self, k: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Token int32 [B] and probability float32 [B] of guess k, and its state x [B, E]."""
        logits, best = self._heads.logits(x, self._samples, self._count)
        Tensor.realize(logits, *([] if best is None else [best]))
        token, confidence = self._picks.pick(k, logits, best)
        Tensor.realize(token, confidence)
        return token, confidence, x

    def _batch(self, k: int, tokens: Tensor, num_blocks: int | UOp) -> Batch:
        positions, slots, lengths = (rows[k] for rows in self._device_places)
        return Batch(
            tokens, positions, slots, self._device_tables, self._starts, lengths, self._count, self._count, self._chunks, self._samples,
            self._count, num_blocks, num_decodes=int(tokens.shape[0]), max_query=1,
        )  # fmt: skip


class EntryBook:
    """Which token and position each slot of the heads' cache has an entry of, so that no guess reads an entry of another text."""

    def __init__(self, num_blocks: int, block_size: int):
        self._S = block_size
        self._keys = np.full(num_blocks * block_size, -1, np.int64)  # position << 32 | token
        self._ends: dict[int, tuple[int, int]] = {}  # by sequence: the end of its entries, and its preemptions until then

    def forget(self, sequence: Sequence) -> None:
        self._ends.pop(sequence.sequence_id, None)

    def missing(self, sequence: Sequence, stop: int) -> list[tuple[int, int]]:
        """Runs (start, count) of positions before `stop` for which the sequence's blocks have no entry of its token."""
        end, preemptions = self._ends.get(sequence.sequence_id, (0, -1))
        if preemptions == sequence.num_preemptions and end >= stop:
            return []
        begin = end if preemptions == sequence.num_preemptions else 0
        wrong = self._keys[self._slots(sequence, begin, stop)] != _keys_of(sequence, begin, stop)
        if not wrong.any():
            return []
        edges = np.flatnonzero(np.diff(np.concatenate([[False], wrong, [False]]).astype(np.int8))).reshape(-1, 2)
        return [(begin + int(a), int(b - a)) for a, b in edges]

    def write(self, sequence: Sequence, start: int, count: int) -> None:
        """Entries of these positions are written."""
        stop = start + count
        self._keys[self._slots(sequence, start, stop)] = _keys_of(sequence, start, stop)
        self._ends[sequence.sequence_id] = stop, sequence.num_preemptions

    def erase(self, slots: np.ndarray) -> None:
        """Entries of guesses are written there; slots of the drafter's own blocks are not in the book."""
        self._keys[slots[slots < len(self._keys)]] = -1

    def _slots(self, sequence: Sequence, start: int, stop: int) -> np.ndarray:
        first = start // self._S
        blocks = np.asarray(sequence.block_table[first : -(-stop // self._S)], np.int64)
        positions = np.arange(start, stop)
        slots: np.ndarray = blocks[positions // self._S - first] * self._S + positions % self._S
        return slots


def _keys_of(sequence: Sequence, start: int, stop: int) -> np.ndarray:
    return np.arange(start, stop, dtype=np.int64) << 32 | np.asarray(sequence.token_ids(start, stop), np.int64)


def _laid_out(entries: _Entries) -> list[tuple[Scheduled, int]]:
    """Entries of a step, each with its first row of the target's states."""
    sequence = cast(Sequence, _NextTokens(entries.sequence))
    start, count = entries.start, entries.count
    if count > _MAX_SINGLES:
        return [(Scheduled(sequence, start, count, 0), entries.state_row(start))]
    return [(Scheduled(sequence, p, 1, 0), entries.state_row(p)) for p in range(start, start + count)]


def _split(missing: list[_Entries]) -> list[list[_Entries]]:
    """Groups of at most _MAX_FILLED entries, in order of position."""
    parts: list[list[_Entries]] = []
    for each in missing:
        for start in range(each.start, each.start + each.count, _MAX_FILLED):
            parts.append([_Entries(each.sequence, start, min(_MAX_FILLED, each.start + each.count - start), None)])
    return parts
