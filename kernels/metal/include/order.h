// The largest of ranks, and of equals the one with the lowest index.
#pragma once
#include "gpu.h"

#define THREADS 256
#define SIMD_GROUPS (THREADS / 32)
#define NOT_A_NUMBER 0xFFFFFFFFu

struct Ranked {
  uint rank;
  int index;
};
INLINE Ranked ranked(uint rank, int index) {
  Ranked r;
  r.rank = rank, r.index = index;
  return r;
}
INLINE Ranked nothing() { return ranked(0u, 0x7FFFFFFF); }
INLINE Ranked larger(Ranked a, Ranked b) { return b.rank > a.rank || (b.rank == a.rank && b.index < a.index) ? b : a; }

// Of all threads, in thread 0; `ranks` and `indices` have SIMD_GROUPS places.
INLINE Ranked largest_of_group(Ranked most, threadgroup uint *ranks, threadgroup int *indices, int thread_number) {
#pragma unroll
  for (int apart = 16; apart; apart /= 2)
    most = larger(most, ranked(simd_shuffle_xor(most.rank, (ushort)apart), simd_shuffle_xor(most.index, (ushort)apart)));
  if (thread_number % 32 == 0) ranks[thread_number / 32] = most.rank, indices[thread_number / 32] = most.index;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_number == 0)
    for (int i = 1; i < SIMD_GROUPS; i++) most = larger(most, ranked(ranks[i], indices[i]));
  return most;
}
