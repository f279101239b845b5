// logits = rmsnorm(x[row_index]) . weight^T, for up to sixteen rows; argmax.metal then finds the largest. Also, without row_index, products of
// norm_qkv_rope_store.metal's heads whose weights have another format
//
//   logits     [N, V] float32
//   x          [any, E] float32
//   norm       [E] float32       weights of the RMS norm; EPS inside the root
//   weight     [V, E] as stored in a file, in a format of weights.h
//   row_index  [N] int32, if GATHER: the row of x that row n of logits is computed from; otherwise row n
//   count      [1] int32         number of valid rows, 0 to N = TOKENS; the rows of logits from there on are not written
//
// E is a multiple of 32 and of the format's blocks, any V. Accumulates in float32; order and bits as those of norm_gate_up_silu.metal.
//
// A SIMD group computes ROWS logits of PART tokens (stream.h).
//     grid (ceil(V / (ROWS * SIMDS / TEAMS)), 1, 1), 32 * SIMDS threads
#define I E
#define NORM 1
#define PAIRED 0
#include "stream.h"

#if GATHER
#define INDEX_ARGUMENT device const int *row_index,
#define INDEX_POINTER row_index
#else
#define INDEX_ARGUMENT
#define INDEX_POINTER nullptr
#endif

[[max_total_threads_per_threadgroup(32 * SIMDS)]] kernel void norm_head(device float *logits, device const float *x,
                                                                        device const float *norm, device const uchar *weight,
                                                                        INDEX_ARGUMENT device const int *count,
                                                                        uint3 group [[threadgroup_position_in_grid]],
                                                                        uint simd [[simdgroup_index_in_threadgroup]],
                                                                        uint thread_in_simd [[thread_index_in_simdgroup]]) {
  threadgroup float4 tile[TILE];
  threadgroup float inverses[SQUARES];
  const int lane = thread_in_simd, team = simd % TEAMS, v0 = (group.x * GROUPS + simd / TEAMS) * ROWS;
  Rows input;
  input.x = x, input.norm = norm, input.index = INDEX_POINTER, input.count = count[0];
  if (input.count <= 0) return;
  Weights weights;
#pragma unroll
  for (int r = 0; r < ROWS; r++) weights.row[r] = weight + (ulong)min(v0 + r, V - 1) * ROW_BYTES;
  Sums sums;
  multiply(sums, tile, inverses, input, weights, team * PART, simd, lane, EPS);
  const int first = scatter_sums<COUNT>(sums.of, lane);
  if (!is_writer<COUNT>(lane)) return;
#pragma unroll
  for (int i = 0; i < RESULTS; i++) {
    const int t = (first + i) / ROWS, token = team * PART + t, v = v0 + (first + i) % ROWS;
    if (t < PART && token < input.count && v < V) logits[(ulong)token * V + v] = sums.of[i];
  }
}
