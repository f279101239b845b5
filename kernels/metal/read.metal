// sums[group] = the sum, modulo 2^32, of the words that a threadgroup has read: measures how fast memory can be read, the roof of every
// kernel that streams weights.
//
//   sums   [GROUPS] uint32
//   words  [WORDS, 4] uint32  on a border of 16 bytes
//
// Grid (GROUPS), 256 threads, each with 4 loads of 16 bytes in flight; threadgroup memory only for the sum. GROUPS large enough that a core
// has several: the host takes 1024. WORDS below 2^31.
#include "gpu.h"

enum : uint { THREADS = 256, AHEAD = 4 };

[[max_total_threads_per_threadgroup(THREADS)]] kernel void read(device uint *sums, device const uint4 *words,
                                                                uint3 group [[threadgroup_position_in_grid]],
                                                                uint index [[thread_index_in_threadgroup]],
                                                                uint lane [[thread_index_in_simdgroup]],
                                                                uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint sums_of_simds[THREADS / 32];
  uint sum = 0;
  for (uint unit = group.x * (AHEAD * THREADS); unit < WORDS; unit += GROUPS * AHEAD * THREADS) {
    uint4 loaded[AHEAD];
    for (uint k = 0; k < AHEAD; k++) {
      const uint i = unit + k * THREADS + index;
      loaded[k] = i < WORDS ? words[i] : uint4(0);
    }
    for (uint k = 0; k < AHEAD; k++) sum += loaded[k].x + loaded[k].y + loaded[k].z + loaded[k].w;
  }
  sum = simd_sum(sum);
  if (lane == 0) sums_of_simds[simd] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (index > 0) return;
  sum = 0;
  for (uint other = 0; other < THREADS / 32; other++) sum += sums_of_simds[other];
  sums[group.x] = sum;
}
