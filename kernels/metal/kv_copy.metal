// pool[to] = pool[from] for pairs of blocks: forks of a sequence that write into a block they share.
//
//   pool   [P, BLOCK_BYTES]   one layer's blocks, keys and values, of any dtype; written in place, on a border of 16 bytes
//   pairs  [N, 2] int32       from, to; no block is in two pairs
//   count  [1] int32          number of valid pairs, at most N
//
// Grid (GROUPS, N), 256 threads: GROUPS = ceil(BLOCK_BYTES / 16384) threadgroups share a pair, each thread with 4 loads of 16 bytes in
// flight. BLOCK_BYTES is a multiple of 16.
#include "gpu.h"

enum : uint { THREADS = 256, WORDS = BLOCK_BYTES / 16, AHEAD = 4 };
static_assert(BLOCK_BYTES % 16 == 0, "kv_copy: BLOCK_BYTES must be a multiple of 16");

[[max_total_threads_per_threadgroup(THREADS)]] kernel void kv_copy(device uint4 *pool, device const int *pairs, device const int *count,
                                                                   uint3 group [[threadgroup_position_in_grid]],
                                                                   uint index [[thread_index_in_threadgroup]]) {
  const uint n = group.y, first = group.x * (AHEAD * THREADS) + index;
  if (n >= uint(count[0])) return;
  device const uint4 *from = pool + ulong(pairs[2 * n]) * WORDS;
  device uint4 *to = pool + ulong(pairs[2 * n + 1]) * WORDS;
  uint4 words[AHEAD];
  for (uint k = 0; k < AHEAD; k++)
    if (first + k * THREADS < WORDS) words[k] = from[first + k * THREADS];
  for (uint k = 0; k < AHEAD; k++)
    if (first + k * THREADS < WORDS) to[first + k * THREADS] = words[k];
}
