// Shared memory of a thread block of sample.cu, and what its threads compute together. Every function ends with a barrier after its last
// use of the workspace.
#pragma once
#include "sampling.h"

// What the parts of a row hand over to the last of them, in global memory; all zero between launches.
struct Meeting {
  u64 best, total;
  u32 listed, arrived;
  u32 unused[2];
};

struct Workspace {
  u64 warps[WARPS];
  u32 mins[WARPS], maxs[WARPS];
  u64 above;
  int bin;
  u32 listed, base, is_last;
#if SEARCHED
  u32 bins[3][BINS];  // sums of weights, 14 bits of each weight in each of the three
  u32 orders[CAPACITY + 1];
  int tokens[CAPACITY + 1];
#endif
};

DEVICE u64 block_max(u64 key, Workspace &work) {
  for (int distance = 16; distance > 0; distance /= 2) key = max(key, __shfl_xor_sync(ALL_LANES, key, distance));
  if (threadIdx.x % 32 == 0) work.warps[threadIdx.x / 32] = key;
  __syncthreads();
  for (int warp = 0; warp < WARPS; warp++) key = max(key, work.warps[warp]);
  __syncthreads();
  return key;
}

// The sum of the values of this thread and all lower ones; if `total`, of all threads.
DEVICE u64 block_sum(u64 value, Workspace &work, bool total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int distance = 1; distance < 32; distance *= 2) {
    const u64 lower = __shfl_up_sync(ALL_LANES, value, distance);
    if (lane >= distance) value += lower;
  }
  if (lane == 31) work.warps[warp] = value;
  __syncthreads();
  u64 others = lane < WARPS && (total || lane < warp) ? work.warps[lane] : 0;
  for (int distance = 16; distance > 0; distance /= 2) others += __shfl_xor_sync(ALL_LANES, others, distance);
  __syncthreads();
  return total ? others : value + others;
}

DEVICE void block_min_max(u32 &low, u32 &high, Workspace &work) {
  low = __reduce_min_sync(ALL_LANES, low), high = __reduce_max_sync(ALL_LANES, high);
  if (threadIdx.x % 32 == 0) work.mins[threadIdx.x / 32] = low, work.maxs[threadIdx.x / 32] = high;
  __syncthreads();
  const int lane = threadIdx.x % 32 < WARPS ? threadIdx.x % 32 : 0;
  low = __reduce_min_sync(ALL_LANES, work.mins[lane]), high = __reduce_max_sync(ALL_LANES, work.maxs[lane]);
  __syncthreads();
}
