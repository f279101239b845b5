// pool[to] = pool[from] for pairs of blocks: for forks of a sequence that write into a block they share.
//
//   pool   [P, BLOCK_BYTES]   one layer's blocks, keys and values, of any dtype; written in place, 16-byte aligned
//   pairs  [N, 2] int32       from, to; no block is in two pairs
//   count  [1] int32          number of pairs, at most N
//
// Launch: grid (PIECES, N), 256 threads. Unit of work: PIECES = ceil(BLOCK_BYTES / 16384) thread blocks share a pair, each thread with 4
// loads of 16 bytes in flight. BLOCK_BYTES is a multiple of 16.
#include "gpu.cuh"

constexpr int THREADS = 256, WORDS = BLOCK_BYTES / 16, LOADS = 4;
static_assert(BLOCK_BYTES % 16 == 0, "kv_copy: BLOCK_BYTES must be a multiple of 16");

extern "C" __global__ void __launch_bounds__(THREADS) kv_copy(uint4 *pool, const int *pairs, const int *count) {
  await_previous();
  const int n = blockIdx.y;
  if (n >= count[0]) return;
  const uint4 *from = pool + (s64)pairs[2 * n] * WORDS;
  uint4 *to = pool + (s64)pairs[2 * n + 1] * WORDS;
  for (int i = blockIdx.x * (LOADS * THREADS) + threadIdx.x; i < WORDS; i += gridDim.x * (LOADS * THREADS)) {
    uint4 words[LOADS];
#pragma unroll
    for (int k = 0; k < LOADS; k++)
      if (i + k * THREADS < WORDS) words[k] = from[i + k * THREADS];
#pragma unroll
    for (int k = 0; k < LOADS; k++)
      if (i + k * THREADS < WORDS) to[i + k * THREADS] = words[k];
  }
}
