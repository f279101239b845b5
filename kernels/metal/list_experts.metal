// The pairs of rows and experts by expert, and the tasks that these are cut into
//
//   order    [T C] int32        the pairs t C + c of expert 0, of 1, ...; places after the last row's are unchanged
//   tasks    [1 + 3 N] int32    how many tasks there are, then of each the expert and the first and the end of its places in `order`: PIECE at most, of
//                               one expert. N is at most T C / PIECE + min(X, T C)
//   chosen   [T, C] int32       0 to X - 1
//   rows     [1] int32          how many rows there are, 0 to T
//
// X <= 1024. The order of an expert's pairs is that in which threads arrive: nothing of it changes a pair's bits.
//
// Grid (1), THREADS threads: X rounded up to a multiple of 32, at least 256. A thread has an expert: it adds up what is before it.
#include "gpu.h"

static_assert(THREADS % 32 == 0 && X <= THREADS && THREADS <= 1024, "list_experts: a thread has one expert at most");

INLINE uint2 sum_before(uint2 own, threadgroup uint2 *simds, uint simd, uint lane, thread uint2 &all);

[[max_total_threads_per_threadgroup(THREADS)]] kernel void list_experts(device int *order, device int *tasks, device const int *chosen,
                                                                        device const int *rows, uint index [[thread_index_in_threadgroup]],
                                                                        uint simd [[simdgroup_index_in_threadgroup]],
                                                                        uint lane [[thread_index_in_simdgroup]]) {
  threadgroup atomic_uint counts[THREADS], next[THREADS];
  threadgroup uint2 simds[THREADS / 32];
  const int pairs = rows[0] * C;
  atomic_store_explicit(&counts[index], 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int p = int(index); p < pairs; p += THREADS) atomic_fetch_add_explicit(&counts[chosen[p]], 1u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const uint count = atomic_load_explicit(&counts[index], memory_order_relaxed);
  uint2 all;  // pairs and tasks
  const uint2 before = sum_before(uint2(count, (count + PIECE - 1) / PIECE), simds, simd, lane, all);
  atomic_store_explicit(&next[index], before.x, memory_order_relaxed);
  device int *task = tasks + 1 + 3 * before.y;
  for (uint first = 0; first < count; first += PIECE, task += 3) {
    task[0] = int(index), task[1] = int(before.x + first);
    task[2] = int(before.x + min(first + PIECE, count));
  }
  if (index == 0) tasks[0] = int(all.y);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int p = int(index); p < pairs; p += THREADS) order[atomic_fetch_add_explicit(&next[chosen[p]], 1u, memory_order_relaxed)] = p;
}

// The sum of `own` over the threads before this one, and over all.
INLINE uint2 sum_before(uint2 own, threadgroup uint2 *simds, uint simd, uint lane, thread uint2 &all) {
  uint2 sum = own;
#pragma unroll
  for (uint apart = 1; apart < 32; apart *= 2) {
    const uint2 other = uint2(simd_shuffle_up(sum.x, (ushort)apart), simd_shuffle_up(sum.y, (ushort)apart));
    if (lane >= apart) sum += other;
  }
  if (lane == 31) simds[simd] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint2 before = sum - own;
  all = uint2(0);
  for (uint i = 0; i < THREADS / 32; i++) {
    if (i < simd) before += simds[i];
    all += simds[i];
  }
  return before;
}
