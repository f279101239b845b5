"""The case of low-rank adapters."""

from __future__ import annotations

import numpy as np

from tinyvllm.backends.cases.case import Case
from tinyvllm.backends.cases.inputs import FEW, MANY, PERIOD, Arrays, activations, numbers, repeated
from tinyvllm.backends.cases.site import Site, realized
from tinyvllm.backends.operands import AdapterStack

COLUMNS, STARTS, WIDTH = 288, (0, 64, 96), 144  # of x; the first outputs of three projections, and all of them
RANKS, MOST = (5, 8), 8  # of two adapters, and of their matrices
CHOSEN = (1, 0, 2, 2, 1)  # the adapter of each of PERIOD rows


def matrices() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float32 a [N, P, R, I], b [N, R, O] and bias [O]."""
    a = numbers(26, len(RANKS), len(STARTS), MOST, COLUMNS)
    for n, rank in enumerate(RANKS):
        a[n, :, rank:] = 0
    return a, numbers(27, len(RANKS), MOST, WIDTH), numbers(28, WIDTH)


def lora_bias(site: Site, case: Case) -> list[Arrays]:
    """Also whether a row without an adapter has -0 where there is no bias."""
    a, b, bias = matrices()
    stack, results = AdapterStack(site.place(a), site.place(b), site.int32(*RANKS), STARTS), []
    for T, count in (FEW, MANY):
        x, rows = site.place(repeated(activations(COLUMNS), T)), site.int32(count)
        adapters, norm = site.int32(*(CHOSEN[t % PERIOD] for t in range(T))), site.norm(COLUMNS)
        y = site.backend.lora_bias(site.variant, x, norm, stack, site.place(bias), adapters, rows)
        plain = site.backend.lora_bias(site.variant, x, None, stack, None, adapters, rows)
        neutral = realized(plain)[0][1].view(np.uint32)
        results.append({"y": realized(y)[0][:count], "same": np.array([(neutral == 1 << 31).all()], np.int32)})
    return results
