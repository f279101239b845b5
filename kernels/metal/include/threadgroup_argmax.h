// The best candidate (kernels/include/order.h) of all threads of a threadgroup, for argmax.metal and argmax_merge.metal.
#pragma once
#include "order.h"

#define THREADS 256
#define SIMD_GROUPS (THREADS / 32)

// In thread 0; `orders` and `tokens` have SIMD_GROUPS elements.
INLINE Candidate best_of_threadgroup(Candidate best, threadgroup uint *orders, threadgroup uint *tokens, int thread_index) {
#pragma unroll
  for (int apart = 16; apart; apart /= 2)
    best = better(best, make_candidate(simd_shuffle_xor(best.order, (ushort)apart), simd_shuffle_xor(best.token, (ushort)apart)));
  if (thread_index % 32 == 0) orders[thread_index / 32] = best.order, tokens[thread_index / 32] = best.token;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index == 0)
    for (int i = 1; i < SIMD_GROUPS; i++) best = better(best, make_candidate(orders[i], tokens[i]));
  return best;
}
