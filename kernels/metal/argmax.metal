// ranks, indices = the largest logit of every part of a row, as an integer that rises with it, and its index
//
//   ranks    [N, PARTS] uint32   0xFFFFFFFF if a logit is NaN; 0 for -inf
//   indices  [N, PARTS] int32    the lowest of equals
//   logits   [N, V] float32
//   count    [1] int32           how many rows there are, 0 to N; what belongs to those behind them stays as it is
//
// Any V, at least PARTS. Exact. argmax_merge.metal makes one index a row of them: in a second launch, because threadgroups of one have no
// order among each other that Metal 3 would promise.
//     grid (PARTS, N, 1), 256 threads; PARTS so that a part is some thousand logits
#include "order.h"

#define SHARE ((V + PARTS - 1) / PARTS)

INLINE uint rank_of(float logit) {
  const uint bits = logit == 0.0f ? 0u : as_type<uint>(logit); // both zeros are equal
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return NOT_A_NUMBER;
  if (bits == 0xFF800000u) return 0u;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

kernel void argmax(device uint *ranks, device int *indices, device const float *logits, device const int *count,
                 uint3 group [[threadgroup_position_in_grid]], uint thread_in_group [[thread_index_in_threadgroup]]) {
  threadgroup uint group_ranks[SIMD_GROUPS];
  threadgroup int group_indices[SIMD_GROUPS];
  const int part = group.x, n = group.y, thread_number = thread_in_group, end = min((part + 1) * SHARE, V);
  if (n >= count[0]) return;
  device const float *row = logits + (ulong)n * V;
  Ranked most = nothing();
  for (int v = part * SHARE + thread_number; v < end; v += THREADS) most = larger(most, ranked(rank_of(row[v]), v));
  most = largest_of_group(most, group_ranks, group_indices, thread_number);
  if (thread_number == 0) ranks[n * PARTS + part] = most.rank, indices[n * PARTS + part] = most.index;
}
