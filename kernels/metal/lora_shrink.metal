// hidden = A . norm(x), A that of the row's adapter: the first half of what low-rank adapters add to a product (lora_bias.metal has the
// second)
//
//   hidden    [T, PARTS R] float32     of a row and projection as many numbers as its adapter has ranks; the others are not written
//   x         [T, E] float32
//   norm      [E] float32, if NORM     weights of the RMS norm; EPS inside the root
//   a         [N, PARTS, R, E] float32 of each adapter and projection
//   ranks     [N] int32                of each adapter in this product, up to R; 0 if it does not change it
//   adapters  [T] int32                n for adapter n - 1, 0 for none
//   rows      [1] int32                number of valid rows of x, 0 to T
//
// E % 32 == 0. float32, a row's sums in one order whatever the other rows are: products of x * norm, a lane has the fours number l, l + 32, ...
// of the columns and adds with fma, ascending; its sums are added in pairs 16, 8, 4, 2 and 1 apart, then multiplied by the inverse root
// (norm.h). ROWS is the host's choice.
//
// A SIMD group has one rank of ROWS rows; it reads it once for neighbours with one adapter, as the rows of a prompt are.
//     grid (ceil(T / ROWS), ceil(PARTS R / 8), 1), 256 threads
// LoRA (Hu et al., 2021, arXiv:2106.09685); many adapters in one batch as in Punica (Chen et al., 2023, arXiv:2310.18547).
#define WEIGHT F32
#define I E
#include "adapters.h"
#include "norm.h"

#define HIDDEN (PARTS * R)

#if NORM
#define NORM_ARGUMENT device const float *norm,
#define NORM_POINTER norm
#else
#define NORM_ARGUMENT
#define NORM_POINTER nullptr
#endif

INLINE void multiply(device float *hidden, device const float *x, device const float *norm, device const float *a, Run run, int lane);

[[max_total_threads_per_threadgroup(256)]] kernel void lora_shrink(device float *hidden, device const float *x,
                                                                   NORM_ARGUMENT device const float *a, device const int *ranks,
                                                                   device const int *adapters, device const int *rows,
                                                                   uint3 group [[threadgroup_position_in_grid]],
                                                                   uint simd [[simdgroup_index_in_threadgroup]],
                                                                   uint thread_in_simd [[thread_index_in_simdgroup]]) {
  const int first = group.x * ROWS, count = min(rows[0] - first, ROWS), number = group.y * 8 + simd;  // of a row's HIDDEN
  if (count <= 0 || number >= HIDDEN) return;
  for (int row = 0; row < count;) {
    const Run run = run_at(adapters + first, ranks, row, count);
    row = run.end;
    if (number % R >= run.rank) continue;
    device const float *own = a + ((ulong)run.adapter * HIDDEN + number) * E;
    multiply(hidden + (ulong)first * HIDDEN + number, x + (ulong)first * E, NORM_POINTER, own, run, thread_in_simd);
  }
}

INLINE float4 four_of(device const float *row, int i) { return ((device const float4 *)row)[i]; }

// A row of A, `a` [E], times the run's rows; `hidden` and `x` are those of the unit's first row.
INLINE void multiply(device float *hidden, device const float *x, device const float *norm, device const float *a, Run run, int lane) {
  float sums[ROWS], squares[ROWS];
#pragma unroll
  for (int j = 0; j < ROWS; j++) sums[j] = squares[j] = 0.0f;
  for (int i = lane; i < E / 4; i += LANES) {
    const float4 w = four_of(a, i);
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
      if (!contains(run, j)) continue;
      float4 four = four_of(x + (ulong)j * E, i);
#if NORM
      squares[j] = add_four(squares[j], four, four);
      four *= four_of(norm, i);
#endif
      sums[j] = add_four(sums[j], w, four);
    }
  }
#pragma unroll
  for (int j = 0; j < ROWS; j++) {
    if (!contains(run, j)) continue;
    float sum = sum_lanes(sums[j]);
#if NORM
    sum *= inverse_root(sum_lanes(squares[j]), E, EPS);
#endif
    if (lane == 0) hidden[(ulong)j * HIDDEN] = sum;
  }
}
