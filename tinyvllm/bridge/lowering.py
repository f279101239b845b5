"""Recorded calls as what a device replays: inputs as parameters, intermediate results in shared memory, kernels in graphs."""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad import Tensor, UOp
from tinygrad.engine.jit import graph_split_rewrite
from tinygrad.helpers import JIT
from tinygrad.uop.ops import Ops, buffers

from tinyvllm.bridge.arena import planned_places


def lowered(calls: Sequence[UOp], inputs: Sequence[UOp], results: Sequence[Tensor]) -> UOp:
    """The calls as a list that replays take, with `inputs` to be given at each and `results` in buffers of their own.

    A call names buffers, so they are replaced call by call; tinygrad rewrites the whole graph, twice.
    """
    if not calls:
        raise ValueError("capture: the function launches nothing")
    if len(set(inputs)) != len(inputs):
        raise ValueError("capture: two inputs are the same buffer")
    places = {u: UOp.param(i, u.dtype, u.shape, u.device) for i, u in enumerate(inputs)}
    calls = [_replaced(call, places) for call in calls]
    held = set(buffers) | {tensor.uop.buf_uop for tensor in results}
    places = planned_places(calls, held)
    linear = UOp(Ops.LINEAR, src=tuple(_replaced(call, places) for call in calls))
    return graph_split_rewrite(linear) if JIT < 2 else linear


def _replaced(call: UOp, places: dict[UOp, UOp]) -> UOp:
    program, *arguments = call.src
    return call.replace(src=(program, *(_place(u, places) for u in arguments)))


def _place(u: UOp, places: dict[UOp, UOp]) -> UOp:
    if u.op is Ops.BUFFER or not u.src:
        return places.get(u, u)
    replaced: UOp = u.substitute(places, walk=True)
    return replaced
