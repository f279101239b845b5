"""After a step that failed: all running sequences wait again. Two functions, since nothing else of a Scheduler needs them."""

from __future__ import annotations

from collections.abc import Collection

from tinyvllm.request import Sequence, Status
from tinyvllm.scheduler.scheduler import Scheduler


def requeue_running(scheduler: Scheduler, unfinished: Collection[Sequence], paused: Collection[Sequence]) -> list[Sequence]:
    """Return all running sequences to the queue; those of `paused` wait for others. Nothing that they computed is published.

    What the device holds of them is unknown: they are recomputed, and so is what was to be swapped. Those of all `unfinished` ones that the
    failure has dropped between two lists are queued again, too. RuntimeError if a block belongs to no sequence afterwards: the scheduler's
    bookkeeping is broken.
    """
    known = {*scheduler.running, *scheduler.waiting, *scheduler._paused, *scheduler._siblings}
    for sequence in [s for s in unfinished if s not in known]:
        scheduler.waiting.push(sequence)
    requeued = list(scheduler.running)
    for sequence in requeued:
        scheduler._stop(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        if sequence in paused:
            scheduler._paused.add(sequence)
        else:
            scheduler.waiting.push(sequence)
    scheduler._copies.release_sources()
    for sequence in (*scheduler.waiting, *scheduler._paused):
        scheduler._swap.drop(sequence)
    check_blocks(scheduler)
    return requeued


def check_blocks(scheduler: Scheduler) -> None:
    """While no sequence runs: RuntimeError unless every block is free, or held by a segment or a borrower."""
    pool = scheduler.pool
    missing = pool.num_blocks - pool.num_free - len(scheduler.pinned) - scheduler.borrowed.num_held
    if missing:
        raise RuntimeError(f"Scheduler: {missing} of {pool.num_blocks} KV blocks belong to no sequence after a failed step")
