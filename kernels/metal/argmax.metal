// orders, indices = the largest logit of every part of a row, as an integer that compares as it does, and its index
//
//   orders   [N, PARTS] uint32   order.h: NAN_ORDER if a logit is NaN; MIN_ORDER for -inf
//   indices  [N, PARTS] int32    the lowest of equal ones
//   logits   [N, V] float32
//   count    [1] int32           number of valid rows, 0 to N; the results of rows from there on are not written
//
// Any V, at least PARTS. Exact. argmax_merge.metal reduces them to one index a row: in a second launch, because Metal 3 promises no order
// between the threadgroups of one launch.
//     grid (PARTS, N, 1), 256 threads; PARTS so that a part is some thousand logits
#include "threadgroup_argmax.h"

#define PART_SIZE ((V + PARTS - 1) / PARTS)

[[max_total_threads_per_threadgroup(256)]] kernel void argmax(device uint *orders, device int *indices, device const float *logits,
                                                              device const int *count, uint3 group [[threadgroup_position_in_grid]],
                                                              uint index [[thread_index_in_threadgroup]]) {
  threadgroup uint group_orders[SIMD_GROUPS], group_tokens[SIMD_GROUPS];
  const int part = group.x, n = group.y, thread_index = index, end = min((part + 1) * PART_SIZE, V);
  if (n >= count[0]) return;
  device const float *row = logits + (ulong)n * V;
  Candidate best = no_candidate();
  for (int v = part * PART_SIZE + thread_index; v < end; v += THREADS) best = better(best, make_candidate(order_or_nan(row[v]), v));
  best = best_of_threadgroup(best, group_orders, group_tokens, thread_index);
  if (thread_index == 0) orders[n * PARTS + part] = best.order, indices[n * PARTS + part] = best.token;
}
