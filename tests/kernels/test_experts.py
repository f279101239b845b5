"""The CPU kernels of a mixture of experts, against float64 sums over the numbers they see, and a pair's bits in any batch."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.kernels.calling import aligned, call
from tests.kernels.test_products import FORMATS, FUSED_TOLERANCE, TARGETS, close, normed, numbers, one, pack, poison, prepared
from tests.kernels.test_slices import panels_of, sliced_panels
from tinyvllm.backends.cases.experts import is_listed
from tinyvllm.backends.kernel import Kernel
from tinyvllm.distributed.memory import HEADER
from tinyvllm.quant.random_rows import packable_width, random_rows
from tinyvllm.quant.slices import ALL_SLICES

X, C, EPS = 5, 3, 1e-5
MOST_TASKS = 600
NORM = ("EPS", EPS)
# One of each way to multiply on the best variant, of floats and of blocks on the others; the rest, whose products are the same, is long.
OFTEN = ("F32", "BF16", "Q4_K", "NF4")
FORMATS_AND_TARGETS = [pytest.param(f, TARGETS[0], marks=() if f in OFTEN else pytest.mark.long) for f in FORMATS]
OTHERS = [(("BF16", "Q4_0")[i % 2], target) for i, target in enumerate(TARGETS[1:])]
OF_ALL_TARGETS = [("BF16", TARGETS[0]), ("Q4_K", TARGETS[0]), *OTHERS]
FORMATS_AND_TARGETS += OTHERS
FORMATS_AND_ALL = [*((format, TARGETS[0]) for format in FORMATS), *OTHERS]


def integers(*shape: int) -> np.ndarray:
    return aligned(shape, np.int32, -1)


def scratch(rows: int, I: int) -> np.ndarray:
    """Room for prepared rows, for a tile of them for each thread, and for logits of up to 64 experts."""
    return aligned((-(-rows // 16) * 16 * (4 * I + 128 + 256) + 64 * 32 * (4 * I + 128),), np.uint8)


# --- the choice


def route(
    x: np.ndarray, norm: np.ndarray, panels: np.ndarray, target: str, experts: int, chosen: int, renormalize: int = 1,
    rows: int | None = None, threads: int = 2,
) -> list[np.ndarray]:  # fmt: skip
    (T, E), defines = x.shape, (("X", experts), ("C", chosen), ("WEIGHT", "F32"), ("RENORMALIZE", renormalize), NORM)
    outs = [poison(T, chosen), integers(T, chosen), integers(T * chosen), integers(1 + 3 * MOST_TASKS)]
    count = one(T if rows is None else rows)
    call(Kernel("norm_route", "cpu", target, (("E", E), *defines), 5, 4), *outs, scratch(T, E), x, norm, panels, count, threads=threads)
    return outs


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("experts", "chosen", "renormalize"), [(5, 5, 0), (16, 1, 0), (21, 3, 1), (60, 8, 0)])
def test_norm_route(experts: int, chosen: int, renormalize: int, target: str) -> None:
    E, T = 96, 130
    x, norm, weight = numbers(T, E), numbers(E), numbers(experts, E) * np.float32(0.2)
    panels, values = pack(weight, "F32")
    logits = normed(x, norm, None, EPS).astype(np.float64) @ values.T
    powers = np.exp(logits - logits.max(1, keepdims=True))
    best = np.argsort(-logits, axis=1, kind="stable")[:, :chosen]
    shares = np.take_along_axis(powers, best, 1)
    shares /= shares.sum(1, keepdims=True) if renormalize else powers.sum(1, keepdims=True)
    got, numbers_of, order, tasks = route(x, norm, panels, target, experts, chosen, renormalize)
    np.testing.assert_array_equal(numbers_of, best)
    np.testing.assert_allclose(got, shares, rtol=1e-4, atol=1e-6)
    assert is_listed(best.reshape(-1), order, tasks) and (np.diff(tasks[1:].reshape(-1, 3)[: tasks[0]][:, 1:]) <= 96).all()
    for rows, threads in ((1, 1), (3, 3), (97, 2)):
        again = route(x, norm, panels, target, experts, chosen, renormalize, rows, threads)
        assert (again[0][:rows].view(np.uint32) == got[:rows].view(np.uint32)).all() and (again[1][:rows] == best[:rows]).all()
        assert (again[1][rows:] == -1).all() and (again[2][rows * chosen :] == -1).all()
        assert is_listed(best[:rows].reshape(-1), again[2], again[3])


@pytest.mark.parametrize("target", TARGETS)
def test_of_equal_logits_the_first_experts_are_chosen_and_a_nan_has_nan_shares(target: str) -> None:
    x, panels = numbers(4, 64), pack(np.zeros((20, 64), np.float32), "F32")[0]
    x[2, 5], x[3, 7] = np.nan, np.inf
    shares, chosen, order, tasks = route(x, numbers(64), panels, target, 20, 3)
    np.testing.assert_array_equal(chosen, [[0, 1, 2]] * 4)
    np.testing.assert_allclose(shares[:2], 1 / 3, rtol=1e-6)
    assert np.isnan(shares[2:]).all() and is_listed(chosen.reshape(-1), order, tasks)


# --- products by expert


def grouped(chosen: np.ndarray, piece: int = 96) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of `chosen` [T, C] by expert, and tasks of at most `piece` of them."""
    experts = chosen.reshape(-1)
    order = np.argsort(experts, kind="stable").astype(np.int32)
    tasks = []
    for expert in np.unique(experts):
        start, end = np.searchsorted(experts[order], (expert, expert + 1))
        tasks += [(expert, first, min(first + piece, end)) for first in range(start, end, piece)]
    return order, np.concatenate([[len(tasks)], np.ravel(tasks)]).astype(np.int32)


def choices(T: int) -> np.ndarray:
    """int64 [T, C], C of X experts; most rows have expert 3, few have expert 1."""
    random, shares = np.random.default_rng(T), np.array([4, 1, 4, 40, 9]) / 58
    return np.array([random.choice(X, C, replace=False, p=shares) for _ in range(T)])


def gate_up(
    x: np.ndarray, norm: np.ndarray, panels: np.ndarray, format: str, F: int, chosen: np.ndarray, target: str, **more: int
) -> np.ndarray:
    (T, E), out = x.shape, poison(len(x) * C, F)
    defines = (("E", E), ("F", F), ("X", X), ("C", C), ("WEIGHT", format), ("HALF", "BOTH"), NORM)
    groups = grouped(chosen, more.pop("piece", 96))
    call(Kernel("experts_gate_up_silu", "cpu", target, defines, 2, 6), out, scratch(T, E), x, norm, panels, *groups, one(T), **more)
    return out


def down(
    h: np.ndarray, panels: np.ndarray, format: str, E: int, shares: np.ndarray, chosen: np.ndarray, residual: np.ndarray | None,
    target: str, **more: int,
) -> np.ndarray:  # fmt: skip
    T, (pairs, F), has = len(chosen), h.shape, int(residual is not None)
    defines = (("E", E), ("F", F), ("X", X), ("C", C), ("WEIGHT", format), ("RESIDUAL", has))
    groups, added = grouped(chosen, more.pop("piece", 96)), [] if residual is None else [residual]
    out = poison(T, E)
    arrays = [out, poison(pairs, E), scratch(pairs, F), h, panels, shares, *groups, *added, one(T)]
    call(Kernel("experts_down", "cpu", target, defines, 3, 6 + has), *arrays, **more)
    return out


@pytest.mark.parametrize(("format", "target"), FORMATS_AND_TARGETS)
def test_products_by_expert(format: str, target: str) -> None:
    """Against the experts' own matrices; an odd number of panels, and a sum with and without a residual."""
    E, F, T = packable_width(format, 96), packable_width(format, 96), 23
    wide = numbers(2 * X * 48, E)
    x, norm, chosen = numbers(T, E), numbers(E), choices(T)
    panels, values = pack(wide, format)
    seen = prepared(normed(x, norm, None, EPS), format)[:, None, :, None]
    both = values.reshape(2, X, 48, E)[:, chosen]  # [2, T, C, F, E]
    (gate, up), (one_size, other_size) = (both @ seen)[..., 0], (np.abs(both) @ np.abs(seen))[..., 0] + 1
    got = gate_up(x, norm, panels, format, 48, chosen, target)
    close(got, (gate / (1 + np.exp(-gate)) * up).reshape(-1, 48), (one_size * other_size).reshape(-1, 48), FUSED_TOLERANCE[format])

    h, shares, residual = numbers(T * C, F), numbers(T, C), numbers(T, 48)
    panels, values = pack(numbers(X * 48, F, seed=1), format)
    seen, own = prepared(h, format).reshape(T, C, F, 1), values.reshape(X, 48, F)[chosen]
    for added in (residual, None):
        want = ((own @ seen)[..., 0] * shares[..., None]).sum(1) + (0 if added is None else added)
        size = ((np.abs(own) @ np.abs(seen))[..., 0] * np.abs(shares)[..., None]).sum(1) + np.abs(residual)
        close(down(h, panels, format, 48, shares, chosen, added, target), want, size)


@pytest.mark.parametrize(("format", "target"), OF_ALL_TARGETS)
def test_a_pair_has_the_same_bits_with_any_others(format: str, target: str) -> None:
    """Alone, with others of its expert, in other tasks, on other threads."""
    width, most, F = packable_width(format, 96), 150 if target != "plain" else 60, 176
    x, norm, chosen, shares = numbers(most, width), numbers(width), choices(most), numbers(most, C)
    first, second = pack(numbers(2 * X * F, width), format)[0], pack(numbers(X * 80, width), format)[0]
    h, residual = numbers(most * C, width), numbers(most, 80)
    gated = gate_up(x, norm, first, format, F, chosen, target).reshape(most, -1)
    summed = down(h, second, format, 80, shares, chosen, residual, target)
    for T, threads, piece in ((1, 2, 96), (2, 1, 96), (19, 3, 5), (47, 2, 96)):
        cut = slice(most - T - 3, most - 3)
        pairs = slice(cut.start * C, cut.stop * C)
        rows = [np.ascontiguousarray(array[cut]) for array in (x, chosen, shares, residual)]
        more = {"threads": threads, "piece": piece}
        got = gate_up(rows[0], norm, first, format, F, rows[1], target, **more).reshape(T, -1)
        assert (got.view(np.uint32) == gated[cut].view(np.uint32)).all(), f"T={T}, {threads} threads"
        got = down(np.ascontiguousarray(h[pairs]), second, format, 80, rows[2], rows[1], rows[3], target, **more)
        assert (got.view(np.uint32) == summed[cut].view(np.uint32)).all(), f"T={T}, {threads} threads"


@pytest.mark.parametrize(("format", "target"), OF_ALL_TARGETS)
def test_an_expert_has_the_bits_of_a_dense_layer(format: str, target: str) -> None:
    """Of `norm_gate_up_silu` and `matmul` with its own matrices."""
    E, F, T = packable_width(format, 96), 80, 14
    width = packable_width(format, 96)  # of h
    x, norm, h, expert = numbers(T, E), numbers(E), numbers(T, width), 3
    chosen = np.stack([np.full(T, expert), np.arange(T) % 2, np.full(T, 4)], axis=1)
    panels = pack(numbers(2 * X * F, E), format)[0]
    defines = (("E", E), ("F", F), ("WEIGHT", format), ("HALF", "BOTH"), ("BIAS", 0), NORM)
    own, dense = np.concatenate([own_panels(panels, 2 * X, expert + half * X) for half in range(2)]), poison(T, F)
    arrays = [dense, scratch(T, E), x, norm, aligned(own.shape, np.uint8, own), one(T)]
    call(Kernel("norm_gate_up_silu", "cpu", target, defines, 2, 4), *arrays)
    got = gate_up(x, norm, panels, format, F, chosen, target).reshape(T, C, F)[:, 0]
    assert (got.view(np.uint32) == dense.view(np.uint32)).all()

    panels, outputs = pack(numbers(X * 96, width), format)[0], 96
    defines = (("I", width), ("O", outputs), ("WEIGHT", format), ("BIAS", 0), ("RESIDUAL", 0), ("ACTIVATION", 0))
    own, dense = own_panels(panels, X, expert), poison(T, outputs)
    arrays = [dense, scratch(T, width), h, aligned(own.shape, np.uint8, own), one(T)]
    call(Kernel("matmul", "cpu", target, defines, 2, 3), *arrays)
    shares = np.tile(np.array([1, 0, 0], np.float32), (T, 1))
    got = down(np.repeat(h, C, axis=0), panels, format, outputs, shares, chosen, None, target)
    assert (got.view(np.uint32) == dense.view(np.uint32)).all()


def ranks_down(
    rows: np.ndarray, format: str, h: np.ndarray, biases: np.ndarray, shares: np.ndarray, chosen: np.ndarray, residual: np.ndarray,
    target: str, world: int, at_once: int,
) -> list[np.ndarray]:  # fmt: skip
    """What each of `world` ranks makes of its columns of the weights and of h; they exchange the sums of `at_once` rows at a time."""
    (T, E), F, place = residual.shape, h.shape[1], at_once * C * residual.shape[1]
    shared, outs, count = aligned((HEADER + 8 * world * place,), np.uint8, 0), [poison(T, E) for _ in range(world)], ALL_SLICES // world

    def run(rank: int) -> None:
        sliced, columns, panels = sliced_panels(F, format, rows, rank * count, count)
        sizes, part = (("E", E), ("C", C), ("RESIDUAL", 0)), poison(T * C, E)
        own = [np.ascontiguousarray(h[:, columns]), panels, *grouped(chosen), one(T)]
        down = Kernel("experts_down", "cpu", target, (*sizes, ("F", own[0].shape[1]), ("X", X), ("WEIGHT", format), *sliced), 2, 5)
        call(down, part, scratch(T * C, F), *own)
        meeting = (("WORLD", world), ("RANK", rank), ("PLACE", place), ("BIAS", 1), ("RESIDUAL", 1))
        ins = [part, biases, shares, chosen.astype(np.int32), residual, one(T)]
        call(Kernel("experts_all_reduce", "cpu", target, (*sizes[:2], *meeting), 2, 6), outs[rank], shared, *ins)

    workers = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return outs


@pytest.mark.parametrize(
    ("format", "target", "world"),
    [
        ("BF16", TARGETS[0], 2),
        ("Q4_K", TARGETS[0], 4),
        *(pytest.param(format, target, 2, marks=pytest.mark.long) for format, target in FORMATS_AND_ALL),
    ],
)
def test_ranks_that_divide_the_columns_have_the_bits_of_one_process(format: str, target: str, world: int) -> None:
    """Of 11 units of columns, whose slices are uneven."""
    F, E, T = packable_width(format, 352), 80, 7
    rows, h, biases = random_rows(format, X * E, F), numbers(T * C, F), numbers(X * E)
    shares, chosen, residual = numbers(T, C), choices(T), numbers(T, E)
    panels, defines = panels_of(format, rows), (("E", E), ("F", F), ("X", X), ("C", C), ("WEIGHT", format), ("RESIDUAL", 1), ("BIAS", 1))
    want = poison(T, E)
    arrays = [want, poison(T * C, E), scratch(T * C, F), h, panels, biases, shares, *grouped(chosen), residual, one(T)]
    call(Kernel("experts_down", "cpu", target, defines, 3, 8), *arrays)
    assert np.isfinite(want).all() and np.ptp(want) > 0
    for at_once in (T, 2):
        for rank, got in enumerate(ranks_down(rows, format, h, biases, shares, chosen, residual, target, world, at_once)):
            assert (got.view(np.uint32) == want.view(np.uint32)).all(), f"rank {rank}, {at_once} rows at a time"


def own_panels(panels: np.ndarray, matrices: int, which: int) -> np.ndarray:
    """The bytes of one of several matrices."""
    return panels.reshape(matrices, -1)[which]


@pytest.mark.parametrize("target", TARGETS)
def test_experts_that_no_row_has_are_not_read(target: str) -> None:
    """Their panels are NaN, which would reach a sum."""
    T, chosen = 7, np.tile([4, 0, 2], (7, 1))
    weights = numbers(2, X, 48, 64)
    weights[:, [1, 3]] = np.nan
    x, panels = numbers(T, 64), pack(weights.reshape(-1, 64), "F32")[0]
    assert np.isfinite(gate_up(x, numbers(64), panels, "F32", 48, chosen, target)).all()
    out = down(numbers(T * C, 64), pack(weights[0].reshape(-1, 64), "F32")[0], "F32", 48, numbers(T, C), chosen, None, target)
    assert np.isfinite(out).all()
