// out = residual + the sum over a row's C experts of share * outputs, c ascending: the end of a mixture of experts
//
//   out       [T, E] float32     does not alias outputs or residual
//   outputs   [T C, E] float32   of pair t C + c
//   shares    [T, C] float32
//   residual  [T, E] float32, if RESIDUAL
//   rows      [1] int32          how many rows there are, 0 to T; further rows of out are unchanged
//
// E % 4 == 0. The first share times its output, then fma for each of the others, then + residual. A thread has four columns of a row.
//     grid (T, ceil(E / 1024), 1), 256 threads
#include "gpu.h"

static_assert(E % 4 == 0, "experts_sum: E must be a multiple of 4");

#if RESIDUAL
#define RESIDUAL_ARGUMENT device const float *residual,
#else
#define RESIDUAL_ARGUMENT
#endif

[[max_total_threads_per_threadgroup(256)]] kernel void experts_sum(device float *out, device const float *outputs,
                                                                   device const float *shares, RESIDUAL_ARGUMENT device const int *rows,
                                                                   uint3 group [[threadgroup_position_in_grid]],
                                                                   uint index [[thread_index_in_threadgroup]]) {
  const int t = group.x, column = int(group.y * 256 + index) * 4;
  if (t >= rows[0] || column >= E) return;
  device const float *own = outputs + (ulong)t * C * E + column, *share = shares + (ulong)t * C;
  float4 sum = float4(share[0]) * *(device const float4 *)own;
  for (int c = 1; c < C; c++) sum = fma(float4(share[c]), *(device const float4 *)(own + (ulong)c * E), sum);
#if RESIDUAL
  sum += *(device const float4 *)(residual + (ulong)t * E + column);
#endif
  *(device float4 *)(out + (ulong)t * E + column) = sum;
}
