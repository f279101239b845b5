"""Sequences that start from what another has computed: continuations of one prompt, beams, and the blocks copied for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tinyvllm.request import Sequence
from tinyvllm.scheduler.tables import BlockTables


class Siblings:
    """Continuations of a prompt that wait until the first of them has computed it."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Sequence]] = {}  # by the id of the first

    def __iter__(self) -> Iterator[Sequence]:
        return (sibling for family in self._waiting.values() for sibling in family)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, first: Sequence, siblings: Iterable[Sequence]) -> None:
        if waiting := list(siblings):
            self._waiting[first.sequence_id] = waiting

    def take(self, first: Sequence) -> list[Sequence]:
        """The siblings that wait for `first`; they no longer wait here."""
        return self._waiting.pop(first.sequence_id, [])

    def remove(self, sequence: Sequence) -> bool:
        """Drop one that waits; False if it does not."""
        for family in self._waiting.values():
            if sequence in family:
                family.remove(sequence)
                return True
        return False


class BlockCopies:
    """Copy on write: a fork shares full blocks with its parent and gets a copy of the partly filled row before the next step.

    The source of a copy is held until the copy has run.
    """

    def __init__(self, tables: BlockTables) -> None:
        self._pool, self._groups = tables.pool, tables.groups
        self._sources: dict[int, int] = {}  # block -> block that is copied into it before the next step
        self._running: list[int] = []  # sources of the last schedule's copies

    def __iter__(self) -> Iterator[int]:
        """Every source that is held."""
        yield from self._sources.values()
        yield from self._running

    def share(self, parent: Sequence, full: int, partial: bool) -> list[int]:
        """A new table: the first `full` rows of the parent's, shared as far as held, and a copy of the next one if it is `partial`."""
        table, row = parent.block_table, self._groups.count
        shared = table[: full * row]
        self._pool.share(self._groups.held(shared, parent.num_freed))
        if not partial:
            return shared
        sources = [self.source_of(block) for block in table[full * row : (full + 1) * row]]
        self._pool.share(sources)
        blocks = self._pool.allocate(row)
        self._sources.update(zip(blocks, sources, strict=True))
        return shared + blocks

    def source_of(self, block: int) -> int:
        """The block that holds the contents of `block` now: its source while the copy has not run."""
        return self._sources.get(block, block)

    def cancel(self, table: list[int]) -> None:
        """Drop pending copies into blocks that are about to be released: by the time they ran, another sequence could own them."""
        if self._sources:
            self._pool.release([source for block in table if (source := self._sources.pop(block, None)) is not None])

    def launch(self) -> list[tuple[int, int]]:
        """The pending copies as (from, to), for the schedule that runs them."""
        copies = [(source, block) for block, source in self._sources.items()]
        self._running = list(self._sources.values())
        self._sources.clear()
        return copies

    def release_sources(self) -> None:
        """The last schedule's copies have run."""
        self._pool.release(self._running)
        self._running = []
