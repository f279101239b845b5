"""Cases of a mixture of experts."""

from __future__ import annotations

import numpy as np

from tinyvllm.backends.cases.case import Case
from tinyvllm.backends.cases.inputs import (
    CHOSEN,
    EXPERT_OUTPUTS,
    EXPERTS,
    FEW,
    MANY,
    PERIOD,
    ROUTED,
    ROUTES,
    SHARES,
    Arrays,
    activations,
    expert_inputs,
    numbers,
    parts_of,
    repeated,
)
from tinyvllm.backends.cases.site import Site, realized
from tinyvllm.backends.operands import Routing, RoutingPolicy
from tinyvllm.quant.formats import Layout

_TASK = 7  # places of a task here: experts have several


def norm_route(site: Site, case: Case) -> list[Arrays]:
    """Also whether pairs are listed by their experts, each once."""
    router, results = site.router([(format, _sixty_fourth(rows)) for format, rows in parts_of(case.format, (ROUTED,), 23)]), []
    policy = RoutingPolicy(ROUTED, ROUTES, renormalize=True)
    for T, count in (FEW, MANY):
        x = site.place(repeated(activations(router.I), T))
        routing = site.backend.norm_route(site.variant, x, site.norm(router.I), router, site.int32(count), policy)
        assert routing.groups is not None
        shares, chosen, order, tasks = realized(routing.shares, routing.chosen, *routing.groups)
        listed = np.array([_IS_LISTED[site.backend.layout](chosen[:count].reshape(-1), order, tasks)], np.int32)
        results.append({"shares": shares[:count], "chosen": chosen[:count], "listed": listed})
    return results


def _sixty_fourth(rows: np.ndarray) -> np.ndarray:
    """The float32 numbers of `rows` over 64, so that more than one expert has a share."""
    return (rows.view(np.float32) / np.float32(64)).view(np.uint8)


def is_listed(chosen: np.ndarray, order: np.ndarray, tasks: np.ndarray) -> bool:
    """Whether the tasks (kernels/cpu/include/experts.h) have every pair of `chosen` int32 [N] once, with its expert, in order."""
    return _listed(order, tasks) == sorted((e, p) for p, e in enumerate(chosen))


def is_listed_in_any_order(chosen: np.ndarray, order: np.ndarray, tasks: np.ndarray) -> bool:
    """The same where an expert's pairs may be in any order (kernels/metal/list_experts.metal)."""
    return sorted(_listed(order, tasks)) == sorted((e, p) for p, e in enumerate(chosen))


def _listed(order: np.ndarray, tasks: np.ndarray) -> list[tuple[int, int]]:
    return [(e, p) for e, first, end in tasks[1 : 1 + 3 * max(0, tasks[0])].reshape(-1, 3) for p in order[first:end]]


def is_listed_in_groups(chosen: np.ndarray, order: np.ndarray, tasks: np.ndarray) -> bool:
    """The same of lists in whole groups of eight places, in any order (kernels/cuda/list_experts.cu)."""
    found = tasks[2 : 2 + 3 * max(0, tasks[1])].reshape(-1, 3)
    places = [(expert, place) for expert, first, groups in found for place in range(8 * first, 8 * (first + groups))]
    once = [place for _, place in places] == list(range(tasks[0]))
    return once and sorted((e, order[place]) for e, place in places if order[place] >= 0) == sorted((e, p) for p, e in enumerate(chosen))


_IS_LISTED = {Layout.PANELS: is_listed, Layout.TILES: is_listed_in_groups, Layout.ROWS: is_listed_in_any_order}


def routing(site: Site, T: int, count: int) -> Routing:
    """CHOSEN and SHARES of T rows, of which `count` count, on the CPU in tasks of a few pairs; GPUs list them before each product."""
    chosen = repeated(CHOSEN, T)
    if site.backend.layout is not Layout.PANELS:
        return Routing(site.place(repeated(SHARES, T)), site.place(chosen))
    experts = chosen[:count].reshape(-1)
    order, tasks = np.argsort(experts, kind="stable"), []
    for expert in range(EXPERTS):
        start, end = np.searchsorted(experts[order], (expert, expert + 1))
        tasks += [(expert, first, min(first + _TASK, end)) for first in range(start, end, _TASK)]
    listed = np.concatenate([[len(tasks)], np.ravel(tasks)]).astype(np.int32)
    groups = site.place(order.astype(np.int32)), site.place(listed)
    return Routing(site.place(repeated(SHARES, T)), site.place(chosen), groups)


def experts_gate_up_silu(site: Site, case: Case) -> list[Arrays]:
    weight, results = site.weight(parts_of(case.format, (EXPERTS * EXPERT_OUTPUTS,) * 2, 24)), []
    for T, count in (FEW, MANY):
        x, rows = site.place(repeated(activations(weight.I), T)), site.int32(count)
        y = site.backend.experts_gate_up_silu(
            site.variant, x, site.norm(weight.I), weight, routing(site, T, count), rows, EXPERTS
        )  # fmt: skip
        results.append({"y": realized(y)[0].reshape(T, -1)[:count]})
    return results


def experts_down(site: Site, case: Case) -> list[Arrays]:
    weight, results = site.weight(parts_of(case.format, (EXPERTS * EXPERT_OUTPUTS,), 25)), []
    for T, count in (FEW, MANY):
        h = site.place(repeated(expert_inputs(weight.I), T).reshape(2 * T, -1))
        residual, rows = site.place(repeated(numbers(7, PERIOD, EXPERT_OUTPUTS), T)), site.int32(count)
        y = site.backend.experts_down(site.variant, h, weight, routing(site, T, count), rows, EXPERTS, residual)
        results.append({"y": realized(y)[0][:count]})
    return results
