"""The kernels that only move things: embed, kv_append, kv_copy, advance. Everything here is exact."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.formats import sampled_formats
from tests.in_turn import in_turn
from tests.kernels.calling import aligned, call
from tinyvllm.backends.cpu.toolchain import cpu_features
from tinyvllm.backends.kernel import Kernel
from tinyvllm.batch import NO_SLOT
from tinyvllm.quant.formats import Layout, packed_in
from tinyvllm.quant.layouts import pack_panels, row_bytes, unpack_rows
from tinyvllm.quant.random_rows import packable_width, random_rows

TARGETS = ("plain", *(["avx2"] if {"avx2", "fma", "f16c"} <= cpu_features() else []), *(["avx512"] if "avx512f" in cpu_features() else []))
E, V, T = 96, 37, 5  # three panels, the last of them not full
WIDTHS = {format: packable_width(format, E) for format in sampled_formats(Layout.PANELS)}


def filled(values: np.ndarray) -> np.ndarray:
    return aligned(values.shape, values.dtype, values)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def file_rows(weight: str) -> np.ndarray:
    """[V, row bytes] uint8 with all the bits a file could have, but no NaN and no infinity; the first F16s are subnormal."""
    random = np.random.default_rng(1)
    if weight in packed_in(Layout.PANELS) and weight not in ("Q8_0", "Q4_0"):
        return random_rows(weight, V, WIDTHS[weight])
    rows = random.integers(0, 256, (V, row_bytes(weight, E)), np.uint8)
    if weight == "F32":
        rows = random.standard_normal((V, E)).astype(np.float32).view(np.uint8)
    if weight == "BF16":
        rows.view(np.uint16)[...] &= 0xBFFF
    if weight == "F16":
        rows.view(np.uint16)[...] &= 0xBFFF
        rows.view(np.uint16)[0] &= 0x83FF
    if weight in packed_in(Layout.PANELS):
        rows.reshape(V, E // 32, -1)[:, :, 1] &= 0xBF
        rows.reshape(V, E // 32, -1)[0, :, 1] &= 0x83
    return rows


def unpacked(weight: str, rows: np.ndarray) -> np.ndarray:
    """float32 [V, E], by the format's definition: of the first formats written here again."""
    if weight == "F32":
        return rows.view(np.float32)
    if weight == "F16":
        return rows.view(np.float16).astype(np.float32)
    if weight == "BF16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if weight not in ("Q8_0", "Q4_0"):
        return unpack_rows(weight, rows)
    blocks = rows.reshape(V, E // 32, -1)
    scales, q = blocks[:, :, :2].copy().view(np.float16).astype(np.float32), blocks[:, :, 2:]
    numbers = q.view(np.int8) if weight == "Q8_0" else np.concatenate([q & 15, q >> 4], -1).astype(np.int8) - 8
    return (scales * numbers.astype(np.float32)).reshape(V, E)


def panels(weight: str, rows: np.ndarray) -> np.ndarray:
    """The same rows sixteen by sixteen, word by word; the rows that fill up the last panel are poison."""
    full = np.full((-V % 16 + V, rows.shape[1]), 0xFF, np.uint8)
    full[:V] = rows
    if weight in ("F32", "F16", "BF16"):
        word = 2 if weight == "F16" else 4
        return np.ascontiguousarray(full.reshape(-1, 16, rows.shape[1] // word, word).transpose(0, 2, 1, 3)).reshape(-1)
    if weight not in ("Q8_0", "Q4_0"):
        return pack_panels(weight, full)
    blocks = full.reshape(-1, 16, E // 32, rows.shape[1] // (E // 32))
    scales, q = blocks[..., :2].transpose(0, 2, 1, 3), blocks[..., 2:]
    if weight == "Q8_0":
        q = q ^ 0x80
    words = q.reshape(*q.shape[:3], -1, 4).transpose(0, 2, 3, 1, 4)
    return np.concatenate([scales.reshape(*scales.shape[:2], -1), words.reshape(*words.shape[:2], -1)], -1).reshape(-1)


@pytest.mark.parametrize(("weight", "in_panels", "target"), in_turn(itertools.product(WIDTHS, (0, 1)), TARGETS))
def test_embed_gives_the_exact_weight(weight: str, in_panels: int, target: str) -> None:
    rows = file_rows(weight)
    table = filled(panels(weight, rows) if in_panels else rows.reshape(-1))
    E = WIDTHS[weight]
    x = aligned((T, E), np.float32)
    tokens = int32(0, V - 1, 16, 15, 3)
    call(Kernel("embed", "cpu", target, (("E", E), ("V", V), ("WEIGHT", weight), ("PANELS", in_panels)), 1, 3), x, table, tokens, int32(4))
    np.testing.assert_array_equal(x[:4].view(np.uint32), unpacked(weight, rows)[tokens[:4]].view(np.uint32))
    assert (x[4].view(np.uint32) == 0xFFFFFFFF).all(), "a row beyond the count was written"


@pytest.mark.parametrize("token", [-1, V, 2**31 - 1])
def test_embed_of_a_token_outside_the_vocabulary_is_nan(token: int) -> None:
    x = aligned((1, E), np.float32, 0)
    kernel = Kernel("embed", "cpu", "plain", (("E", E), ("V", V), ("WEIGHT", "F32"), ("PANELS", 0)), 1, 3)
    call(kernel, x, filled(file_rows("F32")), int32(token), int32(1))
    assert np.isnan(x).all()


def rounded(values: np.ndarray, cache: str) -> np.ndarray:
    """The bits of float32 values in the cache's dtype, to nearest, ties to even."""
    if cache == "F32":
        return values.view(np.uint32)
    if cache == "F16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("cache", ["F32", "F16", "BF16"])
def test_kv_append_writes_its_slots_and_no_others(cache: str, target: str) -> None:
    P, K, S, D = 3, 2, 8, 48
    random = np.random.default_rng(2)
    k, v = random.standard_normal((2, T, K, D)).astype(np.float32)
    k[0, 0, :4] = 1 + 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-11, 1 + 3 * 2.0**-8  # halfway between neighbours
    pool = aligned((P, 2, K, S, D), np.float32 if cache == "F32" else np.uint16)
    expected = pool.copy().view(np.uint32 if cache == "F32" else np.uint16)
    slots = int32(9, 0, 23, 7, 16)
    for t in range(4):
        expected[slots[t] // S, 0, :, slots[t] % S] = rounded(k[t], cache)
        expected[slots[t] // S, 1, :, slots[t] % S] = rounded(v[t], cache)
    kernel = Kernel("kv_append", "cpu", target, (("K", K), ("S", S), ("D", D), ("CACHE_TYPE", cache)), 2, 4)
    call(kernel, pool, pool, filled(k), filled(v), slots, int32(4))
    np.testing.assert_array_equal(pool.view(expected.dtype), expected)


def test_kv_copy_copies_the_pairs_that_count() -> None:
    block = 2 * 2 * 8 * 16
    pool = filled(np.random.default_rng(3).integers(0, 2**16, (6, block), np.uint16))
    expected = pool.copy()
    expected[[4, 0]] = expected[[1, 3]]
    call(Kernel("kv_copy", "cpu", "plain", (("BLOCK_BYTES", block * 2),), 1, 2), pool, int32(1, 4, 3, 0, 2, 5), int32(2))
    np.testing.assert_array_equal(pool, expected)


def test_advance_prepares_the_next_step() -> None:
    B, M, S, N = 5, 2, 4, 3
    kernel = Kernel("advance", "cpu", "plain", (("B", B), ("M", M), ("S", S), ("N", N), ("NO_SLOT", NO_SLOT)), 6, 3)
    tokens, positions, slots = int32(1, 2, 3, 4, -7), int32(0, 3, 7, 2, -7), int32(20, 43, 11, 0, -7)
    lens, history, turn = int32(1, 4, 8, 3, -7), np.full((N, B), -9, np.int32), int32(1)
    tables = np.array([[5, 6], [10, 4], [1, 2], [0, 8], [-7, -7]], np.int32)
    state = (tokens, positions, slots, lens, history, turn)
    call(kernel, *state, int32(11, 12, 13, -1, 77), tables, int32(4))
    assert tokens.tolist() == [11, 12, 13, 0, -7]
    assert positions.tolist() == [1, 4, 8, 3, -7] and lens.tolist() == [2, 5, 9, 4, -7]
    assert slots.tolist() == [21, 16, NO_SLOT, 3, -7]
    assert history.tolist() == [[-9] * B, [11, 12, 13, -1, -9], [-9] * B] and turn.tolist() == [2]
    call(kernel, *state, int32(21, 22, 23, 24, 77), tables, int32(4))
    assert slots.tolist() == [22, 17, NO_SLOT, 32, -7] and history[2].tolist() == [21, 22, 23, 24, -9]
    call(kernel, *state, int32(31, 32, 33, 34, 77), tables, int32(4))  # the history is full: nothing of it changes
    assert tokens.tolist() == [31, 32, 33, 34, -7] and history[0].tolist() == [-9] * B and turn.tolist() == [4]
