"""Memory for intermediate results of captured steps: one arena for all of them, since one step runs at a time."""

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
    """Within it, captures share the memory of their intermediate results.

    tinygrad plans an arena for each capture and keeps it as long as the capture. With a capture for each padded shape and each kind of
    draw the total is a multiple of the largest: at a vocabulary of 128k a draw for 64 rows has 66 MB of scratch. Nothing in an arena
    outlives a replay, and replays of a device follow each other. The results of a capture are in buffers of its own.
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
    """`planned` with each arena that is not in `before` replaced by a shared one that is large enough."""
    known = set(before.toposort())
    new = [u for u in planned.toposort() if u.op is Ops.BUFFER and u not in known]
    used: set[UOp] = set()
    replacements: dict[UOp, UOp] = {}
    for arena in sorted(new, key=lambda u: -int(u.arg)):
        assert arena.dtype == dtypes.int8, f"a plan of memory with a buffer of {arena.dtype} among its arenas"
        replacements[arena] = _arena(arena, used)
        used.add(replacements[arena])
    shared: UOp = planned.substitute(replacements, name="shared arenas", walk=True)
    return shared


def _arena(wanted: UOp, used: set[UOp]) -> UOp:
    """The smallest arena on the same device that is large enough and not `used`, or a new one of a power of two bytes."""
    living = [arena for ref in _arenas if (arena := ref()) is not None]
    _arenas[:] = [weakref.ref(arena) for arena in living]
    fitting = [u for u in living if u.device == wanted.device and u.arg >= wanted.arg and u not in used]
    if fitting:
        return min(fitting, key=lambda u: int(u.arg))
    fresh: UOp = UOp.new_buffer(wanted.device, 1 << (int(wanted.arg) - 1).bit_length(), dtypes.int8)
    _arenas.append(weakref.ref(fresh))
    return fresh
