// out = silu(gate) * up, where gate = rmsnorm(x) . weight_gate^T + bias_gate, and up likewise: the first half of a gated feed-forward
// layer, for up to sixteen rows
//
//   out          [T, F] float32   does not alias x
//   x            [T, E] float32
//   norm         [E] float32      weights of the RMS norm; EPS inside the root
//   weight_gate, weight_up  [F, E] each, as stored in a file, in a format of weights.h
//   bias_gate, bias_up      [F] float32 each, if BIAS; with BIAS_PITCH = 2 F both are one [T, 2 F], a row's own (lora_bias.metal)
//
// HALF: BOTH. Or GATE, which writes gate to out, and then UP, which reads gate there: for matrices in two formats. They take weight_gate and
// bias_gate only, or weight_up and bias_up; their bits are those of BOTH.
//
//   rows         [1] int32        number of valid rows of x, 0 to T = TOKENS; the rows of out from there on are not written
//
// If EXPERTS is defined, weights and biases are those of all experts, out is that of pairs, SHARE of which have one row of x, and task.h says
// which there are; the gate may be another (product.h).
//
// E is a multiple of 32 and of the format's blocks, any F. Accumulates in float32. A row's bits do not depend on TOKENS or on the row's position: products of
// x * norm in the order of product.h, a lane's sums times the inverse root (norm.h) before lanes are added, + bias.
// silu(a) = a / (1 + e^-a).
//
// A SIMD group computes ROWS / 2 outputs of PART tokens (stream.h), and the norm from the x that it reads for them.
//     grid (ceil(F / (ROWS / 2 * SIMDS / TEAMS)), 1 or tasks at most, 1), 32 * SIMDS threads
#define BOTH 0
#define GATE 1
#define UP 2
#define I E
#define NORM 1
#ifdef EXPERTS
#define GATHER 1
#else
#define GATHER 0
#endif
#define PAIRED (HALF == BOTH)
#include "stream.h"
#include "task.h"

#if HALF == BOTH
#define WEIGHT_ARGUMENTS device const uchar *weight, device const uchar *weight_up,
#else
#define WEIGHT_ARGUMENTS device const uchar *weight,
#endif
#if BIAS && HALF == BOTH
#define BIAS_ARGUMENTS device const float *bias, device const float *bias_up,
#elif BIAS
#define BIAS_ARGUMENTS device const float *bias,
#else
#define BIAS_ARGUMENTS
#endif
#define UP_FIRST (BIAS_PITCH ? F : 0)  // of up's biases

[[max_total_threads_per_threadgroup(32 * SIMDS)]] kernel void norm_gate_up_silu(device float *out, device const float *x,
                                                                                device const float *norm,
                                                                                WEIGHT_ARGUMENTS BIAS_ARGUMENTS ROWS_ARGUMENTS uint3 group
                                                                                [[threadgroup_position_in_grid]],
                                                                                uint simd [[simdgroup_index_in_threadgroup]],
                                                                                uint thread_in_simd [[thread_index_in_simdgroup]]) {
  threadgroup float4 tile[TILE];
  threadgroup float inverses[SQUARES];
  const Task task = TASK;
  const int count = task.count, lane = thread_in_simd, team = simd % TEAMS, f0 = (group.x * GROUPS + simd / TEAMS) * SET_ROWS;
  if (count <= 0) return;
  Rows input;
  input.x = x, input.norm = norm, input.index = task.places, input.count = count;
  Weights weights;
#pragma unroll
  for (int r = 0; r < SET_ROWS; r++) {
    const ulong row = ((ulong)task.expert * F + min(f0 + r, F - 1)) * ROW_BYTES;
    weights.row[r] = weight + row;
#if HALF == BOTH
    weights.row[SET_ROWS + r] = weight_up + row;
#endif
  }
  Sums sums;
  multiply(sums, tile, inverses, input, weights, team * PART, simd, lane, EPS);
  const int first = scatter_sums<COUNT>(sums.of, lane);
#if HALF == BOTH
  scatter_sums<COUNT>(sums.of + COUNT, lane);
#endif
  if (!is_writer<COUNT>(lane)) return;
#pragma unroll
  for (int i = 0; i < RESULTS; i++) {
    const int t = (first + i) / SET_ROWS, token = team * PART + t, f = f0 + (first + i) % SET_ROWS;
    if (t >= PART || token >= count || f >= F) continue;
    device float *to = out + (ulong)row_of_out(task, token) * F + f;
    float y = sums.of[i];
#if BIAS
    const ulong own = (ulong)token * BIAS_PITCH + task.expert * F + f;
    y += bias[HALF == UP ? own + UP_FIRST : own];
#endif
#if HALF == BOTH
    float up = sums.of[COUNT + i];
#if BIAS
    up += bias_up[own + UP_FIRST];
#endif
    *to = gated(y, up);
#else
    *to = HALF == GATE ? y : gated(*to, y);
#endif
  }
}
