// out = bias + B . hidden, B that of the row's adapter: the bias that low-rank adapters make of a product's input, from its ranks
//
//   out       [T, O] float32         a bias of each row; of a row without adapter `bias`, or -0 without BIAS: y + -0 has the bits of y
//   hidden    [T, PARTS R] float32   A . norm(x) of each projection (lora_shrink.metal)
//   b         [N, R, O] float32      of each adapter, with its scale in it
//   ranks     [N] int32              of each adapter in this product, up to R; 0 if it does not change it
//   bias      [O] float32, if BIAS
//   adapters  [T] int32              n for adapter n - 1, 0 for none
//   rows      [1] int32              number of valid rows of x, 0 to T; the rows of out from there on are not written
//
// O % 16 == 0. The outputs of the second of the PARTS projections begin at SECOND, of the third at THIRD, of the fourth at FOURTH, multiples
// of 16. float32, a row's sums in one order whatever the other rows are: over ranks ascending with fma, then + bias. ROWS is the host's choice.
//
// A thread has four outputs of ROWS rows; it reads B once for neighbours with one adapter.
//     grid (ceil(T / ROWS), ceil(O / 512), 1), 128 threads
#include "adapters.h"

#define HIDDEN (PARTS * R)
static_assert(O % 16 == 0, "lora_bias: O must be a multiple of 16");

#ifndef SECOND
#define SECOND O
#endif
#ifndef THIRD
#define THIRD O
#endif
#ifndef FOURTH
#define FOURTH O
#endif
#if BIAS
#define BIAS_ARGUMENT device const float *bias,
#define BIAS_AT(o) (*(device const float4 *)(bias + (o)))
#else
#define BIAS_ARGUMENT
#define BIAS_AT(o) float4(-0.0f)
#endif

struct Sums {
  float4 of[ROWS];
};
INLINE Sums multiply(device const float *b, device const float *hidden, Run run);

[[max_total_threads_per_threadgroup(128)]] kernel void lora_bias(device float *out, device const float *hidden, device const float *b,
                                                                 device const int *ranks, BIAS_ARGUMENT device const int *adapters,
                                                                 device const int *rows, uint3 group [[threadgroup_position_in_grid]],
                                                                 uint index [[thread_index_in_threadgroup]]) {
  const int first = group.x * ROWS, count = min(rows[0] - first, ROWS), o = int(group.y * 128 + index) * 4;
  if (count <= 0 || o >= O) return;
  const float4 start = BIAS_AT(o);
  device const float *own = hidden + (ulong)first * HIDDEN + ((o >= SECOND) + (o >= THIRD) + (o >= FOURTH)) * R;
  for (int row = 0; row < count;) {
    const Run run = run_at(adapters + first, ranks, row, count);
    row = run.end;
    const Sums sums = multiply(b + (ulong)max(run.adapter, 0) * R * O + o, own, run);
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
      if (!contains(run, j)) continue;
      *(device float4 *)(out + (ulong)(first + j) * O + o) = run.rank > 0 ? sums.of[j] + start : start;
    }
  }
}

// Four columns of B times the ranks of the run's rows.
INLINE Sums multiply(device const float *b, device const float *hidden, Run run) {
  Sums sums;
#pragma unroll
  for (int j = 0; j < ROWS; j++) sums.of[j] = float4(0.0f);
  for (int r = 0; r < run.rank; r++) {
    const float4 w = *(device const float4 *)(b + (ulong)r * O);
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
      if (contains(run, j)) sums.of[j] = fma(float4(hidden[(ulong)j * HIDDEN + r]), w, sums.of[j]);
    }
  }
  return sums;
}
