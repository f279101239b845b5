// best = the index of the largest logit of every row
//
//   best      [N] int32      the lowest of equals; -1 if a logit is NaN or none is above -inf
//   largest   [N] uint64     keys; zero between launches: the last thread block of a row resets it
//   counters  [N] uint32     the same
//   logits    [N, V] float32
//   count     [1] int32      number of rows, 0 to N; outputs of later rows are not touched
//
// Any V. Launch: grid (PARTS, N, 1), 256 threads, no dynamic shared memory. Unit of work: PARTS thread blocks share a row, each reads
// ceil(V / PARTS) logits, and the last of them to arrive writes the index. Exact: a logit and its index form one integer (order.h), and the
// largest integer of the row wins, so the order of the parts has no influence. PARTS = ceil(132 / N), at most ceil(V / 4096): a part then
// reads 16 floats or more a thread.
#include "order.h"

constexpr int THREADS = 256;
constexpr int WIDTH = V % 4 == 0 ? 4 : 1, LOADS = V / WIDTH;  // floats of a load: rows of other lengths are not aligned; loads of a row

DEVICE u64 max_of_part(const float *row, int part, int thread);
DEVICE u64 max_of_block(u64 key, int thread);

extern "C" __global__ void __launch_bounds__(THREADS)
    argmax(int *best, u64 *largest, u32 *counters, const float *logits, const int *count) {
  await_previous();
  const int part = blockIdx.x, n = blockIdx.y, thread = threadIdx.x;
  if (n >= count[0]) return;
  u64 key = max_of_block(max_of_part(logits + (u64)n * V, part, thread), thread);
  if (thread != 0) return;
  if (gridDim.x > 1) {
    atomicMax(largest + n, key);
    if (arrive(counters + n) != gridDim.x - 1) return;
    key = atomicExch(largest + n, 0ull);
    counters[n] = 0;
  }
  best[n] = token_of_key(key);
}

DEVICE u64 key_or_nan(float logit, int v) { return logit != logit ? NAN_KEY : key_of(logit, v); }

DEVICE u64 max_of_part(const float *row, int part, int thread) {
  const int part_loads = (LOADS + gridDim.x - 1) / gridDim.x, end = min((part + 1) * part_loads, LOADS);
  u64 key = 0;
#pragma unroll 4
  for (int i = part * part_loads + thread; i < end; i += THREADS) {
    if constexpr (WIDTH == 4) {
      const float4 four = ((const float4 *)row)[i];
      key = max(key, max(max(key_or_nan(four.x, 4 * i), key_or_nan(four.y, 4 * i + 1)),
                         max(key_or_nan(four.z, 4 * i + 2), key_or_nan(four.w, 4 * i + 3))));
    } else {
      key = max(key, key_or_nan(row[i], i));
    }
  }
  return key;
}

// Of all threads, in thread 0.
DEVICE u64 max_of_block(u64 key, int thread) {
  static __shared__ u64 warps[THREADS / 32];
#pragma unroll
  for (int distance = 16; distance; distance /= 2) key = max(key, __shfl_xor_sync(ALL_LANES, key, distance));
  if (thread % 32 == 0) warps[thread / 32] = key;
  __syncthreads();
  if (thread == 0)
    for (int i = 1; i < THREADS / 32; i++) key = max(key, warps[i]);
  return key;
}
