"""The Metal kernels that only move data: embed, kv_append, kv_copy, advance, read. All results are exact."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.emulate import emulate
from tests.kernels.calling import aligned, call
from tests.kernels.metal.samples import EVERY
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.metal import plan as records
from tinyvllm.batch import NO_SLOT, KVLayout
from tinyvllm.quant.formats import FORMATS, GROUPED
from tinyvllm.quant.kv import KV_FORMATS, pack_blocks
from tinyvllm.quant.layouts import unpack_rows
from tinyvllm.quant.random_rows import packable_width, random_rows

VARIANT = "apple7"


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def file_rows(weight: str, V: int, E: int) -> np.ndarray:
    """uint8 [V, bytes]; numbers and scales of the first row are subnormal halves, of formats that have any."""
    rows, small = random_rows(weight, V, E), random_rows(weight, 1, E, size=2.0**-22)
    if FORMATS[weight].is_float or "exponent" not in [field.name for field in FORMATS[weight].fields]:
        rows[:1] = small
    return rows


@pytest.mark.parametrize("weight", EVERY)
def test_embed_unpacks_rows(weight: str) -> None:
    V, E = 37, packable_width(weight, 96)
    rows, tokens = file_rows(weight, V, E), int32(0, 36, 16, 9, 7)
    values = unpack_rows(weight, rows)
    x = aligned((5, E), np.float32)
    emulate(records.embed(VARIANT, weight, 5, V, E), x, rows, tokens, int32(4))
    np.testing.assert_allclose(x[:4], values[tokens[:4]], rtol=0, atol=2**-22 if weight in GROUPED else 0)
    assert np.isnan(x[4]).all(), "invalid rows are not written"


def test_embed_of_a_token_outside_the_vocabulary_is_nan() -> None:
    x = aligned((4, 96), np.float32, 0)
    emulate(records.embed(VARIANT, "BF16", 4, 37, 96), x, file_rows("BF16", 37, 96), int32(-1, 37, 2**31 - 1, 5), int32(4))
    assert np.isnan(x[:3]).all() and np.isfinite(x[3]).all()


@pytest.mark.parametrize("cache", ["F32", "F16", "BF16"])
def test_kv_append_writes_what_the_cpus_does(cache: str) -> None:
    P, K, S, D, T = 3, 2, 8, 48, 5
    k, v = numbers(T, K, D, seed=1), numbers(T, K, D, seed=2)
    k[0, 0, :4] = 1 + 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-11, 1 + 3 * 2.0**-8  # halfway between neighbours
    k[0, 1, :4] = 2.0**-16, 70000, np.inf, -np.inf
    pools = [aligned((P, 2, K, S, D), np.float32 if cache == "F32" else np.uint16) for _ in range(2)]
    sizes, ins = {"K": K, "S": S, "D": D, "CACHE_TYPE": cache}, (k, v, int32(9, 0, 23, 7, 16), int32(4))
    emulate(records.kv_append(VARIANT, T, K, S, D, cache), pools[0], aligned((4,), np.float32), *ins)
    call(Kernel.cpu("kv_append", "plain", 2, 4, **sizes), pools[1], pools[1], *ins)
    np.testing.assert_array_equal(pools[0].view(np.uint8), pools[1].view(np.uint8))


@pytest.mark.parametrize("D", [48, 512])
@pytest.mark.parametrize("cache", KV_FORMATS)
def test_kv_append_packs_as_the_definition(cache: str, D: int) -> None:
    P, K, S, T, slots = 3, 3, 8, 5, [9, 0, 23, 7]
    k, v = numbers(T, K, D, seed=1), numbers(T, K, D, seed=2)
    k[0, 0, 3], k[1, 1], v[2, 0, 5], v[3, 2, 0] = np.nan, 0, -np.inf, 1e6
    v[0, 1] = np.r_[127, np.arange(D - 1) + 0.5]  # halfway between whole numbers
    k[3, 0] *= 1e-34  # too small to scale
    held = numbers(P, 2, K, S, D, seed=3)
    pool = pack_blocks(cache, held)
    for t, slot in enumerate(slots):
        held[slot // S, 0, :, slot % S], held[slot // S, 1, :, slot % S] = k[t], v[t]
    emulate(records.kv_append(VARIANT, T, K, S, D, cache), pool, aligned((4,), np.float32), k, v, int32(*slots, 16), int32(4))
    np.testing.assert_array_equal(pool, pack_blocks(cache, held))


@pytest.mark.parametrize("block", [20000, 16384, KVLayout("KV_INT4", 1, 8, 48).block_bytes, 48])
def test_kv_copy_copies_the_pairs_that_count(block: int) -> None:
    pool = np.random.default_rng(3).integers(0, 2**16, (6, block // 2), np.uint16)
    expected = pool.copy()
    expected[[4, 0]] = expected[[1, 3]]
    emulate(records.kv_copy(VARIANT, 3, block), pool, int32(1, 4, 3, 0, 2, 5), int32(2))
    np.testing.assert_array_equal(pool, expected)


def test_advance_prepares_the_next_step() -> None:
    B, M, S, rounds = 37, 2, 4, 2
    random = np.random.default_rng(4)
    state = [random.integers(0, 9, B).astype(np.int32) for _ in range(4)] + [np.full((rounds, B), -9, np.int32), int32(0)]
    state[0][36] = state[1][36] = -7
    expected, tables = [array.copy() for array in state], random.integers(0, 50, (B, M)).astype(np.int32)
    sizes = {"B": B, "M": M, "S": S, "NO_SLOT": NO_SLOT, "N": rounds}
    for turn in range(rounds + 1):  # in the last one the history is full
        ins = (random.integers(-1, 99, B).astype(np.int32), tables, int32(36))
        emulate(records.advance(VARIANT, B, M, S, rounds), *state, *ins, seed=turn)
        call(Kernel.cpu("advance", "plain", 6, 3, **sizes), *expected, *ins)
        for array, other in zip(state, expected, strict=True):
            np.testing.assert_array_equal(array, other)
    assert state[5][0] == rounds + 1 and state[1][36] == -7 and NO_SLOT in state[2]


@pytest.mark.parametrize("words", [1024 * 5 + 700, 5])
def test_read_reads_every_word(words: int) -> None:
    data, sums = np.random.default_rng(5).integers(0, 2**32, (words, 4), np.uint32), aligned((3,), np.uint32)
    emulate(records.read(VARIANT, words, 3), sums, data)
    assert sums.sum(dtype=np.uint32) == data.sum(dtype=np.uint32)
