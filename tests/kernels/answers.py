"""The answers of the self-test in float64, from the inputs of tinyvllm/backends/cases and nothing else of the kernels.

`python -m tests.kernels.answers` writes tinyvllm/backends/answers.npz; tests/backends/test_cases.py checks that the file is up to date.
"""

from __future__ import annotations

import numpy as np

from tests.kernels import delta_rule
from tinyvllm.backends import selftest
from tinyvllm.backends.cases import adapters, expected, inputs, products, states, tokens
from tinyvllm.backends.cases.case import FEATURES
from tinyvllm.backends.cases.inputs import EPS, PERIOD, Arrays, S, activations, columns, numbers, numbers_of, weight_rows
from tinyvllm.batch import NO_SLOT
from tinyvllm.quant.formats import Layout, formats_in
from tinyvllm.quant.layouts import unpack_rows

PATH = selftest.ANSWERS
MARGIN = 1e-3  # between a drawn token's score and the next one's, and between a threshold and what it decides
ALL_FILTERS = tokens.DRAWS[-1][2] + tokens.DRAWS[-1][3][:1]


def answers() -> Arrays:
    """Every answer, by "STEM FORMAT/RESULT"."""
    fixed = {"kv_append": kv_append(), "advance": advance(), "kv_copy": kv_copy(), "sample": sample(), "pack_tiles": {"equal": np.ones(1)}}
    found = {f"{stem}/{name}": array for stem, arrays in fixed.items() for name, array in arrays.items()}
    found |= {f"sample {features}/{name}": array for features in FEATURES for name, array in sample_by(features).items()}
    found |= {f"lora_bias/{name}": array for name, array in lora_bias().items()}
    found |= {f"gated_delta/{name}": array for name, array in gated_delta().items()}
    found |= {f"gated_delta drafts/{name}": array for name, array in gated_delta_with_drafts().items()}
    found |= {f"norm_route {numbers_of('F32')}/{name}": array for name, array in expected.route("F32").items()}
    for format in dict.fromkeys(name for layout in Layout for name in formats_in(layout)):
        label = numbers_of(format)
        for stem, answer in (("embed", embed), ("matmul", expected.matmul), ("norm_gate_up_silu", expected.gate_up), ("norm_head", head),
                             ("norm_qkv_rope_store", expected.qkv), ("experts_gate_up_silu", expected.experts_gate_up),
                             ("experts_down", expected.experts_down)):  # fmt: skip
            for name, array in answer(format).items():
                known = found.setdefault(f"{stem} {label}/{name}", array)
                np.testing.assert_array_equal(known, array, err_msg=f"{stem}: the formats of {label} do not hold the same numbers")
    for D in (48, 64, 128):
        for stem, attend in (("attention_decode", expected.attention_decode), ("attention_prefill", expected.attention_prefill)):
            found[f"{stem} {D}/out"] = attend(D)["out"]
            assert np.isfinite(found[f"{stem} {D}/out"]).all()
    return {name: array.astype(np.float32) if array.dtype.kind == "f" else array.astype(np.int32) for name, array in found.items()}


def dense(format: str, O: int, seed: int, I: int | None = None) -> np.ndarray:
    return unpack_rows(format, weight_rows(format, O, I or columns(format), seed)).astype(np.float64)


def normalized(I: int) -> np.ndarray:
    np.testing.assert_array_equal((activations(I).astype(np.float64) ** 2).mean(1) + EPS, 1)
    return expected.normalized(I)


def embed(format: str) -> Arrays:
    return {"x": dense(format, inputs.VOCABULARY, 5, inputs.table_columns(format))[products.token_ids(PERIOD)]}


def head(format: str) -> Arrays:
    normalized(columns(format))
    found = expected.head(format)
    top = np.sort(found["logits"], axis=1)
    assert (top[:, -1] - top[:, -2] > MARGIN).all()
    return found


def lora_bias() -> Arrays:
    a, b, bias = (array.astype(np.float64) for array in adapters.matrices())
    x, y, ends = normalized(adapters.COLUMNS), np.tile(bias, (PERIOD, 1)), [*adapters.STARTS[1:], adapters.WIDTH]
    for t, n in enumerate(adapters.CHOSEN):
        for p, (start, end) in enumerate(zip(adapters.STARTS, ends)):
            y[t, start:end] += (a[n - 1, p] @ x[t]) @ b[n - 1, :, start:end] if n else 0
    return {"y": y, "same": np.ones(1)}


def gated_delta() -> Arrays:
    given, rows, first = states.arrays(), [], 0
    held = given["states"].astype(np.float64)
    was = held.copy()
    for start, length, (slot, source, copy, at) in zip(states.STARTS, states.LENGTHS, states.SLOTS, strict=True):
        if length:
            y, before = given["y"][first : first + length], was[source] * (start > 0)
            values, held[slot] = delta_rule.gated_delta(states.SHAPE, y, before, given, EPS)
            if at:
                held[copy] = delta_rule.gated_delta(states.SHAPE, y[: at - start], before, given, EPS)[1]
            rows += [*values]
        first += max(1, length)
    return {"y": np.array(rows).reshape(-1)[:: states.EVERY // 16], "states": held.reshape(-1)[:: states.EVERY]}


def gated_delta_with_drafts() -> Arrays:
    """Slots as DeltaShape.slot has them: the last rows, those of drafts, S, b and a of drafts, the number of tokens."""
    s, D = states.SHAPE, states.DRAFTS
    given, out, first = states.arrays(D), [], 0
    last, rows, gates, tokens = (s.taps - 1) * s.channels, (s.taps - 1 + D) * s.channels, states.kept_gates(D), states.kept_tokens(D)
    was = given["states"].astype(np.float64)
    held = was.copy()
    for slot, start, length, drafts, source, copy, at in states.WITH_DRAFTS:
        end = first + length + drafts
        if length:
            before, own = was[source] * (start > 0), given["y"][first:end].astype(np.float64)
            taken = start - states.TOKENS[source] if start else 0
            kept = np.zeros((taken, s.width))
            kept[:, : s.channels] = before[last:rows].reshape(D, -1)[:taken]
            kept[:, -2 * s.value_heads :] = before[gates:tokens].reshape(D, -1)[:taken]
            every, state = np.concatenate([kept, own]), np.concatenate([before[:last], before[rows:gates]])
            out += [*delta_rule.gated_delta(s, every, state, given, EPS)[0][taken:]]
            for to, count in ((slot, length), *(((copy, at - start),) if at else ())):
                after = delta_rule.gated_delta(s, every[: taken + count], state, given, EPS)[1]
                held[to, :last], held[to, rows:gates], held[to, tokens] = after[:last], after[last:], start + count
            held[slot, last : last + drafts * s.channels] = own[length:, : s.channels].reshape(-1)
            held[slot, gates : gates + drafts * 2 * s.value_heads] = own[length:, -2 * s.value_heads :].reshape(-1)
        first = max(end, first + 1)
    every = states.EVERY
    return {"y": np.array(out).reshape(-1)[:: every // 16], "states": held.reshape(-1)[::every], "kept": held[:, gates:].reshape(-1)}


def kv_append() -> Arrays:
    k, v = (numbers(seed, PERIOD, 3, 48).reshape(PERIOD, -1) for seed in (13, 14))
    return {"kv": np.concatenate([k, v], axis=1)[: inputs.FEW[1]], "kept": np.ones(1)}


def advance() -> Arrays:
    """Row 0 moves within block 4, row 1 into block 3, row 2 past its last block, so its slot is NO_SLOT; row 3 does not count."""
    state = [[11, 0, 13, 4], [6, S, 2 * S, 9], [4 * S + 6, 3 * S, NO_SLOT, 9], [7, S + 1, 2 * S + 1, 10]]
    return {"state": np.array(state), "history": np.array([[-1] * 4, [11, -1, 13, -1], [-1] * 4]), "round": np.array([2])}


def kv_copy() -> Arrays:
    pool = inputs.integers(17, 0, 1000, 5, 80)
    pool[3], pool[1] = pool[0], pool[4].copy()
    return {"pool": pool}


def threefry(key: tuple[int, int], counter: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The first word of Threefry-2x32 with 20 rounds, uint32."""
    keys = [np.uint32(key[0]), np.uint32(key[1])]
    keys.append(np.uint32(0x1BD11BDA) ^ keys[0] ^ keys[1])
    with np.errstate(over="ignore"):
        x, y = counter[0] + keys[0], counter[1] + keys[1]
        for i in range(20):
            r = np.uint32((13, 15, 26, 6, 17, 29, 16, 24)[i % 8])
            x = x + y
            y = (y << r | y >> (np.uint32(32) - r)) ^ x
            if i % 4 == 3:
                s = (i + 1) // 4
                x, y = x + keys[s % 3], y + keys[(s + 1) % 3] + np.uint32(s)
    return x


def sample() -> Arrays:
    """Drawn tokens; in each row that asks for a feature, another token would be drawn without it."""
    drawn, counted = [], []
    for b, row in enumerate(tokens.DRAWS):
        token, margin = drawn_from(b, *row)
        assert margin > MARGIN, f"row {b} is drawn by {margin:.1e}: choose other seeds"
        drawn.append(token)
        (seen, *_), inverse, (k, p), (far, *penalties) = row
        counted += [[seen, token]] if seen != tokens.NEUTRAL else []
        off = (tokens.NEUTRAL, *row[0][1:]), (row[0][0], tokens.NEUTRAL, *row[0][2:])
        without = [(off[0], *row[1:]), (off[1], *row[1:]), (row[0], 0.0, *row[2:]), (*row[:2], (inputs.DRAWN, p), row[3])]
        without += [(*row[:2], (k, 1 << 30), row[3]), (*row[:3], (-np.inf, *penalties))]
        without = without[:3] if (k, p, far) == ALL_FILTERS else without  # where one filter does what another does, too
        assert all(other == row or drawn_from(b, *other)[0] != token for other in without), f"row {b} does not need all it asks for"
    return {"tokens": np.array(drawn), "positions": np.array([row[0][4] + 1 for row in tokens.DRAWS]), "counted": np.array(counted)}


def sample_by(features: str) -> Arrays:
    """Tokens and positions of the same rows by these features alone; each feature changes a token."""
    rows, drawn = tokens.draws_of(features), []
    for b, row in enumerate(rows):
        token, margin = drawn_from(b, *row)
        assert margin > MARGIN, f"row {b} with {features} is drawn by {margin:.1e}: choose other seeds"
        drawn.append(token)
    for name in features.split("+")[1:]:
        less = tokens.draws_of(features.replace(f"+{name}", ""))
        assert [drawn_from(b, *row)[0] for b, row in enumerate(less)] != drawn, f"{features} draws the same without {name}"
    return {"drawn": np.array([drawn, [row[0][4] + 1 for row in rows]], np.int32)}


def drawn_from(b: int, places: tuple[int, ...], inverse: float, filters: tuple[int, int], rest: tuple[float, ...]) -> tuple[int, float]:
    """The token of row b, and by how much it wins."""
    (logits, counts, prompted, bias), (seen, biased, low, high, position) = tokens.draw_tables(), places
    far, repetition, presence, frequency = rest
    x = logits[b].astype(np.float64)
    if seen != tokens.NEUTRAL:
        met = (counts[seen] > 0) | (prompted[seen] > 0)
        x = np.where(met, np.where(x > 0, x / repetition, x * repetition), x)
        x = x - presence * (counts[seen] > 0) - frequency * counts[seen]
    x = x if biased == tokens.NEUTRAL else x + bias[biased]
    scores = x
    if inverse:
        word = threefry((low, high), (np.arange(inputs.DRAWN, dtype=np.uint32), np.full(inputs.DRAWN, position, np.uint32)))
        scores = x * inverse - np.log(-np.log1p(-((word >> np.uint32(1)) + 0.5) / 2**31))
        scores = np.where(lives(x, inverse, filters[0], filters[1] / 2**30, far), scores, -np.inf)
    order = np.sort(scores)
    return int(scores.argmax()), float(order[-1] - order[-2])


def lives(x: np.ndarray, inverse: float, k: int, p: float, far: float) -> np.ndarray:
    """Which tokens min_p, top_k and top_p leave."""
    assert np.abs(x - (x.max() + far)).min() > 1e-4
    floor = max(x.max() + far, np.sort(x)[-k])
    weights = np.where(x >= floor, np.exp((x - x.max()) * inverse), 0)
    if p == 1:
        return x >= floor
    levels = np.unique(x[x >= floor])[::-1]
    shares = np.array([weights[x >= level].sum() for level in levels]) / weights.sum()
    assert np.abs(shares - p).min() > 1e-5
    return x >= levels[np.argmax(shares >= p)]


if __name__ == "__main__":
    np.savez_compressed(PATH, **answers())
    print(f"{PATH}: {PATH.stat().st_size} bytes")
