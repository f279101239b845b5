"""The case of layers with a recurrent state."""

from __future__ import annotations

import numpy as np
from tinygrad import Tensor

from tinyvllm.backends.cases.case import Case
from tinyvllm.backends.cases.inputs import EPS, Arrays, numbers
from tinyvllm.backends.cases.site import Site, empty_batch
from tinyvllm.backends.operands import DeltaShape, DeltaWeights
from tinyvllm.batch import StateCache
from tinyvllm.bridge import download

SHAPE = DeltaShape(key_heads=2, value_heads=4, key_dim=32, value_dim=48, taps=4)
DECODES, PADDED = 2, 3  # sequences of one row, and with padding
STARTS = (9, 1, 0, 0, 5)  # position of the first row of each sequence, of padding, and of two chunks
LENGTHS = (1, 1, 0, 4, 3)  # rows that count
SLOTS = ((2, 2, 6, 0), (0, 0, 6, 0), (6, 6, 6, 0), (1, 1, 3, 2), (4, 5, 6, 0))  # its own, before, of a copy, after how many tokens
COUNTED = (0, 1, 3, 4, 5, 6, 7, 8, 9)  # rows of 11
EVERY = 223  # number that is compared, of all rows and columns


def arrays() -> dict[str, np.ndarray]:
    """float32 y [11, WIDTH] and states [7, STATE], and the layer's weights; the taps small enough that no product is large."""
    s = SHAPE
    return {
        "y": numbers(30, 11, s.width),
        "states": numbers(31, 7, s.state) / 4,
        "taps": numbers(32, s.taps * s.channels) / 2,
        "decay": -np.abs(numbers(33, s.value_heads)) - 1,
        "shift": numbers(34, s.value_heads),
        "norm": numbers(35, s.value_dim),
    }


def gated_delta(site: Site, case: Case) -> list[Arrays]:
    """Two decodes, padding and two chunks, of which one begins its sequence, and padding."""
    given = {name: site.place(array) for name, array in arrays().items()}
    weights = DeltaWeights(SHAPE, given["taps"], given["decay"], given["shift"], given["norm"], EPS)
    positions = [STARTS[0], STARTS[1], 0, *range(4), *range(STARTS[4], STARTS[4] + 3), 0]
    batch = empty_batch(
        site, states=site.place(np.array(SLOTS, np.int32)), positions=site.int32(*positions), query_starts=site.int32(0, 1, 2, 3, 7, 10),
        decodes=site.int32(DECODES), chunks=site.int32(PADDED, 2), num_decodes=PADDED, max_query=8,
    )  # fmt: skip
    out = site.backend.gated_delta(site.variant, given["y"], weights, StateCache(given["states"]), batch)
    Tensor.realize(out)
    return [{"y": download(out)[list(COUNTED)].reshape(-1)[:: EVERY // 16], "states": download(given["states"]).reshape(-1)[::EVERY]}]
