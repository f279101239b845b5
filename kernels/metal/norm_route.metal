// logits = rmsnorm(x) . weight^T of the router of a mixture of experts, from which choose_experts.metal chooses
//
//   logits   [T, X + SHARED_GATE] float32
//   x        [T, E] float32
//   norm     [E] float32      weights of the RMS norm; EPS inside the root; not if NORM is 0
//   weight   [X, E] float32
//   gate     [1, E] float32, if SHARED_GATE: the last logit's
//   rows     [1] int32        number of valid rows of x, 0 to T; the rows of logits from there on are not written
//
// E % 4 == 0. Products of x * norm: a lane has the fours number l, l + 32, ... of the columns and adds with fma, ascending; its sums are multiplied by
// the inverse root (norm.h) before lanes are added, in pairs 16, 8, 4, 2 and 1 apart. No rounding: another expert might be chosen. The text does not depend
// on T.
//
// A SIMD group computes the logits of EACH experts (1, 2 or 4) for four rows.
//     grid (ceil((X + SHARED_GATE) / (8 EACH)), ceil(T / 4), 1), 256 threads
#define WEIGHT F32
#define I E
#include "norm.h"

#define ROWS 4
#ifndef SHARED_GATE
#define SHARED_GATE 0
#endif
#define LOGITS (X + SHARED_GATE)
#if NORM
#define NORM_ARGUMENT device const float *norm,
#else
#define NORM_ARGUMENT
#endif
#if SHARED_GATE
#define GATE_ARGUMENT device const float *gate,
#define ROW_OF(e) ((e) >= X ? gate : weight + (ulong)(e) * E)
#else
#define GATE_ARGUMENT
#define ROW_OF(e) (weight + (ulong)min(e, X - 1) * E)
#endif

INLINE float4 four_of(device const float *row, int i) { return ((device const float4 *)row)[i]; }

[[max_total_threads_per_threadgroup(256)]] kernel void norm_route(device float *logits, device const float *x,
                                                                  NORM_ARGUMENT device const float *weight,
                                                                  GATE_ARGUMENT device const int *rows,
                                                                  uint3 group [[threadgroup_position_in_grid]],
                                                                  uint simd [[simdgroup_index_in_threadgroup]],
                                                                  uint thread_in_simd [[thread_index_in_simdgroup]]) {
  const int count = rows[0], lane = thread_in_simd, t0 = group.y * ROWS, first = (group.x * 8 + simd) * EACH;
  if (t0 >= count || first >= LOGITS) return;
  device const float *own[ROWS], *of[EACH];
  float sums[ROWS * EACH], squares[ROWS];
#pragma unroll
  for (int e = 0; e < EACH; e++) of[e] = ROW_OF(first + e);
#pragma unroll
  for (int r = 0; r < ROWS; r++) own[r] = x + (ulong)min(t0 + r, count - 1) * E, squares[r] = 0.0f;
#pragma unroll
  for (int i = 0; i < ROWS * EACH; i++) sums[i] = 0.0f;
  for (int i = lane; i < E / 4; i += LANES) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float4 four = four_of(own[r], i);
#if NORM
      squares[r] = add_four(squares[r], four, four);
      four *= four_of(norm, i);
#endif
#pragma unroll
      for (int e = 0; e < EACH; e++) sums[r * EACH + e] = add_four(sums[r * EACH + e], four_of(of[e], i), four);
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS * EACH; i++) {
    const int t = t0 + i / EACH, e = first + i % EACH;
    float sum = sums[i];
#if NORM
    sum *= inverse_root(sum_lanes(squares[i / EACH]), E, EPS);
#endif
    sum = sum_lanes(sum);
    if (lane == i && t < count && e < LOGITS) logits[(ulong)t * LOGITS + e] = sum;
  }
}
