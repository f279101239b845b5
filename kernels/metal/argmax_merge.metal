// best = the index of the largest logit of every row, out of its parts'
//
//   best     [N] int32           the lowest of equals; -1 if a logit is NaN or none is above -inf
//   ranks    [N, PARTS] uint32   as argmax.metal leaves them
//   indices  [N, PARTS] int32
//   count    [1] int32           how many rows there are, 0 to N; what belongs to those behind them stays as it is
//
//     grid (N, 1, 1), 256 threads
#include "order.h"

kernel void argmax_merge(device int *best, device const uint *ranks, device const int *indices, device const int *count,
                       uint3 group [[threadgroup_position_in_grid]], uint thread_in_group [[thread_index_in_threadgroup]]) {
  threadgroup uint group_ranks[SIMD_GROUPS];
  threadgroup int group_indices[SIMD_GROUPS];
  const int n = group.x, thread_number = thread_in_group;
  if (n >= count[0]) return;
  Ranked most = nothing();
  for (int part = thread_number; part < PARTS; part += THREADS)
    most = larger(most, ranked(ranks[n * PARTS + part], indices[n * PARTS + part]));
  most = largest_of_group(most, group_ranks, group_indices, thread_number);
  if (thread_number == 0) best[n] = most.rank == NOT_A_NUMBER || most.rank == 0u ? -1 : most.index;
}
