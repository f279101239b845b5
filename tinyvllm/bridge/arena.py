"""Memory for intermediate results of captured steps: one arena for all of them, since one step runs at a time."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from tinygrad import UOp, dtypes
from tinygrad.engine.jit import memory_plan_rewrite  # its home is imported with the scheduler
from tinygrad.uop.ops import Ops

_PARTS = (Ops.BUFFER_VIEW, Ops.CONTIGUOUS, Ops.SHRINK, Ops.RESHAPE)  # a part of one row needs no copy

_arenas: list[weakref.ref[UOp]] = []  # while a captured step uses them


def planned_places(calls: Sequence[UOp], held: set[UOp]) -> dict[UOp, UOp]:
    """The place in an arena of every intermediate buffer of these calls, which are all buffers but those of `held`.

    tinygrad plans an arena for each capture and keeps it as long as the capture. With a capture for each padded shape and each kind of
    draw the total is a multiple of the largest: at a vocabulary of 128k a draw for 64 rows has 66 MB of scratch. Nothing in an arena
    outlives a replay, and replays of a device follow each other. The results of a capture are in buffers of its own.
    """
    plan = _Calls([call.replace(src=(call.src[0], *map(_whole_buffer, call.src[1:]))) for call in calls])
    memory_plan_rewrite(plan, held)  # type: ignore[arg-type]
    own = {view.src[0] for view in plan.places.values()}
    shared: dict[UOp, UOp] = {}
    for arena in sorted(own, key=lambda u: -int(u.arg)):
        assert arena.dtype == dtypes.int8, f"a plan of memory with a buffer of {arena.dtype} among its arenas"
        shared[arena] = fitting_arena(arena.device, int(arena.arg), set(shared.values()))
    return {buffer: view.replace(src=(shared[view.src[0]],)) for buffer, view in plan.places.items()}


def _whole_buffer(argument: UOp) -> UOp:
    """What a contiguous part is a part of: tinygrad's planner does not count its use, and would give the memory away while it is read."""
    while argument.op in _PARTS:
        argument = argument.src[0]
    return argument


class _Calls:
    """What tinygrad's planner takes for the list of calls: it keeps the plan, where the list would be rewritten, node by node."""

    def __init__(self, calls: Sequence[UOp]):
        self.src, self.places = calls, dict[UOp, UOp]()

    def substitute(self, places: dict[UOp, UOp], **options: Any) -> None:
        self.places = places


def arenas() -> list[UOp]:
    """The arenas of captured steps, int8 buffers."""
    return [arena for ref in _arenas if (arena := ref()) is not None]


def fitting_arena(device: str, nbytes: int, used: set[UOp]) -> UOp:
    """The smallest arena of the device that is large enough and not `used`, or a new one of a power of two bytes.

    It lives as long as something holds it.
    """
    living = arenas()
    _arenas[:] = [weakref.ref(arena) for arena in living]
    fitting = [u for u in living if u.device == device and u.arg >= nbytes and u not in used]
    if fitting:
        return min(fitting, key=lambda u: int(u.arg))
    fresh: UOp = UOp.new_buffer(device, 1 << (nbytes - 1).bit_length(), dtypes.int8)
    _arenas.append(weakref.ref(fresh))
    return fresh
