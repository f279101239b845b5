// sample: a threadgroup's memory and what its threads compute together. All functions end with a barrier after the last use of the memory.
//
// Constants: THREADS, CAPACITY, TOP_K and TOP_P, as sample.metal says.
#pragma once
#include "sampling.h"

#define SEARCHED (TOP_K || TOP_P)

#define SIMDS (THREADS / 32)
#define BINS THREADS

struct Workspace {
  ulong sums[SIMDS];
  uint orders_of_simds[SIMDS], tokens_of_simds[SIMDS];
#if SEARCHED
  ulong above;
  int bin;
  uint base;
  atomic_uint listed;
  atomic_uint bins[3][BINS];  // sums of weights, each weight in three parts of 14 bits
  uint orders[CAPACITY + 1], tokens[CAPACITY + 1];
#endif
};

struct Worker {  // a thread, and the memory of its threadgroup
  threadgroup Workspace *work;
  uint index, lane, simd;
};

INLINE void sync_threads() { threadgroup_barrier(mem_flags::mem_threadgroup); }

INLINE Candidate best_of_simd(Candidate best) {
  const uint max_order = simd_max(best.order);
  return make_candidate(max_order, simd_min(best.order == max_order ? best.token : 0xFFFFFFFFu));
}

INLINE Candidate best_of_group(Candidate best, Worker self) {
  best = best_of_simd(best);
  if (self.lane == 0) self.work->orders_of_simds[self.simd] = best.order, self.work->tokens_of_simds[self.simd] = best.token;
  sync_threads();
  const uint other = self.lane % SIMDS;
  best = best_of_simd(make_candidate(self.work->orders_of_simds[other], self.work->tokens_of_simds[other]));
  sync_threads();
  return best;
}

// The least `low` and the greatest `high` of all threads.
INLINE void range_of_group(thread uint &low, thread uint &high, Worker self) {
  low = simd_min(low), high = simd_max(high);
  if (self.lane == 0) self.work->orders_of_simds[self.simd] = low, self.work->tokens_of_simds[self.simd] = high;
  sync_threads();
  low = simd_min(self.work->orders_of_simds[self.lane % SIMDS]), high = simd_max(self.work->tokens_of_simds[self.lane % SIMDS]);
  sync_threads();
}

#if SEARCHED
INLINE ulong shuffle_up(ulong value, ushort by) { return as_type<ulong>(simd_shuffle_up(as_type<uint2>(value), by)); }
INLINE ulong shuffle_xor(ulong value, ushort by) { return as_type<ulong>(simd_shuffle_xor(as_type<uint2>(value), by)); }

// The sum of this thread's and all lower threads' values; if `total`, of all threads'.
INLINE ulong sum_of_group(ulong value, bool total, Worker self) {
  for (ushort apart = 1; apart < 32; apart *= 2) {
    const ulong below = shuffle_up(value, apart);
    if (self.lane >= apart) value += below;
  }
  if (self.lane == 31) self.work->sums[self.simd] = value;
  sync_threads();
  ulong others = self.lane < SIMDS && (total || self.lane < self.simd) ? self.work->sums[self.lane] : 0;
  for (ushort apart = 16; apart > 0; apart /= 2) others += shuffle_xor(others, apart);
  sync_threads();
  return total ? others : value + others;
}
#endif
