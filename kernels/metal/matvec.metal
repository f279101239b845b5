// out = activation(x . weight^T + bias) + residual, for up to sixteen rows
//
//   out       [T, O] float32   does not alias x or residual
//   x         [T, I] float32
//   weight    [O, I] as in a file, WEIGHT = F32, F16, BF16, Q8_0, Q4_0 or Q4_K (product.h)
//   bias      [O] float32, if BIAS
//   residual  [T, O] float32, if RESIDUAL
//   rows      [1] int32        how many rows of x there are, 0 to T = TOKENS; the rows of out behind them stay as they are
//
// ACTIVATION: NO_ACTIVATION or GELU, the tanh form. I % 32 == 0 (Q4_K: 256), any O. A row's bits are the same whatever TOKENS is, and
// wherever it stands; sums in the order of product.h, then + bias, activation, + residual, each one float32 operation.
//
// A SIMD group makes ROWS outputs of PART tokens (stream.h). Threadgroup memory only if STAGED: TILE * 16 bytes.
//     grid (ceil(O / (ROWS * SIMDS / TEAMS)), 1, 1), 32 * SIMDS threads
// With one token x is read into registers and shared by ROWS rows, as in the matrix-vector products of llama.cpp and MLX.
#define NORM 0
#define GATHER 0
#define PAIRED 0
#include "stream.h"

#if BIAS
#define BIAS_ARGUMENT device const float *bias,
#define BIASED(y, o) ((y) + bias[o])
#else
#define BIAS_ARGUMENT
#define BIASED(y, o) (y)
#endif
#if RESIDUAL
#define RESIDUAL_ARGUMENT device const float *residual,
#define ADDED(y, at) ((y) + residual[at])
#else
#define RESIDUAL_ARGUMENT
#define ADDED(y, at) (y)
#endif

[[max_total_threads_per_threadgroup(32 * SIMDS)]] kernel void matvec(
    device float *out, device const float *x, device const uchar *weight, BIAS_ARGUMENT RESIDUAL_ARGUMENT device const int *rows,
    uint3 group [[threadgroup_position_in_grid]], uint simd [[simdgroup_index_in_threadgroup]],
    uint thread_in_simd [[thread_index_in_simdgroup]]) {
  threadgroup float4 tile[TILE];
  threadgroup float inverses[SQUARES];
  const int count = rows[0], lane = thread_in_simd, team = simd % TEAMS, o0 = (group.x * GROUPS + simd / TEAMS) * ROWS;
  if (count <= 0) return;
  Rows all;
  all.x = x, all.norm = nullptr, all.index = nullptr, all.count = count;
  Weights weights;
#pragma unroll
  for (int r = 0; r < ROWS; r++) weights.row[r] = weight + (ulong)min(o0 + r, O - 1) * ROW_BYTES;
  Sums sums;
  multiply(sums, tile, inverses, all, weights, team * PART, simd, lane, 0.0f);
  const int first = spread<COUNT>(sums.of, lane);
  if (!speaks<COUNT>(lane)) return;
#pragma unroll
  for (int i = 0; i < RESULTS; i++) {
    const int t = (first + i) / ROWS, token = team * PART + t, o = o0 + (first + i) % ROWS;
    if (t >= PART || token >= count || o >= O) continue;
    const ulong at = (ulong)token * O + o;
    float y = BIASED(sums.of[i], o);
    if (ACTIVATION == GELU) y = gelu(y);
    out[at] = ADDED(y, at);
  }
}
