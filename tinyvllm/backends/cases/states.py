"""The cases of layers with a recurrent state."""

from __future__ import annotations

import numpy as np
from tinygrad import Tensor

from tinyvllm.backends.cases.case import Case
from tinyvllm.backends.cases.inputs import EPS, Arrays, numbers
from tinyvllm.backends.cases.site import Site, empty_batch
from tinyvllm.backends.operands import DeltaShape, DeltaWeights
from tinyvllm.batch import Batch, StateCache
from tinyvllm.bridge import download

SHAPE = DeltaShape(key_heads=2, value_heads=4, key_dim=32, value_dim=48, taps=4)
DECODES, PADDED = 2, 3  # sequences of one row, and with padding
STARTS = (9, 1, 0, 0, 5)  # position of the first row of each sequence, of padding, and of two chunks
LENGTHS = (1, 1, 0, 4, 3)  # rows that count
SLOTS = ((2, 2, 6, 0), (0, 0, 6, 0), (6, 6, 6, 0), (1, 1, 3, 2), (4, 5, 6, 0))  # its own, before, of a copy, after how many tokens
COUNTED = (0, 1, 3, 4, 5, 6, 7, 8, 9)  # rows of 11
EVERY = 223  # number that is compared, of all rows and columns
DRAFTS = 3  # that a slot keeps, in the case with drafts
WITH_DRAFTS = (  # slot, position, rows, drafts after them, slot before, that of a copy, after how many tokens; 0 rows for padding
    (2, 9, 1, 2, 2, 6, 0), (0, 1, 1, 0, 5, 3, 2), (6, 0, 0, 0, 6, 6, 0), (1, 0, 3, 0, 1, 6, 0), (4, 5, 3, 0, 4, 6, 0),
)  # fmt: skip
TOKENS = (1, 0, 7, 0, 4, 1, 0)  # of which each slot's state is: two accepted drafts are to be taken, none, and one


def kept_gates(drafts: int) -> int:
    """Where b and a of drafts are in a slot."""
    return SHAPE.state + drafts * SHAPE.channels


def kept_tokens(drafts: int) -> int:
    """Where the number of tokens is in a slot that keeps drafts."""
    return kept_gates(drafts) + drafts * 2 * SHAPE.value_heads


def arrays(drafts: int = 0) -> dict[str, np.ndarray]:
    """float32 y [11, WIDTH] and states [7, slot], and the layer's weights; the taps small enough that no product is large."""
    s = SHAPE
    states = numbers(31, 7, s.slot(drafts)) / 4
    if drafts:
        states[:, kept_tokens(drafts)] = TOKENS
    return {
        "y": numbers(30, 11, s.width),
        "states": states,
        "taps": numbers(32, s.taps * s.channels) / 2,
        "decay": -np.abs(numbers(33, s.value_heads)) - 1,
        "shift": numbers(34, s.value_heads),
        "norm": numbers(35, s.value_dim),
    }


def gated_delta(site: Site, case: Case) -> list[Arrays]:
    """Two decodes, padding and two chunks, of which one begins its sequence, and padding."""
    if case.drafts:
        return _with_drafts(site)
    positions = [STARTS[0], STARTS[1], 0, *range(4), *range(STARTS[4], STARTS[4] + 3), 0]
    batch = empty_batch(
        site, states=site.place(np.array(SLOTS, np.int32)), positions=site.int32(*positions), query_starts=site.int32(0, 1, 2, 3, 7, 10),
        decodes=site.int32(DECODES), chunks=site.int32(PADDED, 2), num_decodes=PADDED, max_query=8,
    )  # fmt: skip
    out, states = _run(site, batch, 0)
    return [{"y": out[list(COUNTED)].reshape(-1)[:: EVERY // 16], "states": states.reshape(-1)[::EVERY]}]


def _with_drafts(site: Site) -> list[Arrays]:
    """A decode with two drafts that takes two earlier ones, a decode that is copied, padding, a chunk that begins its sequence and one that
    takes a draft.
    """
    slots: list[tuple[int, ...]] = []
    positions: list[int] = []
    for slot, position, rows, drafts, *rest in WITH_DRAFTS:
        slots += [(slot, *rest)] * (1 + drafts)
        positions += range(position, position + max(1, rows + drafts))
    batch = empty_batch(
        site, states=site.place(np.array(slots, np.int32)), positions=site.int32(*positions),
        query_starts=site.int32(*range(6), 8, 11), decodes=site.int32(4), chunks=site.int32(5, 2), num_decodes=5, max_query=3,
    )  # fmt: skip
    out, states = _run(site, batch, DRAFTS)
    return [
        {
            "y": np.delete(out, 4, axis=0).reshape(-1)[:: EVERY // 16],
            "states": states.reshape(-1)[::EVERY],
            "kept": states[:, kept_gates(DRAFTS) :].reshape(-1),
        }
    ]


def _run(site: Site, batch: Batch, drafts: int) -> tuple[np.ndarray, np.ndarray]:
    """The values, and the states after the step."""
    given = {name: site.place(array) for name, array in arrays(drafts).items()}
    weights = DeltaWeights(SHAPE, given["taps"], given["decay"], given["shift"], given["norm"], EPS)
    out = site.backend.gated_delta(site.variant, given["y"], weights, StateCache(given["states"], drafts), batch)
    Tensor.realize(out)
    return download(out), download(given["states"])
