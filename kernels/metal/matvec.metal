// out = activation(x . weight^T + bias) + residual, for up to sixteen rows
//
//   out       [T, O] float32   does not alias x or residual
//   x         [T, I] float32
//   weight    [O, I] as stored in a file, in a format of weights.h
//   bias      [O] float32, if BIAS; with BIAS_PITCH = O [T, O], a row's own (lora_bias.metal)
//   residual  [T, O] float32, if RESIDUAL
//   rows      [1] int32        number of valid rows of x, 0 to T = TOKENS; the rows of out from there on are not written
//
// If EXPERTS is defined, weight and bias are those of all experts, x is that of pairs, and task.h says which rows there are; no residual.
//
// ACTIVATION: NO_ACTIVATION or GELU, the tanh form. I is a multiple of 32 and of the format's blocks, any O. Accumulates in float32. A row's bits do not depend on
// TOKENS or on the row's position: sums in the order of product.h, then + bias, activation, + residual, each one float32 operation.
//
// A SIMD group computes ROWS outputs of PART tokens (stream.h). Threadgroup memory only if STAGED: TILE * 16 bytes.
//     grid (ceil(O / (ROWS * SIMDS / TEAMS)), 1 or tasks at most, 1), 32 * SIMDS threads
// With one token x is read into registers and shared by ROWS rows, as in the matrix-vector products of llama.cpp and MLX.
#define NORM 0
#ifdef EXPERTS
#define GATHER 1
#else
#define GATHER 0
#endif
#define PAIRED 0
#include "stream.h"
#include "task.h"

#if BIAS
#define BIAS_ARGUMENT device const float *bias,
#define WITH_BIAS(y, at) ((y) + bias[at])
#else
#define BIAS_ARGUMENT
#define WITH_BIAS(y, at) (y)
#endif
#if RESIDUAL
#define RESIDUAL_ARGUMENT device const float *residual,
#define WITH_RESIDUAL(y, at) ((y) + residual[at])
#else
#define RESIDUAL_ARGUMENT
#define WITH_RESIDUAL(y, at) (y)
#endif

[[max_total_threads_per_threadgroup(32 * SIMDS)]] kernel void matvec(device float *out, device const float *x, device const uchar *weight,
                                                                     BIAS_ARGUMENT RESIDUAL_ARGUMENT ROWS_ARGUMENTS uint3 group
                                                                     [[threadgroup_position_in_grid]],
                                                                     uint simd [[simdgroup_index_in_threadgroup]],
                                                                     uint thread_in_simd [[thread_index_in_simdgroup]]) {
  threadgroup float4 tile[TILE];
  threadgroup float inverses[SQUARES];
  const Task task = TASK;
  const int count = task.count, lane = thread_in_simd, team = simd % TEAMS, o0 = (group.x * GROUPS + simd / TEAMS) * ROWS;
  if (count <= 0) return;
  Rows input;
  input.x = x, input.norm = nullptr, input.index = task.places, input.count = count;
  Weights weights;
#pragma unroll
  for (int r = 0; r < ROWS; r++) weights.row[r] = weight + ((ulong)task.expert * O + min(o0 + r, O - 1)) * ROW_BYTES;
  Sums sums;
  multiply(sums, tile, inverses, input, weights, team * PART, simd, lane, 0.0f);
  const int first = scatter_sums<COUNT>(sums.of, lane);
  if (!is_writer<COUNT>(lane)) return;
#pragma unroll
  for (int i = 0; i < RESULTS; i++) {
    const int t = (first + i) / ROWS, token = team * PART + t, o = o0 + (first + i) % ROWS;
    if (t >= PART || token >= count || o >= O) continue;
    const ulong at = (ulong)row_of_out(task, token) * O + o;
    float y = WITH_BIAS(sums.of[i], (ulong)token * BIAS_PITCH + task.expert * O + o);
    if (ACTIVATION == GELU) y = gelu(y);
    out[at] = WITH_RESIDUAL(y, at);
  }
}
