"""The CUDA kernels that only move data: embed, kv_append, kv_copy, advance, read, copy. Everything here is exact."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.emulate import emulate
from tests.kernels.calling import aligned, call
from tests.kernels.cuda.tiles import TILED, laid, numbers, pack_tiles
from tinyvllm.backends.kernel import Kernel
from tinyvllm.batch import NO_SLOT
from tinyvllm.quant.codecs import unpack
from tinyvllm.quant.formats import FORMATS
from tinyvllm.quant.kv import KV_FORMATS, pack_blocks
from tinyvllm.quant.random_rows import packable_width

E, V, T = 96, 37, 5  # three tiles of rows, the last of them not full


def int32(*values: int) -> np.ndarray:
    return laid(np.array(values, np.int32))


def file_rows(weight: str) -> np.ndarray:
    """uint8 [V, bytes] with all the bits a file could have, but no NaN and no infinity; the first row's halves are subnormal."""
    if weight == "F32":
        return numbers(V, E).view(np.uint8)
    known, at = FORMATS[weight], 0
    blocks = np.random.default_rng(1).integers(0, 256, (V, packable_width(weight, E) // known.elements, known.nbytes), np.uint8)
    for field in known.fields:
        if field.name in ("numbers", "scale", "offset", "minimum"):
            blocks[..., at + 1] &= 0xBF
            blocks[0, :, at + 1] &= 0x83
        at += field.nbytes
    return blocks.reshape(V, -1)


def embed(weight: str, tiles: int, table: np.ndarray, tokens: np.ndarray, rows: int, threads: int = 32) -> np.ndarray:
    width = packable_width(weight, E)
    x = aligned((len(tokens), width), np.float32)
    kernel = Kernel.cuda("embed", "sm_80", 1, 3, (len(tokens), 1, 1), threads, E=width, V=V, WEIGHT=weight, TILES=tiles)
    emulate(kernel, x, table, tokens, int32(rows))
    return x


@pytest.mark.parametrize(("weight", "tiles"), [*((weight, 0) for weight in ("F32", *TILED)), *((weight, 1) for weight in TILED)])
def test_embed_unpacks_rows(weight: str, tiles: int) -> None:
    rows = file_rows(weight)
    values = rows.view(np.float32) if weight == "F32" else unpack(weight, rows.reshape(-1, FORMATS[weight].nbytes)).reshape(V, -1)
    tokens = int32(0, 36, 16, 9, 7)
    x = embed(weight, tiles, laid(pack_tiles(weight, rows) if tiles else rows), tokens, 4)
    np.testing.assert_array_equal(x[:4], values[tokens[:4]].astype(np.float32))
    assert np.isnan(x[4]).all(), "rows after the count are not touched"


@pytest.mark.parametrize("token", [-1, V, 2**31 - 1])
def test_embed_of_a_token_outside_the_vocabulary_is_nan(token: int) -> None:
    x = embed("BF16", 1, laid(pack_tiles("BF16", file_rows("BF16"))), int32(token, 5), 2)
    assert np.isnan(x[0]).all() and np.isfinite(x[1]).all()


@pytest.mark.parametrize("cache", ["F32", "F16", "BF16"])
def test_kv_append_equals_the_cpu_kernel(cache: str) -> None:
    P, K, S, D = 3, 2, 8, 48
    k, v = numbers(T, K, D, seed=1), numbers(T, K, D, seed=2)
    k[0, 0, :4] = 1 + 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-11, 1 + 3 * 2.0**-8  # halfway between neighbours
    pools = [aligned((P, 2, K, S, D), np.float32 if cache == "F32" else np.uint16) for _ in range(2)]
    sizes, ins = {"K": K, "S": S, "D": D, "CACHE_TYPE": cache}, (k, v, int32(9, 0, 23, 7, 16), int32(4))
    emulate(Kernel.cuda("kv_append", "sm_80", 2, 4, (T, 1, 1), 32, **sizes), pools[0], aligned((4,), np.float32), *ins)
    call(Kernel.cpu("kv_append", "plain", 2, 4, **sizes), pools[1], pools[1], *ins)
    np.testing.assert_array_equal(pools[0].view(np.uint8), pools[1].view(np.uint8))


@pytest.mark.parametrize("D", [48, 512])
@pytest.mark.parametrize("cache", KV_FORMATS)
def test_kv_append_packs_as_the_definition(cache: str, D: int) -> None:
    P, K, S, slots = 3, 3, 8, [9, 0, 23, 7]
    k, v = numbers(T, K, D, seed=1), numbers(T, K, D, seed=2)
    k[0, 0, 3], k[1, 1], v[2, 0, 5], v[3, 2, 0] = np.nan, 0, -np.inf, 1e6
    v[0, 1] = np.r_[127, np.arange(D - 1) + 0.5]  # halfway between whole numbers
    held = numbers(P, 2, K, S, D, seed=3)
    pool = laid(pack_blocks(cache, held))
    for t, slot in enumerate(slots):
        held[slot // S, 0, :, slot % S], held[slot // S, 1, :, slot % S] = k[t], v[t]
    kernel = Kernel.cuda("kv_append", "sm_80", 2, 4, (T, 1, 1), 64, K=K, S=S, D=D, CACHE_TYPE=cache)
    emulate(kernel, pool, aligned((4,), np.float32), k, v, int32(*slots, 16), int32(4))
    np.testing.assert_array_equal(pool, pack_blocks(cache, held))


@pytest.mark.parametrize("pieces", [1, 2])
def test_kv_copy_copies_the_pairs_that_count(pieces: int) -> None:
    block = 20000
    pool = laid(np.random.default_rng(3).integers(0, 2**16, (6, block // 2), np.uint16))
    expected = pool.copy()
    expected[[4, 0]] = expected[[1, 3]]
    emulate(Kernel.cuda("kv_copy", "sm_80", 1, 2, (pieces, 3, 1), 256, BLOCK_BYTES=block), pool, int32(1, 4, 3, 0, 2, 5), int32(2))
    np.testing.assert_array_equal(pool, expected)


def test_advance_prepares_the_next_step() -> None:
    B, M, S, rounds = 37, 2, 4, 2
    random = np.random.default_rng(4)
    state = [laid(random.integers(0, 9, B).astype(np.int32)) for _ in range(4)] + [laid(np.full((rounds, B), -9, np.int32)), int32(0)]
    state[0][36] = state[1][36] = -7
    sizes, tables = {"M": M, "S": S, "NO_SLOT": NO_SLOT}, laid(random.integers(0, 50, (B, M)).astype(np.int32))
    theirs = [laid(array) for array in state]
    for turn in range(rounds + 1):  # in the last one the history is full
        ins = (laid(random.integers(-1, 99, B).astype(np.int32)), tables, int32(36))
        emulate(Kernel.cuda("advance", "sm_80", 6, 3, (1, 1, 1), 32, ROUNDS=rounds, **sizes).passing(B), *state, *ins, seed=turn)
        call(Kernel.cpu("advance", "plain", 6, 3, B=B, N=rounds, **sizes), *theirs, *ins)
        for ours, other in zip(state, theirs, strict=True):
            np.testing.assert_array_equal(ours, other)
    assert state[5][0] == rounds + 1 and state[1][36] == -7 and NO_SLOT in state[2]


@pytest.mark.parametrize("words", [4096 * 3 + 700, 5])
def test_read_and_copy_reach_every_word(words: int) -> None:
    blocks, data = 2, laid(np.random.default_rng(5).integers(0, 2**32, (words, 4), np.uint32))
    sums, copied = aligned((blocks,), np.uint32), aligned((words, 4), np.uint32)
    emulate(Kernel.cuda("read", "sm_80", 1, 1, (blocks, 1, 1), 512, WORDS=words, BLOCKS=blocks), sums, data)
    assert sums.sum(dtype=np.uint32) == data.sum(dtype=np.uint32)
    emulate(Kernel.cuda("copy", "sm_80", 1, 1, (blocks, 1, 1), 512, WORDS=words, BLOCKS=blocks), copied, data)
    np.testing.assert_array_equal(copied, data)
