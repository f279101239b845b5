"""Planted faults: each must be detected with every seed, and the same kernel without the fault must run."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.emulator.emulate import EmulatorError, emulate_source
from tests.emulator.running import run

SEEDS = range(4)


def faults(message: str, text: str, *arrays: np.ndarray, **options: int) -> None:
    """The kernel fails with that message for every seed."""
    for seed in SEEDS:
        with pytest.raises(EmulatorError, match=message):
            run(text, *(a.copy() for a in arrays), seed=seed, **options)


def runs(text: str, *arrays: np.ndarray, **options: int) -> None:
    for seed in SEEDS:
        run(text, *(a.copy() for a in arrays), seed=seed, **options)


def floats(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.float32)


# ---------------------------------------------------------------- order


def test_a_missing_syncthreads_is_a_race() -> None:
    text = """float *out, const float *in) {{ static __shared__ float s[64]; int t = threadIdx.x;
        s[t] = 0; __syncthreads(); s[t] = in[t]; {} out[t] = s[63 - t]; }}"""
    faults("race: it (reads|writes) byte", text.format(""), floats(64), floats(64), block=64)
    runs(text.format("__syncthreads();"), floats(64), floats(64), block=64)


def test_a_missing_syncwarp_is_a_race() -> None:
    text = """float *out, const float *in) {{ static __shared__ float s[32]; int t = threadIdx.x;
        s[t] = 0; __syncwarp(); s[t] = in[t]; {} out[t] = s[31 - t]; }}"""
    faults("race", text.format(""), floats(32), floats(32))
    faults("race", text.format("__shfl_sync(ALL_LANES, t, 0);"), floats(32), floats(32))  # as in PTX, a shuffle orders no memory
    runs(text.format("__syncwarp();"), floats(32), floats(32))


def test_a_syncwarp_is_not_enough_between_warps() -> None:
    text = (
        "float *out) {{ static __shared__ float s[64]; int t = threadIdx.x; s[t] = 0; __syncthreads(); s[t] = t; {} out[t] = s[t ^ 32]; }}"
    )
    faults("race", text.format("__syncwarp();"), floats(64), block=64)
    runs(text.format("__syncthreads();"), floats(64), block=64)


def test_a_syncwarp_of_some_lanes_orders_these() -> None:
    text = """float *out) {{ static __shared__ float s[32]; int t = threadIdx.x; s[t] = 0; __syncwarp(); s[t] = t;
        if (t < 8) {{ __syncwarp({}); out[t] = s[7 - t]; }} }}"""
    runs(text.format("0xFFu"), floats(32))
    faults("race", text.format("0xFu << t / 4 * 4"), floats(32))


def test_reading_by_many_and_writing_too_early_is_a_race() -> None:
    text = """float *out) {{ static __shared__ float s[2]; int t = threadIdx.x; if (t == 0) s[0] = s[1] = 1; __syncthreads();
        float x = s[0] + s[1]; {} if (t == 40) s[0] = 2; __syncthreads(); out[t] = x + s[0]; }}"""
    faults("race: it (writes|reads) byte 0 ", text.format("__syncwarp();"), floats(96), block=96)
    runs(text.format("__syncthreads();"), floats(96), block=96)


def test_bytes_of_one_word_are_distinguished() -> None:
    text = "u16 *out) {{ static __shared__ u8 s[128]; int t = threadIdx.x; s[2 * t] = t; s[2 * t + 1] = 1; out[t] = s[{}]; }}"
    runs(text.format("2 * t + 1"), np.zeros(64, np.uint16), block=64)
    faults("race|never written", text.format("(2 * t + 2) % 128"), np.zeros(64, np.uint16), block=64)


def test_two_threads_of_a_block_writing_one_word_of_global_memory_is_a_race() -> None:
    faults("race: it writes byte [04] of argument 0 while thread", "float *out) { out[threadIdx.x / 2] = 1; }", floats(4), block=4)


def test_atomics_do_not_race_with_each_other_but_with_writes() -> None:
    runs("u32 *out) { atomicAdd(out, 1u); }", np.zeros(1, np.uint32), block=64)
    faults("race", "u32 *out) { if (threadIdx.x == 7) out[0] = 1; else atomicAdd(out, 1u); }", np.zeros(1, np.uint32), block=64)


def test_two_blocks_writing_one_word_is_a_race() -> None:
    faults("race: it writes byte 0 of argument 0 while thread 0 of block", "float *out) { out[0] = 1; }", floats(4), grid=3, block=1)
    runs("float *out) { out[blockIdx.x] = 1; }", floats(4), grid=3, block=1)


def test_a_block_that_reads_what_another_writes_is_a_race() -> None:
    faults("race", "float *out) { float x = out[4]; if (blockIdx.x == 1 && threadIdx.x == 5) out[4] = x; }", floats(8), grid=5, block=32)


LAST_BLOCK = """float *out, float *parts, u32 *counter) {{
  static __shared__ bool last; int t = threadIdx.x;
  parts[blockIdx.x * 64 + t] = blockIdx.x + t;
  {before}
  if (t == 0) last = {count} == gridDim.x - 1;
  {after}
  if (!last) return;
  float sum = 0;
  for (u32 b = 0; b < gridDim.x; b++) sum += parts[b * 64 + 63 - t];
  out[t] = sum;
}}"""
SYNC = "__syncthreads();"
FENCED = "[&] { __threadfence(); u32 n = atomicAdd(counter, 1u); __threadfence(); return n; }()"


@pytest.mark.parametrize(
    ("good", "before", "count", "after"),
    [
        (True, SYNC, "arrive(counter)", SYNC),
        (True, SYNC, FENCED, SYNC),
        (True, "__threadfence(); __syncthreads();", FENCED, SYNC),
        (False, SYNC, "atomicAdd(counter, 1u)", SYNC),
        (False, SYNC, FENCED.replace("__threadfence(); u32", "u32"), SYNC),
        (False, SYNC, FENCED.replace("__threadfence(); return", "return"), SYNC),
        (False, SYNC, FENCED.replace("__threadfence()", "__threadfence_block()"), SYNC),
        (False, "", "arrive(counter)", SYNC),
        (False, SYNC, "arrive(counter)", ""),
    ],
)
def test_the_last_block_sees_what_the_others_have_released(good: bool, before: str, count: str, after: str) -> None:
    text = LAST_BLOCK.format(before=before, count=count, after=after)
    arrays = (np.zeros(64, np.float32), np.full(64 * 7, np.nan, np.float32), np.zeros(1, np.uint32))
    if not good:
        return faults("race|never written", text, *arrays, outs=3, grid=7, block=64)
    for resident in (1, 3):
        for seed in SEEDS:
            out, *scratch = (a.copy() for a in arrays)
            run(text, out, *scratch, outs=3, grid=7, block=64, seed=seed, resident=resident)
            assert np.array_equal(out, 21 + 7 * np.arange(63, -1, -1))


# ---------------------------------------------------------------- bounds


def test_reading_past_the_end_of_an_argument() -> None:
    faults(
        r"thread 31 of block 0: out of bounds: reads 4 bytes.* byte 128 of argument 1, which has 128",
        "float *out, const float *in) { int t = threadIdx.x; out[t] = in[t + 1]; }",
        floats(32),
        floats(32),
    )
    faults(
        "before the start of argument", "float *out, const float *in) { int t = threadIdx.x; out[t] = in[t - 1]; }", floats(32), floats(32)
    )


def test_wide_loads_are_checked_to_their_last_byte() -> None:
    text = "float4 *out, const float4 *in) {{ if (threadIdx.x < {}) out[threadIdx.x] = in[threadIdx.x]; }}"
    runs(text.format(2), floats(8), floats(11)[:8])
    faults("out of bounds: (reads|writes) .* byte 40 of argument", text.format(3), floats(12), floats(12)[:10].copy())


def test_writing_past_shared_memory() -> None:
    faults(
        "out of bounds: writes 4 bytes .* byte 256 of the shared memory of the launch",
        "float *out) { DYNAMIC_SHARED(s); ((float *)s)[threadIdx.x + 33] = 1; }",
        floats(1),
        shared=256,
    )
    faults(
        "out of bounds: index 33 of an array 'float\\[33\\]'|out of bounds: index 33",
        "float *out) { static __shared__ float s[32][33]; s[threadIdx.x][threadIdx.x + 2] = 1; }",
        floats(1),
    )
    faults(
        "out of bounds: writes .* the shared memory that it declares",
        "float *out) { static __shared__ float s[32]; float *p = s + threadIdx.x; p[1] = 1; }",
        floats(1),
    )


def test_writing_to_a_read_only_argument() -> None:
    faults("writes to argument 1, which is read-only", "float *out, float *in) { in[0] = out[0]; }", floats(1), floats(1), block=1)


def test_a_pointer_into_no_array() -> None:
    faults("is in no array", "float *out) { *(float *)64 = out[0]; }", floats(1), block=1)


def test_misaligned_vectors() -> None:
    text = "float *out, const float *in) {{ {} v = *(const {} *)(in + 1); out[0] = v.x; }}"
    for kind in ("float4", "uint4", "int2"):
        faults(
            "misaligned: an access to byte 4 of argument 1 as '(const )?\\w+', which needs",
            text.format(kind, kind),
            floats(1),
            floats(16),
            block=1,
        )
    faults(
        "misaligned: load_once",
        "uint4 *out, const u32 *in) { out[0] = load_once((const uint4 *)(in + 1)); }",
        np.zeros(4, np.uint32),
        np.zeros(8, np.uint32),
        block=1,
    )


# ---------------------------------------------------------------- unwritten memory


def test_unwritten_shared_memory() -> None:
    text = "float *out) {{ static __shared__ float s[32]; int t = threadIdx.x; if (t != 9) s[t] = 1; __syncwarp(); {} }}"
    faults("never written: reads byte 36 of the shared memory", text.format("out[t] = s[t];"), floats(32))
    faults("never written", text.format("s[t] += 1;"), floats(32))
    faults("never written", text.format("out[t] = s[t];"), floats(32), races=0)


def test_shared_memory_of_the_previous_block_is_cleared() -> None:
    faults(
        "never written",
        "float *out) { static __shared__ float s; if (blockIdx.x == 0) s = 1; out[blockIdx.x] = s; }",
        floats(8),
        grid=8,
        block=1,
    )


def test_an_output_that_is_not_written_keeps_its_poison() -> None:
    out = np.full(32, np.nan, np.float32)
    run("float *out) { if (threadIdx.x != 5) out[threadIdx.x] = 1; }", out)
    assert np.flatnonzero(np.isnan(out)).tolist() == [5]


# ---------------------------------------------------------------- copies

COPY = """uint4 *out, const uint4 *in) {{ static __shared__ uint4 ring[4][32]; int t = threadIdx.x;
  for (int i = 0; i < 3; i++) {{ copy_16(&ring[i][t], in + i * 32 + t); copy_commit(); }}
  {}
  out[t] = ring[{}][{}]; }}"""


@pytest.mark.parametrize(
    ("message", "wait", "stage", "lane"),
    [
        (None, "copy_wait<2>();", "0", "t"),
        (None, "copy_wait<0>();", "2", "t"),
        (None, "copy_wait<1>(); __syncwarp();", "1", "31 - t"),
        ("pending copy: reads byte .* a copy of this thread", "", "0", "t"),
        ("pending copy", "copy_wait<2>();", "1", "t"),
        ("pending copy", "copy_wait<1>(); __syncwarp();", "2", "31 - t"),
        ("race|pending copy|never written", "copy_wait<0>();", "0", "31 - t"),
        ("pending copy: .* a copy of thread", "__syncwarp();", "0", "31 - t"),
        ("never written", "copy_wait<0>();", "3", "t"),
    ],
)
@pytest.mark.parametrize("races", [True, False])
def test_copies_must_be_waited_for(message: str | None, wait: str, stage: str, lane: str, races: bool) -> None:
    if message and message.startswith("race") and not races:
        return
    text, arrays = COPY.format(wait, stage, lane), (np.zeros(128, np.uint32), np.arange(96 * 4, dtype=np.uint32))
    if message:
        faults(message, text, *arrays, races=races)
    else:
        runs(text, *arrays, races=races)


def test_a_copy_over_what_others_still_read_is_a_race() -> None:
    text = """uint4 *out, const uint4 *in) {{ static __shared__ uint4 s[64]; int t = threadIdx.x;
        copy_16(s + t, in + t); copy_commit(); copy_wait<0>(); __syncthreads();
        out[t] = s[63 - t]; {} copy_16(s + t, in + t); copy_commit(); copy_wait<0>(); }}"""
    arrays = (np.zeros(256, np.uint32), np.arange(256, dtype=np.uint32))
    faults("race|pending copy", text.format(""), *arrays, block=64)
    runs(text.format(SYNC), *arrays, block=64)


def test_copies_are_aligned_and_within_bounds() -> None:
    text = "u32 *out, const u32 *in) {{ static __shared__ uint4 s[2]; copy_16((u32 *)s + {}, in + {}); copy_commit(); copy_wait<0>(); }}"
    arrays = (np.zeros(4, np.uint32), np.zeros(8, np.uint32))
    runs(text.format(4, 4), *arrays, block=1)
    faults("misaligned", text.format(1, 0), *arrays, block=1)
    faults("misaligned", text.format(0, 1), *arrays, block=1)
    faults("out of bounds|needs an address in global memory", text.format(0, 8), *arrays, block=1)
    faults("needs an address in shared memory", "u32 *out, const u32 *in) { copy_16(out, in); }", *arrays, block=1)


# ---------------------------------------------------------------- divergence


def test_a_barrier_that_some_threads_never_reach() -> None:
    faults(
        "no thread can continue: 0-6 8-63 wait at __syncthreads, line .*; 7 wait at __syncwarp",
        "float *out) { if (threadIdx.x == 7) __syncwarp(); else __syncthreads(); out[threadIdx.x] = 1; }", floats(64), block=64,
    )  # fmt: skip
    text = "float *out) { if (threadIdx.x % 2)\n __syncthreads();\n else\n __syncthreads(); }"
    faults("no thread can continue", text, floats(64), block=64)


def test_threads_that_have_returned_do_not_count() -> None:
    runs("float *out) { if (threadIdx.x > 40) return; __syncthreads(); out[threadIdx.x] = 1; }", floats(64), block=64)
    runs("float *out) { if (threadIdx.x > 20) return; __syncwarp(); out[threadIdx.x] = __shfl_sync(ALL_LANES, 1, 3); }", floats(32))


def test_a_lane_missing_from_a_shuffle() -> None:
    text = "float *out) {{ int t = threadIdx.x; float x = t; {} out[t] = x; }}"
    faults(
        "no thread can continue: .* wait at __shfl_xor_sync of lanes ffffffff",
        text.format("if (t != 5) x = __shfl_xor_sync(ALL_LANES, x, 1); __syncthreads();"),
        floats(32),
    )
    faults(
        "lane 4 reads lane 5, which does not take part",
        text.format("if (t == 5) return; x = __shfl_xor_sync(ALL_LANES, x, 1);"),
        floats(32),
    )
    faults("is lane \\d+ and calls __shfl_sync with the mask 000000ff", text.format("x = __shfl_sync(0xFFu, x, 1);"), floats(32))
    faults("lane \\d+ reads lane 9, which does not take part", text.format("if (t < 8) x = __shfl_sync(0xFFu, x, 9);"), floats(32))
    faults(
        "no thread can continue", text.format("x = t < 16 ? __shfl_sync(ALL_LANES, x, 1) : (float)__ballot_sync(ALL_LANES, 1);"), floats(32)
    )


def test_a_matrix_needs_all_lanes_at_one_place() -> None:
    text = "float *out) {{ float c[4] = {{0, 0, 0, 0}}; u32 a[4] = {{1, 2, 3, 4}}; int t = threadIdx.x; {} out[t] = c[0]; }}"
    runs(text.format("mma_bf16(c, a, 1, 2);"), floats(32))
    faults("no thread can continue", text.format("if (t < 31) mma_bf16(c, a, 1, 2);"), floats(32))
    faults("no thread can continue", text.format("if (t < 16)\n mma_bf16(c, a, 1, 2);\nelse\n mma_bf16(c, a, 1, 2);"), floats(32))
    faults("no thread can continue", text.format("mma_bf16(c, a, 1, 2);"), floats(16), block=16)


def test_a_livelock_ends() -> None:
    with pytest.raises(EmulatorError, match="4 million turns"):
        run("u32 *out) { while (atomicAdd(out, 0u) == 0) ; }", np.zeros(1, np.uint32), block=2)


def test_blocks_that_wait_for_each_other_need_to_be_resident() -> None:
    text = """u32 *out) {{ static __shared__ u32 mine; if (threadIdx.x == 0) {{ mine = blockIdx.x; __threadfence(); atomicAdd(out + 4, 1u);
        while (*(volatile u32 *)(out + 4) < 4) __nanosleep(10); }} __syncthreads(); if (threadIdx.x == 1) out[blockIdx.x] = mine + 1; }}"""
    out = np.zeros(5, np.uint32)
    run(text.format(), out, grid=4, resident=4, seed=1)
    assert out.tolist() == [1, 2, 3, 4, 4]


# ---------------------------------------------------------------- order of running


def test_the_same_seed_gives_the_same_order_and_another_seed_another() -> None:
    def order(seed: int) -> list[int]:
        tickets = np.zeros(257, np.uint32)
        run("u32 *out) { u32 n = atomicAdd(out, 1u); out[1 + n] = blockIdx.x * 64 + threadIdx.x; }", tickets, grid=4, block=64, seed=seed)
        return tickets[1:].tolist()

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == list(range(256))
    assert [n // 64 for n in order(1)][::64] != [0, 1, 2, 3] or [n // 64 for n in order(2)][::64] != [0, 1, 2, 3]


def test_the_message_shows_the_line() -> None:
    text = "float *out) { int t = threadIdx.x;\n  out[0] = t; // here\n}"
    with pytest.raises(
        EmulatorError, match=re.compile(r"at line \d+: out\[0\] = t; // here.*against line \d+: out\[0\] = t; // here|byte 0x", re.DOTALL)
    ):
        run(text, floats(1))


def test_limits_of_a_launch() -> None:
    text = 'extern "C" __global__ void __launch_bounds__(64) k(float *out) { static __shared__ float s[8192]; s[0] = 1; }'
    for grid, block, shared, message in (
        ((1, 1, 1), (65, 1, 1), 0, "at most 64"),
        ((1, 70000, 1), (64, 1, 1), 0, "a grid of"),
        ((1, 1, 1), (64, 1, 1), 200 * 1024, "bytes of shared memory"),
    ):
        with pytest.raises(EmulatorError, match=message):
            emulate_source(text, "k", grid, block, shared, [0], [])


def test_late_atomics_show_in_the_result() -> None:
    """No race, as all accesses are atomic, but the last block may read before all have arrived: some orders of several blocks show it."""
    text = """u32 *best, u32 *state, u32 *counter) {{ static __shared__ bool last; u32 t = threadIdx.x;
        atomicMax(state + t, t * 100 + blockIdx.x + 1); {}
        if (t == 0) last = arrive(counter) == gridDim.x - 1;
        __syncthreads(); if (last) best[t] = atomicExch(state + t, 0u); }}"""
    for sync, right in ((SYNC, True), ("", False)):
        results = []
        for seed in range(30):
            best, state, counter = np.zeros(8, np.uint32), np.zeros(8, np.uint32), np.zeros(1, np.uint32)
            run(text.format(sync), best, state, counter, outs=3, grid=5, block=8, seed=seed)
            results.append(best.tolist() == [t * 100 + 5 for t in range(8)])
        assert all(results) == right


def test_threads_synchronize_by_atomics_in_shared_memory() -> None:
    """Independent of what other blocks do at the same address in their shared memory."""
    text = """u32 *out) {{ static __shared__ u32 ready, value; u32 t = threadIdx.x; if (t == 0) ready = 0; __syncthreads();
        if (t == 7) {{ value = blockIdx.x; {} atomicExch(&ready, 1u); }}
        if (t == 40) {{ while (atomicAdd(&ready, 0u) == 0) ; __threadfence_block(); out[blockIdx.x] = value; }} }}"""
    out = np.full(6, 99, np.uint32)
    for seed in SEEDS:
        run(text.format("__threadfence_block();"), out, grid=6, block=64, seed=seed)
    assert out.tolist() == list(range(6))
    faults("race", text.format(""), out, grid=6, block=64)


# ---------------------------------------------------------------- the kernel before


WAITS = """float *out, const float *in) {{ int t = threadIdx.x; float x = in[t]; {}
  await_previous();
  {} out[t] = x; }}"""


def test_writing_before_the_wait_is_found() -> None:
    runs(WAITS.format("", ""), floats(32), floats(32))
    faults("writes to argument 0 before it waits", WAITS.format("out[t] = 1.0f;", ""), floats(32), floats(32))


def test_returning_without_having_waited_is_found() -> None:
    faults("returns without having waited", WAITS.format("if (t >= 8) return;", ""), floats(32), floats(32))
    runs(WAITS.format("", "if (t >= 8) return;"), floats(32), floats(32))
