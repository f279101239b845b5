"""From a schedule to the batch's arrays: picks the padded shape, fills one int32 array on the host, which one copy takes to the device.

No tensors are computed here. The order of the rows: sequences with one token first, padded to their bucket, then the chunks. Those with
one token that share blocks stand side by side, so that attention can read the blocks once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from tinygrad import Tensor, UOp, dtypes

from tinyvllm.batch import Batch
from tinyvllm.bridge import spans, upload, upload_parts
from tinyvllm.scheduler import Schedule, Scheduled

ALIGNED = 16  # int32s: kernels generated for vectors load from such borders
SMALLEST_CHUNK = 16  # tokens; every bucket is a capture of some hundred milliseconds, so there are few


@dataclass(frozen=True)
class Shape:
    """The padded shape of a step, which is also the key of its capture.

    `decodes` sequences of one token, `chunks` sequences of up to `max_query` tokens that make up `chunk_tokens` rows together.
    """

    decodes: int
    chunks: int
    chunk_tokens: int
    max_query: int

    @property
    def tokens(self) -> int:
        return self.decodes + self.chunk_tokens

    @property
    def sequences(self) -> int:
        return self.decodes + self.chunks


def decode_bucket(count: int) -> int:
    """1, 2, 4, 8, then multiples of 8."""
    return next((bucket for bucket in (0, 1, 2, 4) if count <= bucket), -(-count // 8) * 8)


def power_bucket(count: int, smallest: int = 1) -> int:
    """The next power of two, at least `smallest`."""
    return max(smallest, 1 << (count - 1).bit_length())


def split(schedule: Schedule) -> tuple[list[Scheduled], list[Scheduled]]:
    """Entries of one token, and chunks."""
    singles = [entry for entry in schedule.entries if entry.num_tokens == 1]
    return singles, [entry for entry in schedule.entries if entry.num_tokens > 1]


def shape_of(singles: list[Scheduled], chunks: list[Scheduled]) -> Shape:
    if not chunks:
        return Shape(decode_bucket(len(singles)), 0, 0, 1)
    tokens = power_bucket(sum(entry.num_tokens for entry in chunks), SMALLEST_CHUNK)
    longest = tokens if len(chunks) == 1 else power_bucket(max(entry.num_tokens for entry in chunks), SMALLEST_CHUNK)
    # a step with both is rare beside pure decodes: coarse buckets, so that it is seldom captured anew
    decodes = power_bucket(len(singles), 8) if singles else 0
    return Shape(decodes, power_bucket(len(chunks)), tokens, min(longest, tokens))


def usual_shapes(max_num_seqs: int, max_batched_tokens: int) -> list[Shape]:
    """The shapes of most steps: decodes alone, a piece of a prompt alone, and both together, in the order in which traffic grows."""
    decodes = sorted({decode_bucket(n) for n in range(1, max_num_seqs + 1)})
    beside = sorted({power_bucket(n, 8) for n in range(1, max_num_seqs)})
    pieces = [SMALLEST_CHUNK << n for n in range((power_bucket(max_batched_tokens, SMALLEST_CHUNK) // SMALLEST_CHUNK).bit_length())]
    shapes = [Shape(0, 1, tokens, tokens) for tokens in pieces] + [Shape(count, 0, 0, 1) for count in decodes]
    return shapes + [Shape(count, 1, tokens, tokens) for count in beside for tokens in pieces]


def side_by_side(tables: list[list[int]]) -> list[int]:
    """An order of block tables, as indices, in which those that begin alike stand together, the longer alike the closer.

    Otherwise they stay in their order. A block that two sequences share is full and stays where it is, and every table ends with a block of
    its own, so the order is the same however far the sequences have come.
    """
    place: dict[int, int] = {}
    for i, table in enumerate(tables):
        place.setdefault(table[0], i)
    if len(place) == len(tables):
        return list(range(len(tables)))
    return sorted(range(len(tables)), key=lambda i: (place[tables[i][0]], tables[i]))


class StepInputs:
    """The arrays of one shape: host array, device buffer, and the `Batch` of views into it.

    M is the width of the block table, `scratch_slot` where padded rows write; `all_rows` wants the logits of every row. Without `cascade`
    decodes keep the schedule's order, and `shared_prefix_lens` is 0 everywhere.
    """

    def __init__(self, shape: Shape, M: int, scratch_slot: int, device: str, all_rows: bool = False, cascade: bool = True):
        T, B = shape.tokens, shape.sequences
        self.shape, self.width, self.scratch_slot, self._all_rows, self._cascade = shape, M, scratch_slot, all_rows, cascade
        self._scheduled: list[int] = []  # ids of the last decodes in the schedule's order
        self._order: list[int] = []  # of the rows: places in the schedule
        self._tables: list[list[int]] = [[] for _ in range(B)]  # the sequences' own, which only grow, as laid out last
        self._widths = [0] * B  # how much of each was laid out
        self._row_of: dict[int, int] = {}  # by the ids of the decodes that were laid out last
        self._ahead = 0  # tokens that the device has moved these decodes on by since; 0 where it has not, or there were chunks
        self._sharing = False  # whether two of them begin with the same block
        # what changes on the way of decodes stands together
        sizes = {"tokens": T, "positions": T, "slots": T, "context_lens": B, "shared_prefix_lens": B, "query_starts": B + 1}
        sizes |= {"samples": T if all_rows else B, "rows": 1, "decodes": 1, "chunks": 2, "sample_count": 1, "block_tables": B * M}
        starts, end = {}, 0
        for name, size in sizes.items():
            starts[name], end = end, end + -(-size // ALIGNED) * ALIGNED
        self._host, self._starts = np.zeros(end, dtype=np.int32), starts
        self._device = Tensor.zeros(end, dtype=dtypes.int32, device=device).contiguous().realize()
        parts = spans(self._device, [(starts[name], size) for name, size in sizes.items()])
        self._tensors = dict(zip(sizes, parts, strict=True))
        for name, size in sizes.items():
            setattr(self, name, self._host[starts[name] : starts[name] + size])
        self.block_tables = self.block_tables.reshape(B, M)
        self._tensors["block_tables"] = self._tensors["block_tables"].reshape(B, M)

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    query_starts: np.ndarray
    context_lens: np.ndarray
    shared_prefix_lens: np.ndarray
    samples: np.ndarray
    rows: np.ndarray
    decodes: np.ndarray
    chunks: np.ndarray
    sample_count: np.ndarray
    block_tables: np.ndarray

    def batch(self, num_blocks: int | UOp) -> Batch:
        t = self._tensors
        return Batch(
            t["tokens"], t["positions"], t["slots"], t["block_tables"], t["query_starts"], t["context_lens"], t["rows"], t["decodes"],
            t["chunks"], t["samples"], t["sample_count"], num_blocks, self.shape.decodes, self.shape.max_query, t["shared_prefix_lens"],
        )  # fmt: skip

    def fill(self, singles: list[Scheduled], chunks: list[Scheduled], block_size: int) -> int:
        """Lay the entries out and copy them to the device; returns the blocks of the longest context.

        `singles` is sorted in place, into the order of the rows. Decodes that only go on need no copy: the device has advanced itself. New
        blocks are all that it cannot know.
        """
        if self._cascade:
            self._arrange(singles)
        if not chunks and self._has_ready(singles):
            return self.go_on(singles, block_size)
        self.tokens[:], self.positions[:], self.slots[:] = 0, 0, self.scratch_slot
        self.context_lens[:], self.samples[:] = 0, 0
        sampled, longest = 0, 1
        for b, entry in enumerate(singles):
            sequence, position = entry.sequence, entry.start
            table = sequence.block_table
            self.tokens[b] = sequence.token_at(position)
            self.positions[b] = position
            self.slots[b] = table[position // block_size] * block_size + position % block_size
            self._describe(b, position + 1, table)
            longest = max(longest, len(table))
            if entry.samples:
                self.samples[sampled] = b
                sampled += 1
        decodes, row = self.shape.decodes, self.shape.decodes
        self.query_starts[: decodes + 1] = np.arange(decodes + 1)
        for b, entry in enumerate(chunks, start=decodes):
            start, stop = entry.start, entry.start + entry.num_tokens
            table = entry.sequence.block_table
            end = row + entry.num_tokens
            positions = np.arange(start, stop, dtype=np.int32)
            self.tokens[row:end] = entry.sequence.token_ids(start, stop)
            self.positions[row:end] = positions
            self.slots[row:end] = np.asarray(table, dtype=np.int32)[positions // block_size] * block_size + positions % block_size
            self._describe(b, stop, table)
            longest = max(longest, len(table))
            row = end
            self.query_starts[b + 1] = row
            if entry.samples:
                self.samples[sampled] = row - 1
                sampled += 1
        self.query_starts[decodes + len(chunks) + 1 :] = row
        self._row_of = {} if chunks else {entry.sequence.sequence_id: b for b, entry in enumerate(singles)}
        self._ahead = 0
        self.rows[0], self.decodes[0] = row if chunks else len(singles), len(singles)
        self.chunks[:] = decodes, len(chunks)
        if self._all_rows:
            self.samples[:], sampled = np.arange(self.shape.tokens), row if chunks else len(singles)
        self.sample_count[0] = sampled
        self._measure(len(singles), block_size)
        upload(self._device, self._host)
        return longest

    def advanced(self, rounds: int) -> None:
        """The device has moved the decodes on by so many tokens; they are what it has ready, if they all are still there."""
        self._ahead += rounds

    @property
    def ready(self) -> bool:
        """Whether the device has the last decodes' next step ready."""
        return self._ahead > 0

    def _has_ready(self, singles: list[Scheduled]) -> bool:
        """Whether these decodes are what the device has ready, row by row."""
        if not self._ahead or len(singles) != len(self._row_of):
            return False
        starts = (self.positions[: len(singles)] + self._ahead).tolist()
        return all(self._row_of.get(e.sequence.sequence_id) == b and starts[b] == e.start for b, e in enumerate(singles))

    def _arrange(self, singles: list[Scheduled]) -> None:
        """Sort decodes into rows. They stay while the schedule's do: a step may be launched before the last one's tokens are known."""
        scheduled = [entry.sequence.sequence_id for entry in singles]
        if scheduled != self._scheduled:
            self._scheduled, self._order = scheduled, side_by_side([entry.sequence.block_table for entry in singles])
        singles[:] = [singles[i] for i in self._order]

    def _measure(self, count: int, block_size: int) -> bool:
        """Fill `shared_prefix_lens`: the first `count` rows from the block table, the others 0. Returns whether anything changed."""
        before, tables = self.shared_prefix_lens.copy(), self.block_tables[:count]
        self.shared_prefix_lens[:] = 0
        self._sharing = self._cascade and bool((tables[1:, 0] == tables[:-1, 0]).any())
        if self._sharing:
            full = self.context_lens[:count] // block_size
            both = np.minimum(full[1:], full[:-1])  # what stands behind them may be of somebody who had the row before
            width = int(both.max())
            differ = np.ones((count - 1, width + 1), np.bool_)
            differ[:, :width] = tables[1:, :width] != tables[:-1, :width]
            self.shared_prefix_lens[1:count] = np.minimum(differ.argmax(1), both) * block_size
        return not np.array_equal(before, self.shared_prefix_lens)

    def go_on(self, entries: Iterable[Scheduled], block_size: int) -> int:
        """Of decodes that the device has moved on, copy what it cannot know: the blocks of `entries`, all that have come into another.

        Returns the blocks of the longest context.
        """
        count, first, starts = len(self._row_of), self._starts["block_tables"], self._starts["slots"]
        for moved in (self.positions, self.slots, self.context_lens):  # as the device has done it; the slots as far as blocks went
            moved[:count] += self._ahead
        self._ahead = 0
        parts: list[tuple[int, int]] = []
        for entry in entries:
            b, position, table = self._row_of[entry.sequence.sequence_id], entry.start, entry.sequence.block_table
            self._sharing = self._sharing or (self._cascade and self._tables[b] is not table)
            # a sequence whose blocks were full when it was advanced has been sent to scratch
            self.slots[b] = table[position // block_size] * block_size + position % block_size
            if new := self._lay_table(b, table):
                end = first + b * self.width + len(table)
                parts += ((end - new, end), (starts + b, starts + b + 1))
        if parts:
            if self._sharing and self._measure(count, block_size):
                parts.append((self._starts["shared_prefix_lens"], self._starts["shared_prefix_lens"] + count))
            upload_parts(self._device, self._host, parts)
        return max(self._widths[:count])

    def _describe(self, b: int, context: int, table: list[int]) -> None:
        self.context_lens[b] = context
        self._lay_table(b, table)

    def _lay_table(self, b: int, table: list[int]) -> int:
        """Write what is new of a row's block table; how many blocks that is."""
        known = self._widths[b] if self._tables[b] is table else 0
        if known < len(table):  # it grows once in a block's worth of steps
            self.block_tables[b, known : len(table)] = table[known:]
        self._tables[b], self._widths[b] = table, len(table)
        return len(table) - known
