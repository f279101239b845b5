"""The sampling operations against plain numpy, value by value."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Device, Tensor, dtypes

from tinyvllm.bridge import download
from tinyvllm.ops import sample

INF, NAN = np.inf, np.nan
VOCABULARIES = (67, 1001, 3072, 40000)  # not divisible by 4; summed at once; in 32 parts; split by tinygrad


def on_device(array: np.ndarray) -> Tensor:
    return Tensor(np.ascontiguousarray(array)).realize()


def column(values, dtype) -> Tensor:
    return on_device(np.array(values, dtype=dtype).reshape(-1, 1))


def value(tensor: Tensor) -> np.ndarray:
    return download(tensor.contiguous().realize())


@pytest.fixture(scope="module")
def steps() -> list[Tensor]:
    return sample.search_steps(Device.DEFAULT)


def threefry(key, counter, rounds=20):
    """The numpy twin, written from the paper's description: words in, words out, all uint32 arrays."""
    keys = [np.uint32(key[0]), np.uint32(key[1])]
    keys.append(np.uint32(0x1BD11BDA) ^ keys[0] ^ keys[1])
    with np.errstate(over="ignore"):
        x, y = counter[0] + keys[0], counter[1] + keys[1]
        for i in range(rounds):
            r = (13, 15, 26, 6, 17, 29, 16, 24)[i % 8]
            x = x + y
            y = (y << np.uint32(r) | y >> np.uint32(32 - r)) ^ x
            if i % 4 == 3:
                s = (i + 1) // 4
                x, y = x + keys[s % 3], y + keys[(s + 1) % 3] + np.uint32(s)
    return x, y


def gumbel(seed: int, position: int, V: int) -> np.ndarray:
    """The noise in float64, from the same words."""
    tokens = np.arange(V, dtype=np.uint32)
    words, _ = threefry((seed & 0xFFFFFFFF, seed >> 32), (tokens, np.full(V, position, np.uint32)))
    return -np.log(-np.log1p(-((words >> np.uint32(1)) + 0.5) / 2**31))


# The known answers published with the paper's code (Random123, kat_vectors).
KNOWN_ANSWERS = [
    (13, (0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
    (13, (0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0xFD36D048, 0x2D17272C)),
    (13, (0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xBA3E4725, 0xF27D669E)),
    (20, (0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    (20, (0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    (20, (0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("rounds", "key", "counter", "words"), KNOWN_ANSWERS)
def test_threefry_gives_the_published_words(rounds, key, counter, words):
    tensors = [on_device(np.array([w], np.uint32)) for w in (*key, *counter)]
    ours = sample.threefry2x32((tensors[0], tensors[1]), (tensors[2], tensors[3]), rounds)
    assert tuple(int(value(w)[0]) for w in ours) == words
    twin = threefry(key, [np.array([c], np.uint32) for c in counter], rounds)
    assert tuple(int(w[0]) for w in twin) == words


@pytest.mark.parametrize("V", [67, 3072])
def test_gumbel_is_a_function_of_seed_position_and_token(V):
    seeds, positions = [0, 1, 2**32, 2**64 - 1, 1], [0, 7, 7, 2**31, 8]
    low, high = column([s & 0xFFFFFFFF for s in seeds], np.uint32), column([s >> 32 for s in seeds], np.uint32)
    noise = value(sample.gumbel(low, high, column(positions, np.uint32), V))
    expected = np.stack([gumbel(s, p, V) for s, p in zip(seeds, positions)])
    tail = expected < -1.9  # where float32 has few values left for 1 - u, and nothing wins a draw
    np.testing.assert_allclose(noise[~tail], expected[~tail], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(noise[tail], expected[tail], atol=1e-2, rtol=0)


def test_gumbel_has_the_moments_of_its_distribution():
    noise = value(sample.gumbel(*(column([0, 1, 2, 3], np.uint32) for _ in range(3)), 40000)).astype(np.float64)
    assert abs(noise.mean() - np.euler_gamma) < 0.01
    assert abs(noise.var() - np.pi**2 / 6) < 0.03
    assert noise.max() > 10  # the far tail, where draws among many tokens are decided
    assert len(np.unique(noise)) > 0.99 * noise.size


def test_the_logarithm_is_good_to_two_millionths():
    x = np.exp(np.random.default_rng(0).uniform(-22.2, 4.5, 10000)).astype(np.float32)
    np.testing.assert_allclose(value(sample._log(on_device(x))), np.log(x.astype(np.float64)), atol=2e-6, rtol=0)
    assert value(sample._log(on_device(np.zeros(1, np.float32))))[0] < -80  # what u = 1 leads to is finite


def test_order_bits_order_and_return():
    x = np.array([-INF, -3e38, -1.0, -1e-30, -0.0, 0.0, 1e-40, 1e-30, 1.0, 1.0000001, 3e38, INF], np.float32)
    bits = value(sample.order_bits(on_device(x)))
    assert bits.dtype == np.uint32 and bits[4] == bits[5]
    assert (np.diff(np.delete(bits, 4).astype(np.int64)) > 0).all()
    np.testing.assert_array_equal(value(sample.from_order_bits(on_device(bits))), x)
    outside = value(sample.from_order_bits(on_device(np.array([0, 2**32 - 1], np.uint32))))
    np.testing.assert_array_equal(outside, [-INF, INF])


@pytest.mark.parametrize("V", VOCABULARIES)
def test_argmax_takes_the_lowest_id_among_equals(V):
    x = np.random.default_rng(V).integers(-3, 3, (8, V)).astype(np.float32)
    x[0] = -5.0
    x[1, :-1] = -INF
    x[2], x[2, -1] = -0.0, 0.0
    np.testing.assert_array_equal(value(sample.argmax(on_device(x))), x.argmax(1))


def test_argmax_of_no_token_is_minus_one():
    x = np.zeros((4, 67), np.float32)
    x[0], x[1], x[2] = NAN, -INF, -NAN
    np.testing.assert_array_equal(value(sample.argmax(on_device(x))), [-1, -1, -1, 0])


def test_penalties_follow_their_formulas():
    random = np.random.default_rng(0)
    logits = random.standard_normal((3, 67)).astype(np.float32) * 5
    counts = random.integers(0, 3, (3, 67)).astype(np.int32)
    prompted = random.integers(0, 2, (3, 67)).astype(np.uint8)
    repetition, presence, frequency = [1.0, 1.3, 0.5], [0.0, 0.7, -1.5], [0.0, -0.2, 2.0]
    scales = [column(c, np.float32) for c in (repetition, presence, frequency)]
    ours = value(sample.penalize(on_device(logits), on_device(counts), on_device(prompted), *scales))
    for b in range(3):
        for v in range(67):
            x = float(logits[b, v])
            if counts[b, v] or prompted[b, v]:
                x = x / repetition[b] if x > 0 else x * repetition[b]
            x -= presence[b] * (counts[b, v] > 0) + frequency[b] * counts[b, v]
            assert ours[b, v] == pytest.approx(x, abs=1e-5)
    np.testing.assert_array_equal(ours[0], logits[0])  # neutral penalties change no bit


def awkward_logits(V: int, seed: int) -> np.ndarray:
    """[8, V]: smooth, tied, partly -inf, huge, tiny, constant, one peak, few levels with -inf."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((8, V)).astype(np.float32) * 3
    x[1] = np.round(x[1])
    x[2, random.random(V) < 0.7] = -INF
    x[3] *= 1e38 / 15
    x[4] *= 1e-38
    x[5] = 1.25
    x[6], x[6, V // 2] = -20.0, 20.0
    x[7] = np.where(random.random(V) < 0.5, -INF, random.integers(0, 3, V)).astype(np.float32)
    x[:, 0] = np.maximum(x[:, 0], 0.0)
    return x


@pytest.mark.parametrize("V", VOCABULARIES)
def test_top_k_threshold_is_the_kth_largest(V, steps):
    x = awkward_logits(V, 1)
    for ks in ([1, 2, 3, 50, 5, 1, 1, 7], [V, V - 1, V, V, V, V, V, V]):
        found = value(sample.top_k_threshold(on_device(x), column(ks, np.int32), steps))
        np.testing.assert_array_equal(found[:, 0], [np.sort(row)[-k] for row, k in zip(x, ks)])


def survivors_of_top_p(row: np.ndarray, floor: float, inverse: float, top_p: float) -> np.ndarray:
    """By sorting: ids of the smallest set of most probable tokens that has the mass, and what equals its last."""
    ids = np.flatnonzero(row >= floor)
    if top_p == 1.0:
        return ids
    scaled = row.astype(np.float64) * inverse
    p = np.exp(scaled[ids] - scaled.max())
    order = np.argsort(-row[ids], kind="stable")
    cumulative = np.cumsum(p[order]) / p.sum()
    last = ids[order[np.searchsorted(cumulative, top_p)]]
    return ids[row[ids] >= row[last]]


@pytest.mark.parametrize("V", VOCABULARIES)
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_top_p_keeps_the_smallest_set_with_the_mass(V, top_p, steps):
    x = awkward_logits(V, 2)
    x[3] /= 1e37  # float64 in the oracle and float32 here agree on the exponent
    inverse = np.array([1.0, 2.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.7], np.float32)
    floors = np.array([-INF, -INF, -INF, 0.0, -INF, 0.0, 1.0, 0.0], np.float32)
    logits = on_device(x)
    share = column([int(top_p * sample.TOP_P_ONE)] * 8, np.int64)
    found = value(
        sample.top_p_threshold(logits, sample.peak(logits), column(floors, np.float32), column(inverse, np.float32), share, steps)
    )
    for b in range(8):
        expected = survivors_of_top_p(x[b], floors[b], inverse[b], top_p)
        np.testing.assert_array_equal(np.flatnonzero(x[b] >= max(found[b, 0], floors[b])), expected, err_msg=f"row {b}")


def test_peak_is_the_largest_logit():
    x = awkward_logits(67, 3)
    np.testing.assert_array_equal(value(sample.peak(on_device(x)))[:, 0], x.max(1))


@pytest.mark.parametrize("V", VOCABULARIES)
def test_scores_of_a_row_do_not_depend_on_the_batch_by_a_bit(V):
    random = np.random.default_rng(4)
    x = random.standard_normal((8, V)).astype(np.float32) * 4
    seeds, positions = random.integers(0, 2**32, (2, 8), np.uint32), np.arange(8, dtype=np.uint32)
    inverse = np.array([0.0, 1.0, 1.7, 0.3, 5.0, 1 / 3, 0.9, 100.0], np.float32)

    def scores(rows: list[int]) -> np.ndarray:
        columns = [on_device(c[rows].reshape(-1, 1)) for c in (inverse, seeds[0], seeds[1], positions)]
        return value(sample.perturb(on_device(x[rows]), *columns)).view(np.uint32)

    together = scores(list(range(8)))
    np.testing.assert_array_equal(scores([0, 1]), together[:2])
    np.testing.assert_array_equal(scores([7, 2, 5]), together[[7, 2, 5]])
    for b in (1, 4):
        np.testing.assert_array_equal(scores([b]), together[b : b + 1])
    np.testing.assert_array_equal(together[0].view(np.float32), x[0])  # greedy


def test_dtypes_are_what_the_graph_is_told():
    x = on_device(awkward_logits(67, 5))
    assert sample.argmax(x).dtype == dtypes.int32
    assert sample.peak(x).dtype == dtypes.float32 and sample.peak(x).shape == (8, 1)
