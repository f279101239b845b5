"""Attention to contexts that ranks divide: each rank has the bits of one process, whatever a rank's place holds at a time."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.calling import aligned, call
from tests.kernels.test_attention import TARGETS, Case, Shape, _ints, decode, make, prefill, same
from tinyvllm.backends.kernel import Kernel
from tinyvllm.distributed.memory import HEADER

NEW = [1, 1, 1, 90, 3, 200]
CONTEXT = [300, 1, 1100, 700, 512, 200]
DECODES = 3
SHAPES = [
    Shape(H=8, K=2, D=64, S=256, dtype="BF16"),
    Shape(H=3, K=3, D=48, S=256),
    Shape(H=4, K=2, D=128, S=256, dtype="F16", window=300),
    Shape(H=4, K=4, D=64, S=256, dtype="KV_INT8", window=70),
    Shape(H=8, K=1, D=64, S=256, dtype="KV_INT4"),
    Shape(H=4, K=1, D=96, S=256, dtype="KV_FP8"),
]


def parts_of(case: Case, world: int) -> tuple[list[np.ndarray], np.ndarray]:
    """A pool a rank, and the tables of their common blocks, in which a rank has every `world`-th of the case's blocks of 256 tokens."""
    B, M = len(case.context), -(-case.tables.shape[1] // world)
    pools = [aligned((1 + B * M, *case.cache.shape[1:]), case.cache.dtype) for _ in range(world)]
    tables, order = _ints(np.full((B, M), 2**30)), iter(np.random.default_rng(1).permutation(B * M))
    for b, context in enumerate(case.context):
        for i in range(-(-context // 256)):
            if i % world == 0:
                tables[b, i // world] = next(order)
            block = case.tables[b, i]
            if block < len(case.cache):  # not before every window
                pools[i % world][tables[b, i // world]] = case.cache[block]
    return pools, tables


def attend(case: Case, world: int, target: str, place: int, threads: int) -> list[np.ndarray]:
    """The results of each rank, all of which run at the same time."""
    s, (pools, tables) = case.shape, parts_of(case, world)
    shared, G = aligned((HEADER + 8 * world * place,), np.uint8, 0), s.H // s.K
    sizes = {"H": s.H, "K": s.K, "D": s.D, "S": s.S, "M": tables.shape[1], "WINDOW": s.window, "WORLD": world, "PLACE": place}
    outs = [aligned(case.q.shape, np.float32) for _ in range(world)]

    def run(rank: int) -> None:
        defines = (*sizes.items(), ("RANK", rank), ("CACHE_TYPE", s.dtype), ("SCALE", f"{s.D**-0.5}f"))
        scratch = aligned((64 * (256 * s.D + max(1, 128 // G) * G * (3 * s.D + 32)),), np.float32)
        ins = [case.q, pools[rank], tables, _ints(case.context), case.starts, _ints([DECODES]), _ints([DECODES, len(case.new) - DECODES])]
        call(Kernel("attention_ranks", "cpu", target, defines, outs=3, ins=7), outs[rank], shared, scratch, *ins, threads=threads)

    workers = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return outs


@pytest.mark.parametrize(
    ("shape", "target", "world", "rows"),
    [
        (SHAPES[0], TARGETS[0], 2, 7),
        (SHAPES[3], TARGETS[0], 2, 100),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                *((shape, TARGETS[0], 2, 30) for shape in SHAPES),
                *((SHAPES[0], target, 4, 7) for target in TARGETS),
                (SHAPES[0], TARGETS[0], 2, 1),
                (SHAPES[0], TARGETS[0], 2, 2000),
            )
        ),
    ],
    ids=str,
)
def test_each_rank_has_the_bits_of_one_process(shape: Shape, target: str, world: int, rows: int) -> None:
    """With room for `rows` rows of the longest context at a time: spans are cut to it, and places change often, or never."""
    case = make(shape, NEW, CONTEXT)
    want, one_row = prefill(case, target), -(-5 // world) * shape.H * (shape.D + 2)
    assert same(decode(case, target)[:DECODES], want[:DECODES])
    for threads in (1, 2):
        for rank, out in enumerate(attend(case, world, target, rows * one_row, threads)):
            assert same(out, want), rank


def test_the_keys_of_other_ranks_are_not_read() -> None:
    """A NaN in one rank's part reaches the rows that see it, in all ranks; its other slots are NaN from the start."""
    case = make(replace(SHAPES[0], window=0), NEW, CONTEXT)
    clean = prefill(case)
    case.cache[case.tables[2, 4], :, :, 40] = 0xFFFF  # position 1064 of the third decode, of rank 0 among two
    for out in attend(case, 2, TARGETS[0], 7 * 3 * 8 * 66, 1):
        assert np.isnan(out[2]).all() and same(np.delete(out, 2, 0), np.delete(clean, 2, 0))
