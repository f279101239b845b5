"""From a schedule to the batch's arrays: picks the padded shape and fills one int32 array on the host, which one copy moves to the device.

No tensors are computed here. Order of the rows: sequences with one token first, padded to their bucket, then those with several. Sequences
with one token that share blocks are adjacent, so that attention can read the blocks once.

A sequence with k drafts is k + 1 adjacent rows of one token each, with the same block table: a step that checks drafts is a step of decodes
(docs/decisions/0035-drafts-are-rows-of-decodes.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from tinygrad import Tensor, UOp

from tinyvllm.batch import NO_SLOT, Batch
from tinyvllm.bridge import download, upload, upload_parts
from tinyvllm.config.engine import EngineConfig
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import Sequence
from tinyvllm.runner.arrays import PackedArrays
from tinyvllm.runner.states import StateSlots
from tinyvllm.scheduler import Schedule, Scheduled

MIN_CHUNK = 16  # tokens; every bucket is a capture of some hundred milliseconds, so there are few


@dataclass(frozen=True)
class Shape:
    """The padded shape of a step, which is also the key of its capture.

    `decodes` rows of one token each, drafts included, and `chunks` sequences of up to `max_query` tokens that make up `chunk_tokens` rows
    together. With `adapters` some row has one: only these steps compute what adapters add.
    """

    decodes: int
    chunks: int
    chunk_tokens: int
    max_query: int
    adapters: bool = False

    @property
    def tokens(self) -> int:
        return self.decodes + self.chunk_tokens

    @property
    def sequences(self) -> int:
        """Rows of the block table, padding included; also rows of logits."""
        return self.decodes + self.chunks


def decode_bucket(count: int) -> int:
    """1, 2, 4, 8, then multiples of 8."""
    return next((bucket for bucket in (0, 1, 2, 4) if count <= bucket), -(-count // 8) * 8)


def power_bucket(count: int, minimum: int = 1) -> int:
    """The next power of two, at least `minimum`."""
    return max(minimum, 1 << (count - 1).bit_length())


def split(schedule: Schedule) -> tuple[list[Scheduled], list[Scheduled]]:
    """Entries of one token and its drafts, and chunks: entries of several tokens that the sequence has, and few of one."""
    singles = [entry for entry in schedule.entries if _is_single(entry)]
    return singles, [entry for entry in schedule.entries if not _is_single(entry)]


def _is_single(entry: Scheduled) -> bool:
    """A token whose state is somewhere else is a chunk: the device would take it from there again when it advances a decode."""
    return bool(entry.drafts) or (entry.num_tokens == 1 and entry.sequence.state_source < 0)


def shape_of(singles: list[Scheduled], chunks: list[Scheduled]) -> Shape:
    count = sum(entry.num_tokens for entry in singles)
    adapters = any(entry.sequence.adapter for entry in (*singles, *chunks))
    if not chunks:  # with drafts the number of rows changes with every step: powers of two, most of which plain decodes capture, too
        return Shape(decode_bucket(count) if count == len(singles) else power_bucket(count), 0, 0, 1, adapters)
    tokens = power_bucket(sum(entry.num_tokens for entry in chunks), MIN_CHUNK)
    max_query = tokens if len(chunks) == 1 else power_bucket(max(entry.num_tokens for entry in chunks), MIN_CHUNK)
    # steps with both are rare compared with pure decodes: coarse buckets, so that few of them are captured
    decodes = power_bucket(count, 8) if singles else 0
    return Shape(decodes, power_bucket(len(chunks)), tokens, min(max_query, tokens), adapters)


def usual_shapes(max_num_seqs: int, max_batched_tokens: int, max_drafts: int = 0) -> list[Shape]:
    """The shapes of most steps: a chunk of a prompt alone, decodes alone, and both together, in the order in which traffic grows.

    Decodes with up to `max_drafts` drafts, of all sequences, have powers of two as numbers of rows.
    """
    decodes = {decode_bucket(n) for n in range(1, max_num_seqs + 1)}
    if max_drafts:
        rows = power_bucket(min(max_num_seqs + max_drafts, max(max_num_seqs, max_batched_tokens)))
        decodes |= {1 << n for n in range(rows.bit_length())}
    mixed = sorted({power_bucket(n, 8) for n in range(1, max_num_seqs)})
    chunks = [MIN_CHUNK << n for n in range((power_bucket(max_batched_tokens, MIN_CHUNK) // MIN_CHUNK).bit_length())]
    shapes = [Shape(0, 1, tokens, tokens) for tokens in chunks] + [Shape(count, 0, 0, 1) for count in sorted(decodes)]
    return shapes + [Shape(count, 1, tokens, tokens) for count in mixed for tokens in chunks]


def common_shapes(config: EngineConfig) -> list[Shape]:
    """The shapes of an engine's most common steps, those with drafts included, then those with adapters."""
    chosen = config.speculative_config
    drafts = 0 if chosen is None else chosen.max_step_drafts(config.max_num_seqs)
    shapes = usual_shapes(config.max_num_seqs, config.max_num_batched_tokens, drafts)
    return shapes + [replace(shape, adapters=True) for shape in shapes if config.enable_lora]


def group_shared_prefixes(tables: list[list[int]]) -> list[int]:
    """An order of block tables, as indices, in which tables with a common beginning are adjacent: the longer it is, the closer they are.

    Otherwise they keep their order. A block that two sequences share is full and does not move, and every table ends with a block of its
    own, so the order does not depend on how far the sequences have come.
    """
    first: dict[int, int] = {}
    for i, table in enumerate(tables):
        first.setdefault(table[0], i)
    if len(first) == len(tables):
        return list(range(len(tables)))
    return sorted(range(len(tables)), key=lambda i: (first[tables[i][0]], tables[i]))


_OF_A_GROUP = ("block_tables", "slots", "shared_prefix_lens")  # the arrays that each group of layers has


@dataclass(frozen=True)
class _OfGroup:
    """A group's arrays on the host, and where they begin among all. Numbers of blocks are multiplied by the layers that share one: each
    has blocks of its own size (`KVPool`).
    """

    parts: int
    tables: np.ndarray
    slots: np.ndarray
    shared: np.ndarray
    tables_start: int
    slots_start: int
    shared_start: int


class StepInputs:
    """The arrays of one shape: host array, device buffer, and the `Batch` of views into it.

    M is the width of the block table; padded rows have the slot NO_SLOT; `all_rows` wants the logits of every row. Without
    `cascade` decodes keep the schedule's order, and `shared_prefix_lens` is 0 everywhere. `arrived` [T * E] is the buffer of the residual
    stream in a stage of a pipeline that is not the first. Of several groups of layers each has slots, a block table and shared prefixes;
    `parts` are the layers of each that share a block. `state_slots` are those of a model with recurrent states, None for others.
    """

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
    adapters: np.ndarray  # where the shape has them
    states: np.ndarray  # where the model has them

    def __init__(
        self,
        shape: Shape,
        M: int,
        device: str,
        all_rows: bool = False,
        cascade: bool = True,
        arrived: Tensor | None = None,
        parts: tuple[int, ...] = (1,),
        state_slots: StateSlots | None = None,
    ):
        self.arrived, self._state_slots, self._parts, groups = arrived, state_slots, parts, len(parts)
        self.shape, self.width, self._all_rows, self._cascade, self._groups = shape, M, all_rows, cascade, groups
        B = shape.sequences
        self._scheduled: list[int] = []  # ids of the last decodes in the schedule's order
        self._order: list[int] = []  # row b holds entry _order[b] of the schedule
        self._tables: list[list[int]] = [[] for _ in range(B)]  # the sequences' own lists, which only grow, as laid out last
        self._widths = [0] * B  # how much of each was laid out
        self._row_of: dict[int, int] = {}  # by the ids of the decodes that were laid out last
        self._advanced = 0  # tokens by which the device has advanced these decodes since; 0 if it has not, or there were chunks
        self._sharing = False  # whether two of them begin with the same block
        self._host_knows = False  # whether the host's arrays are the device's
        states = {} if state_slots is None else {"states": 4 * B}
        self._allocate(_array_sizes(shape, M, all_rows, groups) | states, device)

    def _allocate(self, sizes: dict[str, int], device: str) -> None:
        """One host array and one device buffer with all arrays in them, and a view of each array as an attribute and as a tensor."""
        self._arrays = arrays = PackedArrays(sizes, device)
        self._host, self._starts, self._device, self._tensors = arrays.host, arrays.starts, arrays.device, arrays.tensors
        for name, view in arrays.views.items():
            setattr(self, name, view)
        table = self.shape.sequences, self.width
        self.query_starts[: self.shape.decodes + 1] = np.arange(self.shape.decodes + 1)
        self._of_groups: list[_OfGroup] = []
        for group in range(self._groups):
            tables, slots, shared = names = [_name(name, group) for name in _OF_A_GROUP]
            self._tensors[tables] = self._tensors[tables].reshape(table)
            views = arrays.views[tables].reshape(table), arrays.views[slots], arrays.views[shared]
            self._of_groups.append(_OfGroup(self._parts[group], *views, *(self._starts[name] for name in names)))
        self.block_tables = self._of_groups[0].tables
        if self._state_slots is not None:
            self.states, self._tensors["states"] = self.states.reshape(-1, 4), self._tensors["states"].reshape(-1, 4)

    @property
    def all_rows(self) -> bool:
        """Whether the logits of every row are wanted."""
        return self._all_rows

    def copied_arrays(self) -> np.ndarray:
        """All arrays as the device has them, int32: after an advance they are not the host's."""
        arrays: np.ndarray = self._host.copy() if self._host_knows else download(self._device)  # which would wait for steps in flight
        return arrays

    def load(self, arrays: np.ndarray) -> None:
        """Take all arrays from another rank."""
        upload(self._device, arrays)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The arrays on the device, by name."""
        return self._tensors

    def batch(self, num_blocks: int | UOp) -> Batch:
        arrived = None if self.arrived is None else self.arrived.reshape(self.shape.tokens, -1)
        shape, common = self.shape, self._tensors
        if self._groups > 1:
            own = {_name(name, group) for name in _OF_A_GROUP for group in range(1, self._groups)}
            common = {name: tensor for name, tensor in common.items() if name not in own}

        def of_group(group: int, others: tuple[Batch, ...] = ()) -> Batch:
            tensors: dict[str, Any] = common | {name: self._tensors[_name(name, group)] for name in _OF_A_GROUP} if group else common
            return Batch(
                **tensors, arrived=arrived, num_blocks=num_blocks, num_decodes=shape.decodes, max_query=shape.max_query, others=others
            )

        return of_group(0, tuple(of_group(group) for group in range(1, self._groups)))

    def fill(self, singles: list[Scheduled], chunks: list[Scheduled], block_size: int) -> int:
        """Lay the entries out and copy them to the device; returns the blocks of the longest context.

        `singles` is sorted in place, into the order of the rows. If the device has advanced these very decodes itself, only their new
        blocks are copied, which it cannot know.
        """
        if self._cascade:
            self._arrange(singles)
        num_rows = sum(entry.num_tokens for entry in singles)
        drafted = num_rows > len(singles)
        if not chunks and not drafted and self._device_holds(singles):
            return self.reuse(singles, block_size)
        self._host[: self._starts["shared_prefix_lens"]] = 0  # the arrays before it
        for group in self._of_groups:
            group.slots[:] = NO_SLOT
        self._lay_singles(singles, block_size)
        end = self._lay_chunks(chunks, block_size)
        self.rows[0] = end if chunks else num_rows
        self.decodes[0] = num_rows
        self.chunks[:] = self.shape.decodes, len(chunks)
        self._lay_samples(singles, chunks)
        if self.shape.adapters:
            self._lay_adapters(singles, chunks)
        if self._state_slots is not None:
            self._lay_states(self._state_slots, singles, chunks)
        self._measure_shared(num_rows, block_size)
        self._row_of = {} if chunks or drafted else {entry.sequence.sequence_id: b for b, entry in enumerate(singles)}
        self._advanced = 0
        self._arrays.upload()
        self._host_knows = True
        return max((len(entry.sequence.block_table) for entry in (*singles, *chunks)), default=self._groups) // self._groups

    def mark_advanced(self, rounds: int) -> None:
        """The device has advanced the decodes by `rounds` tokens; their next step is ready there if all of them are still running."""
        self._advanced += rounds
        self._host_knows = False

    def forget_advanced(self) -> None:
        """What the device has ready is unknown: the next `fill` copies everything."""
        self._advanced = 0
        self._row_of = {}

    @property
    def ready(self) -> bool:
        """Whether the device has the next step of the last decodes ready."""
        return self._advanced > 0

    def reuse(self, entries: Iterable[Scheduled], block_size: int) -> int:
        """After the device has advanced the decodes, copy what it cannot know: blocks of `entries`, all that have reached another one.

        Returns the blocks of the longest context.
        """
        count, groups = len(self._row_of), self._of_groups
        # as the device did it; slots as far as the blocks reached
        for array in (self.positions, self.context_lens, *(group.slots for group in groups)):
            array[:count] += self._advanced
        self._advanced = 0
        parts: list[tuple[int, int]] = []
        for entry in entries:
            b, table = self._row_of[entry.sequence.sequence_id], entry.sequence.block_table
            self._sharing = self._sharing or (self._cascade and self._tables[b] is not table)
            # a sequence whose blocks were full when it was advanced has NO_SLOT on the device
            for number, group in enumerate(groups):
                group.slots[b] = _slot_of_group(table, entry.start, block_size, self._parts, number)
            if new := self._lay_table(b, table):
                new, width = new // self._groups, len(table) // self._groups
                for group in groups:
                    end = group.tables_start + b * self.width + width
                    parts += ((end - new, end), (group.slots_start + b, group.slots_start + b + 1))
                if self._state_slots is not None:
                    self.states[b] = _state_slots(self._state_slots, entry.sequence)
                    states = self._starts["states"] + 4 * b
                    parts.append((states, states + 4))
        if parts:
            if self._sharing and self._measure_shared(count, block_size):
                parts += [(group.shared_start, group.shared_start + count) for group in groups]
            upload_parts(self._device, self._host, parts)
        return max(self._widths[:count]) // self._groups

    def _device_holds(self, singles: list[Scheduled]) -> bool:
        """Whether the step that the device has ready is of these decodes, row by row."""
        if not self._advanced or len(singles) != len(self._row_of):
            return False
        starts = (self.positions[: len(singles)] + self._advanced).tolist()
        return all(self._row_of.get(e.sequence.sequence_id) == b and starts[b] == e.start for b, e in enumerate(singles))

    def _arrange(self, singles: list[Scheduled]) -> None:
        """Sort decodes into rows. The order lasts while the schedule's does: a step may be launched before the last tokens are known."""
        scheduled = [entry.sequence.sequence_id for entry in singles]
        if scheduled != self._scheduled:
            self._scheduled, self._order = scheduled, group_shared_prefixes([entry.sequence.block_table for entry in singles])
        singles[:] = [singles[i] for i in self._order]

    def _lay_singles(self, singles: list[Scheduled], block_size: int) -> None:
        """A row for the one token of each entry, and one after it for each of its drafts."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        row = self._groups
        for entry in singles:  # lists first: a number written into an array takes longer than one appended
            table, rows = entry.sequence.block_table, range(entry.start, entry.start + entry.num_tokens)
            tokens.append(entry.sequence.token_at(entry.start))
            tokens += entry.drafts
            if row == 1:
                slots += [_slot(table, position, block_size) for position in rows]
            for b in range(len(positions), len(positions) + entry.num_tokens):
                self._lay_table(b, table)
            positions += rows
        count = len(tokens)
        self.tokens[:count], self.positions[:count] = tokens, positions
        if row == 1:
            self.slots[:count] = slots
        for number, group in enumerate(self._of_groups if row > 1 else ()):
            of_rows = ((entry.sequence.block_table, entry.start + i) for entry in singles for i in range(entry.num_tokens))
            group.slots[:count] = [_slot_of_group(table, at, block_size, self._parts, number) for table, at in of_rows]
        self.context_lens[:count] = [position + 1 for position in positions]

    def _lay_chunks(self, chunks: list[Scheduled], block_size: int) -> int:
        """The tokens of all chunks, one after another from row `decodes` on; returns the end of the last."""
        row = self.shape.decodes
        for b, entry in enumerate(chunks, start=self.shape.decodes):
            start, stop, end = entry.start, entry.start + entry.num_tokens, row + entry.num_tokens
            table, positions = entry.sequence.block_table, np.arange(start, stop, dtype=np.int32)
            self.tokens[row:end] = entry.sequence.token_ids(start, stop)
            self.positions[row:end] = positions
            blocks = np.asarray(table, dtype=np.int32).reshape(-1, self._groups)[positions // block_size]
            for number, group in enumerate(self._of_groups):
                group.slots[row:end] = blocks[:, number] * group.parts * block_size + positions % block_size
            self.context_lens[b] = stop
            self._lay_table(b, table)
            self.query_starts[b + 1] = row = end
        self.query_starts[self.shape.decodes + len(chunks) + 1 :] = row
        return row

    def _lay_samples(self, singles: list[Scheduled], chunks: list[Scheduled]) -> None:
        """The rows whose logits are wanted: of each entry the last `num_logits`, entry by entry."""
        if self._all_rows:
            self.samples[:], self.sample_count[0] = np.arange(self.shape.tokens), self.rows[0]
            return
        wanted = [entry.num_logits > 0 for entry in singles for _ in range(entry.num_tokens)]
        rows = [b for b, wants in enumerate(wanted) if wants]
        for b, entry in enumerate(chunks, start=self.shape.decodes):
            end = int(self.query_starts[b + 1])
            rows += range(end - entry.num_logits, end)
        self.samples[: len(rows)], self.samples[len(rows) :] = rows, 0
        self.sample_count[0] = len(rows)

    def _lay_adapters(self, singles: list[Scheduled], chunks: list[Scheduled]) -> None:
        """The adapter of each row; a padded row has none."""
        self.adapters[:] = 0
        for first, entries in ((0, singles), (self.shape.decodes, chunks)):
            rows = [entry.sequence.adapter for entry in entries for _ in range(entry.num_tokens)]
            self.adapters[first : first + len(rows)] = rows

    def _lay_states(self, slots: StateSlots, singles: list[Scheduled], chunks: list[Scheduled]) -> None:
        """The slots of the states of each sequence (`Batch.states`)."""
        self.states[:] = slots.scratch, slots.scratch, slots.scratch, 0
        for first, entries in ((0, singles), (self.shape.decodes, chunks)):
            b = first
            for entry in entries:
                rows = 1 + len(entry.drafts)
                self.states[b : b + rows] = _state_slots(slots, entry.sequence)
                b += rows

    def _measure_shared(self, count: int, block_size: int) -> bool:
        """Fill `shared_prefix_lens`: the first `count` rows from the block table, the others 0. Returns whether anything changed."""
        full = ((self.context_lens[:count] - 1) // block_size).tolist()  # a draft's row is not all in common with the row before it
        self._sharing = False
        changed = [self._measure_group(number, full, block_size) for number in range(self._groups)]
        return any(changed)

    def _measure_group(self, number: int, full: list[int], block_size: int) -> bool:
        """The same of one group; `full` has the full blocks of each row."""
        tables, group = self._tables, self._of_groups[number]
        blocks, others = [0] * len(group.shared), list[int]()
        for b in range(1, len(full) if self._cascade else 0):
            if tables[b][number] == tables[b - 1][number]:
                self._sharing = True
                blocks[b] = min(full[b], full[b - 1])  # what follows may belong to a sequence that had the row before
                if tables[b] is not tables[b - 1]:
                    others.append(b)
        if others:
            _compare_tables(group.tables, others, blocks)
        lengths = [block_size * n for n in blocks]
        if lengths == group.shared.tolist():
            return False
        group.shared[:] = lengths
        return True

    def _lay_table(self, b: int, table: list[int]) -> int:
        """Write the new blocks of a row's table; returns how many there are."""
        known = self._widths[b] if self._tables[b] is table else 0
        if known < len(table):  # it grows once in block_size steps
            if self._groups == 1:
                self.block_tables[b, known : len(table)] = table[known:]
            else:
                blocks = np.asarray(table[known:], np.int32).reshape(-1, self._groups)
                for number, group in enumerate(self._of_groups):
                    group.tables[b, known // self._groups : len(table) // self._groups] = blocks[:, number] * group.parts
        self._tables[b], self._widths[b] = table, len(table)
        return len(table) - known


def _compare_tables(tables: np.ndarray, rows: list[int], blocks: list[int]) -> None:
    """Lower the `blocks` of these rows to those that each has in common with the row before."""
    widths = np.array([blocks[b] for b in rows])
    width, index = int(widths.max()), np.array(rows)
    differ = np.ones((len(rows), width + 1), np.bool_)
    differ[:, :width] = tables[index, :width] != tables[index - 1, :width]
    for b, common in zip(rows, np.minimum(differ.argmax(1), widths).tolist(), strict=True):
        blocks[b] = common


def _slot(table: list[int], position: int, block_size: int) -> int:
    """The slot of the token at a position."""
    return table[position // block_size] * block_size + position % block_size


def _slot_of_group(table: list[int], position: int, block_size: int, parts: tuple[int, ...], group: int) -> int:
    """The same of a group, in a table with a block of each in a row."""
    return table[position // block_size * len(parts) + group] * parts[group] * block_size + position % block_size


def _name(name: str, group: int) -> str:
    """The name of a group's array: the first group's has no number."""
    return f"{name}_{group}" if group else name


def _array_sizes(shape: Shape, M: int, all_rows: bool, groups: int) -> dict[str, int]:
    """int32s of each array. Those that change from decode to decode are adjacent, and come first."""
    T, B, others = shape.tokens, shape.sequences, range(1, groups)
    sizes = {"tokens": T, "positions": T, "slots": T, **{_name("slots", group): T for group in others}, "context_lens": B}
    sizes |= {_name("shared_prefix_lens", group): B for group in range(groups)}
    return sizes | {
        "query_starts": B + 1,
        "samples": T if all_rows else shape.sequences,
        "rows": 1,
        "decodes": 1,
        "chunks": 2,
        "sample_count": 1,
        **{_name("block_tables", group): B * M for group in range(groups)},
        **({"adapters": T} if shape.adapters else {}),
    }


def _state_slots(slots: StateSlots, sequence: Sequence) -> tuple[int, int, int, int]:
    """A row of `Batch.states`."""
    own, source = slots.of_row(sequence.row), sequence.state_source
    copy = slots.of_copy(sequence.copy_slot) if sequence.copy_at else slots.scratch
    return own, own if source < 0 else slots.of_copy(source), copy, sequence.copy_at
