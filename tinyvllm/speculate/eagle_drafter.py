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
from itertools import accumulate
from typing import Protocol, cast

import numpy as np
from tinygrad import Tensor, UOp
from tinygrad.dtype import DType

from tinyvllm.batch import NO_SLOT, Batch, LayerCache
from tinyvllm.bridge import Captured, copied
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import ModelConfig
from tinyvllm.ops.rope import rope_table
from tinyvllm.request import Sequence
from tinyvllm.runner.arrays import PackedArrays, aligned
from tinyvllm.runner.kv import BlockShape, KVPool
from tinyvllm.runner.memory import DrafterMemory
from tinyvllm.runner.prepare import Shape, StepInputs, decode_bucket, shape_of
from tinyvllm.runner.runner import Runner
from tinyvllm.sampling.parameters import SamplingFlags
from tinyvllm.scheduler import Scheduled
from tinyvllm.speculate.last_states import Guessing, LastStates
from tinyvllm.speculate.picks import DraftVocabulary, Guesses, Picks
from tinyvllm.speculate.protocol import StateRows

_MAX_SINGLES = 16  # rows of one sequence that are laid out as decodes; more of them are a chunk
_MAX_PADDED = 64  # rows of a step up to which there is an entry for each, most of them padding: one capture for all numbers of entries
_MAX_FILLED = 512  # missing entries that one call makes
_PLACES = ("positions", "slots", "context_lens")  # of a guess's entry


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


class LayerHeads(Protocol):
    """Loaded heads of one decoder layer, which reads the target's states and then its own: `EagleHeads`, `GatedMtpHeads`."""

    @property
    def method(self) -> str: ...

    @property
    def state_layers(self) -> tuple[int, ...]: ...

    @property
    def shape(self) -> ModelConfig: ...

    @property
    def dtype(self) -> DType: ...

    @property
    def tokens(self) -> np.ndarray | None: ...

    def combine(self, states: Tensor, count: Tensor) -> Tensor: ...

    def layer(self, tokens: Tensor, hidden: Tensor, batch: Batch, cache: LayerCache, angles: Tensor) -> Tensor: ...

    def feed(self, state: Tensor) -> Tensor: ...

    def logits(self, states: Tensor, rows: Tensor, count: Tensor) -> tuple[Tensor, Tensor | None]: ...


@dataclass(frozen=True)
class _Entries:
    """Entries to write: of positions start .. start + count, their states from row `first_row` of a step's on; None: states of zeros."""

    sequence: Sequence
    start: int
    count: int
    first_row: int | None


@dataclass(frozen=True)
class _NextTokens:
    """A sequence as `StepInputs` lays it out for heads: at each position the token after it."""

    sequence: Sequence
    adapter = 0  # drafts are guessed without one

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
    """The captured extension by T rows, R of which are kept: `places` are `index` [T], rows of the states, -1 for zeros, and `last` [R]."""

    inputs: StepInputs
    places: PackedArrays
    captured: Captured


class EagleDrafter(LastStates):
    """Drafts by EAGLE-1, 2 or 3 heads, or by the model's own MTP layer."""

    def __init__(self, runner: Runner, heads: LayerHeads, max_drafts: int):
        self.method = heads.method
        super().__init__(max_drafts, runner.max_num_seqs)
        self.state_layers = heads.state_layers
        self._heads, self._device, self._vocab_size = heads, runner.device, runner.config.vocab_size
        S, c = runner.pool.block_size, heads.shape
        self._own = own_blocks(self.max_drafts, S)
        self._first_own = runner.pool.num_blocks
        blocks = self._first_own + self._own * decode_bucket(runner.max_num_seqs)
        self._pool = KVPool(c.num_blocks, blocks, S, entry_shape(c, S, heads.dtype), runner.device)
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
        laid = [(r, each, _laid_out(each)) for r, each in enumerate(entries) if each is not None]
        for _, each, _ in laid:
            self._book.write(each.sequence, each.start, each.count)
        singles = [scheduled for _, each, scheduled in laid if each.count <= _MAX_SINGLES]
        chunks = [scheduled for _, each, scheduled in laid if each.count > _MAX_SINGLES]
        T, R, rows = int(states.shape[0]), decode_bucket(len(entries)), sum(scheduled.num_tokens for scheduled in singles)
        shape = Shape(max(T, decode_bucket(rows)) if T <= _MAX_PADDED else decode_bucket(rows), 0, 0, 1)
        extend = self._extend_of(shape_of(singles, chunks) if chunks else shape, T, R)
        blocks = extend.inputs.fill(singles, chunks, self._pool.block_size)
        first = self._first_rows(extend.inputs, singles, chunks)
        index, last = extend.places.views["index"], extend.places.views["last"]
        index[:], last[:] = -1, 0
        for r, each, scheduled in laid:
            row, end = first[id(scheduled)], first[id(scheduled)] + each.count
            last[r] = end - 1
            if each.first_row is not None:
                index[row:end] = range(each.first_row, each.first_row + each.count)
        extend.places.upload()
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
    def _first_rows(inputs: StepInputs, singles: list[Scheduled], chunks: list[Scheduled]) -> dict[int, int]:
        """The first row of each entry, by its id; `fill` has put `singles` into the order of the rows."""
        rows = accumulate((entry.num_tokens for entry in singles), initial=0)
        starts = inputs.query_starts[inputs.shape.decodes :].tolist() if chunks else []
        return {id(entry): row for entry, row in (*zip(singles, rows), *zip(chunks, starts))}

    def _new_extend(self, shape: Shape, R: int) -> _Extend:
        inputs = StepInputs(shape, self._width, self._device)
        places = PackedArrays({"index": shape.tokens, "last": R}, self._device)
        index, last = places.tensors["index"], places.tensors["last"]

        def function(states: Tensor, num_blocks: int | UOp = 1) -> Tensor:
            batch = inputs.batch(num_blocks)
            rows = (index < 0).unsqueeze(1).where(0.0, states[index.maximum(0)]).contiguous()
            hidden = self._heads.combine(rows, batch.rows)
            angles = self._rope[batch.positions].contiguous()
            out = self._heads.layer(batch.tokens, hidden, batch, self._cache, angles)
            return out[last].contiguous().realize()

        return _Extend(inputs, places, Captured(function, {"num_blocks": (1, self._width)}))

    # ---- before a step

    def _guess(self, batch: Guessing) -> tuple[np.ndarray, np.ndarray]:
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

    def __init__(self, heads: LayerHeads, pool: KVPool, rope: Tensor, width: int, picks: Picks, batch: Guessing):
        self._heads, self._pool, self._rope, self._picks = heads, pool, rope, picks
        B, K = batch.bucket, batch.K
        self._K, self._guesses = K, Guesses(K, B, pool.device)
        self._pitch = aligned(B)
        places = dict.fromkeys(_PLACES, (K - 1) * self._pitch)
        sizes = {"rows": B, "starts": B + 1, "samples": B, "count": 1, "chunks": 2, "tables": B * width}
        self._inputs = PackedArrays(places | sizes, pool.device)
        views = self._inputs.views
        views["starts"][:], views["samples"][:], views["chunks"][0] = range(B + 1), range(B), B
        self._places = [views[name].reshape(K - 1, self._pitch) for name in _PLACES]
        self._tables = views["tables"].reshape(B, width)
        self._captured = Captured(self._run, {"num_blocks": (1, width)})

    def run(self, states: Tensor, batch: Guessing, tables: list[list[int]], book: EntryBook) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [K, B] and probabilities [K, B] of K guesses."""
        S, K, count, blocks = self._pool.block_size, self._K, len(batch.sequences), 1
        positions, slots, lengths = self._places
        slots[:, count:], lengths[:, count:] = NO_SLOT, 0
        for b, (sequence, table) in enumerate(zip(batch.sequences, tables, strict=True)):
            start = len(sequence) - 1  # of the entries of guesses
            placed = [table[p // S] * S + p % S for p in range(start, start + K - 1)]
            book.erase(placed)
            positions[:, b], slots[:, b], lengths[:, b] = range(start, start + K - 1), placed, range(start + 1, start + K)
            self._tables[b, : len(table)] = table
            blocks = max(blocks, (start + K - 2) // S + 1)
        self._inputs.views["rows"][:], self._inputs.views["count"][0] = batch.padded_rows, count
        self._inputs.upload()
        self._picks.place(batch.sequences)
        self._captured(states, num_blocks=blocks)
        return self._guesses.read()

    def _run(self, states: Tensor, num_blocks: int | UOp = 1) -> Tensor:
        """All guesses, each from the one before and the state that it came from: one capture. The last state."""
        x = states[self._inputs.tensors["rows"]].contiguous().realize()
        token = self._guess(0, x)
        for k in range(1, self._K):
            batch = self._batch(k, token, num_blocks)
            angles = self._rope[batch.positions].contiguous()
            x = self._heads.layer(token, self._heads.feed(x), batch, self._pool.layers[0], angles).realize()
            token = self._guess(k, x)
        return x

    def _guess(self, k: int, x: Tensor) -> Tensor:
        """Token int32 [B] of guess k, from its state x [B, E]."""
        logits, best = self._heads.logits(x, self._inputs.tensors["samples"], self._inputs.tensors["count"])
        Tensor.realize(logits, *([] if best is None else [best]))
        token, probability = self._picks.pick(k, logits, best)
        self._guesses.put(k, token.realize(), probability)
        return token

    def _batch(self, k: int, tokens: Tensor, num_blocks: int | UOp) -> Batch:
        tensors = self._inputs.tensors
        positions, slots, lengths = (self._inputs.span(name, (k - 1) * self._pitch, len(self._tables)) for name in _PLACES)
        tables, count = tensors["tables"].reshape(self._tables.shape), tensors["count"]
        return Batch(
            tokens, positions, slots, tables, tensors["starts"], lengths, count, count, tensors["chunks"], tensors["samples"], count,
            num_blocks, num_decodes=int(tokens.shape[0]), max_query=1,
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
        begin = max(end if preemptions == sequence.num_preemptions else 0, sequence.num_freed * self._S)
        wrong = self._keys[self._slots(sequence, begin, stop)] != _keys_of(sequence, begin, stop)
        if not wrong.any():
            return []
        edges = np.flatnonzero(np.diff(np.concatenate([[False], wrong, [False]]).astype(np.int8))).reshape(-1, 2)
        return [(begin + int(a), int(b - a)) for a, b in edges]

    def write(self, sequence: Sequence, start: int, count: int) -> None:
        """Entries of these positions are written."""
        stop = start + count
        if count <= _MAX_SINGLES:  # numpy's calls take longer
            table, S = sequence.block_table, self._S
            for position, token in enumerate(sequence.token_ids(start, stop), start):
                self._keys[table[position // S] * S + position % S] = position << 32 | token
        else:
            self._keys[self._slots(sequence, start, stop)] = _keys_of(sequence, start, stop)
        self._ends[sequence.sequence_id] = stop, sequence.num_preemptions

    def erase(self, slots: list[int]) -> None:
        """Entries of guesses are written there; slots of the drafter's own blocks are not in the book."""
        for slot in slots:
            if slot < len(self._keys):
                self._keys[slot] = -1

    def _slots(self, sequence: Sequence, start: int, stop: int) -> np.ndarray:
        first = start // self._S
        blocks = np.asarray(sequence.block_table[first : -(-stop // self._S)], np.int64)
        positions = np.arange(start, stop)
        slots: np.ndarray = blocks[positions // self._S - first] * self._S + positions % self._S
        return slots


def _keys_of(sequence: Sequence, start: int, stop: int) -> np.ndarray:
    return np.arange(start, stop, dtype=np.int64) << 32 | np.asarray(sequence.token_ids(start, stop), np.int64)


def _laid_out(entries: _Entries) -> Scheduled:
    """Entries of a step: few are rows of one token each, as a token and its drafts are; more are a chunk."""
    sequence, start, count = cast(Sequence, _NextTokens(entries.sequence)), entries.start, entries.count
    return Scheduled(sequence, start, count, 0, tuple(sequence.token_ids(start + 1, start + count)) if count <= _MAX_SINGLES else ())


def _split(missing: list[_Entries]) -> list[list[_Entries]]:
    """Groups of at most _MAX_FILLED entries, in order of position."""
    parts: list[list[_Entries]] = []
    for each in missing:
        for start in range(each.start, each.start + each.count, _MAX_FILLED):
            parts.append([_Entries(each.sequence, start, min(_MAX_FILLED, each.start + each.count - start), None)])
    return parts
