// best = the index of the largest logit of every row
//
//   best      [N] int32      the lowest of equals; -1 if a logit is NaN or none is above -inf
//   most      [N] uint64     zero between launches: the last block of threads of a row puts it back
//   counters  [N] uint32     the same
//   logits    [N, V] float32
//   count     [1] int32      how many rows there are, 0 to N; what belongs to those behind them stays as it is
//
// Any V. Grid (PARTS, N, 1), 256 threads, no dynamic shared memory: PARTS blocks of threads share a row, each from V / PARTS on, and the
// last of them to come writes the index. Exact: a logit and its index become one integer, and the row's largest integer wins, so the order
// of the parts does not show. PARTS = ceil(132 / N), at most ceil(V / 4096): a part reads 16 floats or more a thread.
#include "gpu.cuh"

constexpr int THREADS = 256;
constexpr int WIDTH = V % 4 == 0 ? 4 : 1, CHUNKS = V / WIDTH; // floats of a load: rows of other lengths are not aligned
constexpr int SHARE = (CHUNKS + PARTS - 1) / PARTS;
constexpr u64 NOT_A_NUMBER = ~0ull;

// Rises with the logit, then with a lower index; 0 for -inf. + 0.0f makes both zeros one.
DEVICE u64 rank_of(float logit, int v) {
  const u32 bits = __float_as_uint(logit + 0.0f);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return NOT_A_NUMBER;
  if (bits == 0xFF800000u) return 0;
  return (u64)(bits & 0x80000000u ? ~bits : bits | 0x80000000u) << 32 | ~(u32)v;
}

DEVICE u64 larger(u64 a, u64 b) { return a > b ? a : b; }

DEVICE u64 largest_of_part(const float *row, int part, int thread) {
  const int end = (part + 1) * SHARE < CHUNKS ? (part + 1) * SHARE : CHUNKS;
  u64 most = 0;
#pragma unroll 4
  for (int i = part * SHARE + thread; i < end; i += THREADS) {
    if constexpr (WIDTH == 4) {
      const float4 four = ((const float4 *)row)[i];
      most = larger(most, larger(larger(rank_of(four.x, 4 * i), rank_of(four.y, 4 * i + 1)),
                                 larger(rank_of(four.z, 4 * i + 2), rank_of(four.w, 4 * i + 3))));
    } else {
      most = larger(most, rank_of(row[i], i));
    }
  }
  return most;
}

// Of all threads, in thread 0.
DEVICE u64 largest_of_block(u64 most, int thread) {
  static __shared__ u64 warps[THREADS / 32];
#pragma unroll
  for (int apart = 16; apart; apart /= 2) most = larger(most, __shfl_xor_sync(ALL_LANES, most, apart));
  if (thread % 32 == 0) warps[thread / 32] = most;
  __syncthreads();
  if (thread == 0)
    for (int i = 1; i < THREADS / 32; i++) most = larger(most, warps[i]);
  return most;
}

extern "C" __global__ void __launch_bounds__(THREADS) argmax(int *best, u64 *most, u32 *counters, const float *logits, const int *count) {
  const int part = blockIdx.x, n = blockIdx.y, thread = threadIdx.x;
  if (n >= count[0]) return;
  u64 mine = largest_of_block(largest_of_part(logits + (u64)n * V, part, thread), thread);
  if (thread != 0) return;
  if (PARTS > 1) {
    atomicMax(most + n, mine);
    if (arrive(counters + n) != PARTS - 1) return;
    mine = atomicExch(most + n, 0ull);
    counters[n] = 0;
  }
  best[n] = mine == NOT_A_NUMBER || mine == 0 ? -1 : (int)~(u32)mine;
}
