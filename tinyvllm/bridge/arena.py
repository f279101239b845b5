"""Memory for what captured steps compute on the way: one arena for all of them, since one step runs at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from tinygrad import UOp, dtypes
from tinygrad.engine import jit
from tinygrad.uop.ops import Ops

_arenas: list[weakref.ref[UOp]] = []  # while a captured step uses them


@contextmanager
def shared_arenas() -> Iterator[None]:
    """What tinygrad captures meanwhile keeps its intermediate results where other captures have theirs.

    tinygrad plans an arena for each capture, to be kept as long. With a capture for each padded shape and each kind of draw that is a
    multiple of the largest: at a vocabulary of 128k a draw for 64 rows has 66 MB of scratch. Nothing in an arena outlives a replay, and
    replays of a device follow each other. What a capture returns lies in buffers of its own.
    """
    plan = jit.memory_plan_rewrite

    def planned(linear: UOp, held_bufs: set[UOp] | None = None) -> UOp:
        return _in_shared(linear, plan(linear, held_bufs))

    jit.memory_plan_rewrite = planned
    try:
        yield
    finally:
        jit.memory_plan_rewrite = plan


def _in_shared(before: UOp, planned: UOp) -> UOp:
    """`planned` with each arena that is not in `before` replaced by one that others use, too, if it is large enough."""
    known = set(before.toposort())
    new = [u for u in planned.toposort() if u.op is Ops.BUFFER and u not in known]
    taken: set[UOp] = set()
    places: dict[UOp, UOp] = {}
    for arena in sorted(new, key=lambda u: -int(u.arg)):
        assert arena.dtype == dtypes.int8, f"a plan of memory with a buffer of {arena.dtype} among its arenas"
        places[arena] = _arena(arena, taken)
        taken.add(places[arena])
    return planned.substitute(places, name="shared arenas", walk=True)


def _arena(wanted: UOp, taken: set[UOp]) -> UOp:
    """The smallest arena on the same device that is large enough and not `taken`, or a new one of a power of two bytes."""
    living = [arena for ref in _arenas if (arena := ref()) is not None]
    _arenas[:] = [weakref.ref(arena) for arena in living]
    fitting = [u for u in living if u.device == wanted.device and u.arg >= wanted.arg and u not in taken]
    if fitting:
        return min(fitting, key=lambda u: int(u.arg))
    arena = UOp.new_buffer(wanted.device, 1 << (int(wanted.arg) - 1).bit_length(), dtypes.int8)
    _arenas.append(weakref.ref(arena))
    return arena
