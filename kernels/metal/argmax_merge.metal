// best = the index of the largest logit of every row, from the results of its parts
//
//   best     [N] int32           the lowest of equal ones; -1 if a logit is NaN or none is above -inf
//   orders   [N, PARTS] uint32   as argmax.metal writes them
//   indices  [N, PARTS] int32
//   count    [1] int32           number of valid rows, 0 to N; the results of rows from there on are not written
//
// Exact. A threadgroup takes a row.
//     grid (N, 1, 1), 256 threads
#include "threadgroup_argmax.h"

[[max_total_threads_per_threadgroup(256)]] kernel void argmax_merge(device int *best, device const uint *orders, device const int *indices,
                                                                    device const int *count, uint3 group [[threadgroup_position_in_grid]],
                                                                    uint index [[thread_index_in_threadgroup]]) {
  threadgroup uint group_orders[SIMD_GROUPS], group_tokens[SIMD_GROUPS];
  const int n = group.x, thread_index = index;
  if (n >= count[0]) return;
  Candidate row_best = no_candidate();
  for (int part = thread_index; part < PARTS; part += THREADS)
    row_best = better(row_best, make_candidate(orders[n * PARTS + part], indices[n * PARTS + part]));
  row_best = best_of_threadgroup(row_best, group_orders, group_tokens, thread_index);
  if (thread_index == 0) best[n] = token_of(row_best);
}
