// The search for exact thresholds of top_k and top_p in sample.cu: the largest number such that the numbers from it on reach a given weight
// together. By counting in bins of the bits, over a list in shared memory or a whole row.
#pragma once
#include "sample_block.cuh"
#include "sample_row.cuh"

struct Weigher {  // the weight of a logit: its probability relative to the largest, or 1
  float peak, inverse;
  bool by_probability;
};

// In units of 2^-40, x no NaN.
DEVICE u64 weight_of(const Weigher &weigher, float x) {
  if (!weigher.by_probability) return 1;
  const ScaledExp power = scaled_exp(x, weigher.peak, weigher.inverse);
  return (u64)(s64)(power.mantissa * __uint_as_float((u32)(power.exponent + 40 + 127) << 23));
}

struct List {  // for_each(visit) calls visit(order) for this thread's numbers
  const u32 *orders;
  u32 length;
  template <typename Function> __device__ __forceinline__ void for_each(const Function &visit) const {
    for (u32 i = threadIdx.x; i < length; i += THREADS) visit(orders[i]);
  }
};

struct WholeRow {
  const Row &row;
  template <typename Function> __device__ __forceinline__ void for_each(const Function &visit) const {
    for_each_logit<1>(row, {(int)threadIdx.x, THREADS}, [&](int, float x) { visit(order_of(x)); });
  }
};

DEVICE void add_to_bin(u32 (&bins)[3][BINS], int bin, u64 weight) {
  const u32 parts[3] = {(u32)weight & 0x3FFF, (u32)(weight >> 14) & 0x3FFF, (u32)(weight >> 28)};
  for (int k = 0; k < 3; k++)
    if (parts[k]) atomicAdd(&bins[k][bin], parts[k]);
}

// Narrows the range to the bin in which the sum from above reaches `share`; false if none does. `above` then also includes the weights of
// the higher bins.
DEVICE bool narrow(Workspace &work, u32 &low, u32 &high, int shift, u64 &above, u64 share) {
  const int bin = BINS - 1 - threadIdx.x;
  const u64 weight = work.bins[0][bin] + ((u64)work.bins[1][bin] << 14) + ((u64)work.bins[2][bin] << 28);
  if (threadIdx.x == 0) work.bin = -1;
  const u64 reached = above + block_sum(weight, work, false);
  if (reached >= share && reached - weight < share) work.bin = bin, work.above = reached - weight;
  __syncthreads();
  const int found = work.bin;
  if (found >= 0) {
    above = work.above;
    low += (u32)found << shift;
    high = min(high, low + ((1u << shift) - 1));
  }
  return found >= 0;
}

// `low` and `high` become the largest number in their range such that the numbers from it to `high` weigh `share` together; false if all
// weigh less. With fewer rounds than EXACT_ROUNDS a range that contains the number may remain.
template <typename Numbers>
DEVICE bool search(Workspace &work, const Numbers &numbers, const Weigher &weigher, u32 &low, u32 &high, u64 share, int rounds) {
  u64 above = 0;
  for (int round = 0; round == 0 || (round < rounds && low < high); round++) {
    const u32 from = low, width = high - low;
    const int shift = max(0, 32 - BIN_BITS - __clz(width));
    for (int k = 0; k < 3; k++) work.bins[k][threadIdx.x] = 0;
    __syncthreads();
    numbers.for_each([&](u32 order) {
      if (order - from <= width) add_to_bin(work.bins, (order - from) >> shift, weight_of(weigher, float_from_order(order)));
    });
    __syncthreads();
    if (!narrow(work, low, high, shift, above, share)) return false;
  }
  return true;
}
