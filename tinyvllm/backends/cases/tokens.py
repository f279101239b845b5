"""Cases of what becomes of tokens: draws, and the next step."""

from __future__ import annotations

import numpy as np

from tinyvllm.backends.cases.case import Case
from tinyvllm.backends.cases.inputs import DRAWN, Arrays, S, integers
from tinyvllm.backends.cases.site import Site, empty_batch, realized
from tinyvllm.backends.operands import DrawInputs, History
from tinyvllm.bridge import download


def advance(site: Site, case: Case) -> list[Arrays]:
    """Four rows of which three count: within a block, into the next one, and past the last."""
    state = [[1, 2, 3, 4], [5, S - 1, 2 * S - 1, 9], [5, S - 1, 3 * S - 1, 9], [6, S, 2 * S, 10]]
    tokens, positions, slots, lengths = (site.int32(*row) for row in state)
    history = History(site.place(np.full((3, 4), -1, np.int32)), site.int32(1))
    tables = site.place(np.array([[4, 1], [0, 3], [5, 2], [6, 7]], np.int32))
    batch = empty_batch(
        site, tokens=tokens, positions=positions, slots=slots, context_lens=lengths, block_tables=tables, decodes=site.int32(3),
        num_decodes=4,
    )  # fmt: skip
    site.backend.advance(site.variant, batch, site.int32(11, -1, 13, 14), history, S)
    moved = np.stack([download(tensor) for tensor in (tokens, positions, slots, lengths)])
    return [{"state": moved, "history": download(history.tokens), "round": download(history.round)}]


NEUTRAL = 6  # row of the draw's tables that changes nothing
OUTSIDE = -64.0  # logits of tokens that only the model's own vocabulary has: never drawn, and without weight
Draw = tuple[tuple[int, ...], float, tuple[int, int], tuple[float, ...]]
# seen_row, bias_row, seeds and position; 1 / temperature; top_k, top_p; min_p, penalties: greedy, plain, then one filter each, then all
DRAWS: tuple[Draw, ...] = (
    ((NEUTRAL, NEUTRAL, 1, 2, 3), 0.0, (DRAWN, 1 << 30), (-np.inf, 1.0, 0.0, 0.0)),
    ((NEUTRAL, NEUTRAL, 1, 2, 3), 0.5, (DRAWN, 1 << 30), (-np.inf, 1.0, 0.0, 0.0)),
    ((NEUTRAL, NEUTRAL, 1, 2, 3), 0.5, (5, 1 << 30), (-np.inf, 1.0, 0.0, 0.0)),
    ((NEUTRAL, 3, 7, 8, 9), 0.5, (DRAWN, 1 << 29), (-np.inf, 1.0, 0.0, 0.0)),
    ((NEUTRAL, NEUTRAL, 3, 4, 5), 0.5, (DRAWN, 1 << 30), (-1.53, 1.0, 0.0, 0.0)),
    ((5, 5, 11, 12, 13), 0.5, (40, 1 << 29), (-2.03, 1.25, 0.5, 0.25)),
)


def draws_of(features: str) -> tuple[Draw, ...]:
    """DRAWS without all that `features` does not name; without features as they are."""
    if not features:
        return DRAWS
    top_k, top_p, min_p = (name in features for name in ("top_k", "top_p", "min_p"))
    return tuple(
        ((NEUTRAL, NEUTRAL, *seeds), inverse, (k if top_k else DRAWN, p if top_p else 1 << 30), (far if min_p else -np.inf, 1.0, 0.0, 0.0))
        for (_, _, *seeds), inverse, (k, p), (far, *_) in DRAWS
    )


def draw_lines(case: Case) -> np.ndarray:
    """int32 [rows, 12], SampleParams of kernels/include/params.h."""
    lines = np.zeros((len(DRAWS), 12), np.int32)
    for line, (places, inverse_temperature, (top_k, top_p), rest) in zip(lines, draws_of(case.features), strict=True):
        line[:5], line[6:8] = places, (case.vocabulary if top_k == DRAWN else top_k, top_p)
        line.view(np.float32)[[5, 8, 9, 10, 11]] = inverse_temperature, *rest
    return lines


def draw_tables() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Logits float32 [rows, V], counts int32 and prompted uint8 [NEUTRAL + 1, V], bias float32 [NEUTRAL + 1, V]."""
    shape = NEUTRAL + 1, DRAWN
    logits, bias = integers(18, -511, 512, len(DRAWS), DRAWN) / 128, integers(19, -8, 9, *shape) / 16
    counts, prompted = integers(20, 0, 3, *shape), integers(21, 0, 2, *shape)
    return logits.astype(np.float32), counts.astype(np.int32), prompted.astype(np.uint8), bias.astype(np.float32)


def sample(site: Site, case: Case) -> list[Arrays]:
    logits, counts, prompted, bias = draw_tables()
    lines, count = site.place(draw_lines(case)), site.int32(len(DRAWS))
    if case.features:
        top_k, top_p, min_p = (name in case.features for name in ("top_k", "top_p", "min_p"))
        how = DrawInputs(lines, count, NEUTRAL, True, top_k, top_p, min_p)
        own = np.pad(logits, ((0, 0), (0, case.vocabulary - DRAWN)), constant_values=OUTSIDE)
        tokens = realized(site.backend.sample(site.variant, site.place(own), how))[0]
        return [{"drawn": np.stack([tokens, download(lines)[:, 4]])}]
    seen = site.place(counts)
    how = DrawInputs(lines, count, NEUTRAL, True, True, True, True, (seen, site.place(prompted)), site.place(bias))
    tokens = realized(site.backend.sample(site.variant, site.place(logits), how))[0]
    counted = np.argwhere(download(seen) - counts).astype(np.int32)
    return [{"tokens": tokens, "positions": download(lines)[:, 4], "counted": counted}]
