"""Drafts in a schedule: rows after the last known token of a sequence, which the step computes and then keeps or drops. Integers only.

A draft needs a slot and a part of the step's budget like any token. It counts as computed once it is known to be the sequence's own token;
the slots of the others are overwritten by later steps, and the prefix cache never sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tinyvllm.request import Sequence
from tinyvllm.scheduler.schedule import Schedule, Scheduled, SchedulerLimits, Tokens
from tinyvllm.scheduler.scheduler import Scheduler


def add_drafts(scheduler: Scheduler, schedule: Schedule, drafts: Mapping[int, Tokens]) -> Schedule:
    """The same step, which has not run yet, with drafts for decodes, by sequence id: as many as fit, from the first of each.

    They count against the tokens of a step, and stay within the longest context. A copy of recurrent states is made after a token that is
    no draft: drafts end before it. Blocks for them come without preemption, and as many as
    sequences run stay free, so that no draft takes the block that another sequence's next token needs.
    """
    budget = unused = scheduler.limits.max_batched_tokens - schedule.num_tokens
    entries = list(schedule.entries)
    for i, entry in enumerate(entries):
        wanted = drafts.get(entry.sequence.sequence_id, ()) if entry.is_decode else ()
        count = min(len(wanted), budget, _most(scheduler.limits, entry))
        if count > 0 and (count := _allocate(scheduler, entry, count)):
            entries[i] = Scheduled(entry.sequence, entry.start, count + 1, count + 1, wanted[:count])
            budget -= count
            scheduler.waiting.serve(entry.sequence.options.key, count)
    if budget == unused:
        return schedule
    if scheduler._reusable is not None:
        scheduler._reusable.was_interrupted = True
    return replace(schedule, entries=entries, reused=False, changed=[])


def _most(limits: SchedulerLimits, entry: Scheduled) -> int:
    """How many drafts an entry may have."""
    room, sequence = limits.max_model_len - entry.start - 2, entry.sequence
    if limits.max_drafts is not None:
        room = min(room, limits.max_drafts)
    return min(room, sequence.copy_at - entry.start - 2) if sequence.copy_at > entry.start + 1 else room


def _allocate(scheduler: Scheduler, entry: Scheduled, count: int) -> int:
    """Allocate blocks for `count` drafts after an entry's token, as far as there are any to spare; how many drafts have slots then."""
    pool, tables, row = scheduler.pool, scheduler.tables, scheduler.tables.groups.count
    missing = tables.lacking(entry.sequence, entry.start + 1 + count)
    spare = max(0, pool.num_free - len(scheduler.running) * row) // row * row
    if missing:
        entry.sequence.block_table += pool.allocate(min(missing, spare))
    return min(count, tables.room(entry.sequence) - entry.start - 1)


def num_confirmed(entry: Scheduled) -> int:
    """How many of an entry's drafts, from the first, are tokens of its sequence by now."""
    first = entry.start + 1
    known = entry.sequence.token_ids(first, first + len(entry.drafts))
    return next((i for i, token in enumerate(known) if token != entry.drafts[i]), len(known))


def count_confirmed(entry: Scheduled) -> None:
    """The step has run: keys and values of drafts that are tokens of a running sequence by now count as computed."""
    sequence: Sequence = entry.sequence
    if entry.drafts and not sequence.finished:
        assert entry.start < sequence.num_computed, f"Scheduler: a step of {sequence.sequence_id} was not advanced"
        sequence.num_computed = entry.start + 1 + num_confirmed(entry)
