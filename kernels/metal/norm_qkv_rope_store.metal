// q, k, v = rmsnorm(x) . weight^T + bias; heads of q and k normed and rotated; q is returned, k and v go to their slots of the cache;
// for up to sixteen rows
//
//   q            [T, H, D] float32
//   keys         [P, 2, K, S, D] CACHE_TYPE (F32, F16 or BF16)   the pool of blocks: keys at [:, 0], values at [:, 1]; or packed blocks
//   keys_again                                                   the same memory; not used
//   x            [T, E] float32
//   norm         [E] float32     weights of the RMS norm; EPS inside the root
//   weight_q     [H D, E], weight_k, weight_v [K D, E] as stored in a file, in a format of weights.h; those of the first MAIN heads
//   second, third  [T, .., D] float32, if MAIN < H + 2 K         products of the heads after MAIN (heads.h), computed in norm_head.metal
//   bias_q       [H D] float32, bias_k, bias_v [K D], if BIAS
//   q_norm, k_norm  [D] float32, if QK_NORM                      RMS norm of every head of q and k, with QK_EPS, before the rotation
//   angles       [T, R] float32, if R > 0                        R / 2 cosines, then R / 2 sines
//   slots        [T] int32                                       block * S + offset: where a row's k and v go; no two are equal,
//                                                                except for negative ones: those k and v are not stored
//   rows         [1] int32                                       number of valid rows of x, 0 to T = TOKENS; q's rows from there on are
//                                                                not written
//
// E is a multiple of 32 and of the format's blocks, D % 16 == 0, R even, R <= D. Accumulates in float32; order and bits as those of norm_gate_up_silu.metal, heads
// in the order of heads.h.
//
// Where a feature is rotated with the one D / 2 after it, or none is, heads have no norm, and the cache is not packed, a SIMD group computes ROWS / 2 such pairs; of
// heads after MAIN a thread takes a pair:
//     grid (ceil(MAIN * D / 2 / (ROWS / 2 * SIMDS / TEAMS)) + ceil((H + 2 K - MAIN) * D / 2 / (32 * SIMDS)), 1, 1)
// Otherwise (WHOLE_HEADS) a threadgroup computes a head, ROWS * SIMDS / TEAMS rows of weights at a time, and collects it in threadgroup
// memory (4 * TOKENS * D bytes):
//     grid (H + 2 K, 1, 1)
// 32 * SIMDS threads.
#define I E
#define NORM 1
#define GATHER 0
#include "heads.h"
#define WHOLE_HEADS (QK_NORM || (R != 0 && R != D) || PACKED_CACHE)
#if WHOLE_HEADS
#define PAIRED 0
#define Y (TOKENS * D)
#else
#define PAIRED 1
#define Y 1
#endif
#include "stream.h"

#if MAIN > H
#define K_ARGUMENT device const uchar *weight_k,
#define K_POINTER weight_k
#else
#define K_ARGUMENT
#define K_POINTER nullptr
#endif
#if MAIN > H + K
#define V_ARGUMENT device const uchar *weight_v,
#define V_POINTER weight_v
#else
#define V_ARGUMENT
#define V_POINTER nullptr
#endif
#define MAIN_PAIRS (MAIN * (D / 2))
#define MAIN_GROUPS ((MAIN_PAIRS + GROUPS * SET_ROWS - 1) / (GROUPS * SET_ROWS))

static_assert(D % 16 == 0, "norm_qkv_rope_store: D must be a multiple of 16");

struct Matrices {
  device const uchar *q, *k, *v;
};

INLINE void compute_head(Heads to, Rows rows, Matrices matrices, threadgroup float4 *tile, threadgroup float *inverses,
                         threadgroup float *y, int head, int simd, int lane);
INLINE void compute_pairs(Heads to, Rows rows, Matrices matrices, threadgroup float4 *tile, threadgroup float *inverses, int first_pair,
                          int simd, int lane);
INLINE void finish_pairs(Heads to, int count, int pair);

[[max_total_threads_per_threadgroup(32 * SIMDS)]] kernel void norm_qkv_rope_store(
    device float *q, device cache_number *keys, device cache_number *keys_again, device const float *x, device const float *norm,
    device const uchar *weight_q,
    K_ARGUMENT V_ARGUMENT SECOND_ARGUMENT THIRD_ARGUMENT BIAS_ARGUMENTS QK_NORM_ARGUMENTS ANGLES_ARGUMENT device const int *slots,
    device const int *rows, uint3 group [[threadgroup_position_in_grid]], uint simd [[simdgroup_index_in_threadgroup]],
    uint thread_in_simd [[thread_index_in_simdgroup]]) {
  threadgroup float4 tile[TILE];
  threadgroup float inverses[SQUARES];
  threadgroup float y[Y];
  Rows input;
  input.x = x, input.norm = norm, input.index = nullptr, input.count = rows[0];
  if (input.count <= 0) return;
  Heads to;
  to.q = q, to.keys = keys, to.slots = slots;
  SET_PRODUCTS(to);
  SET_BIAS(to);
  SET_NORMS(to);
  SET_ANGLES(to);
  Matrices matrices;
  matrices.q = weight_q, matrices.k = K_POINTER, matrices.v = V_POINTER;
#if WHOLE_HEADS
  compute_head(to, input, matrices, tile, inverses, y, group.x, simd, thread_in_simd);
#else
  const int index = group.x;
  if (index < MAIN_GROUPS)
    compute_pairs(to, input, matrices, tile, inverses, (index * GROUPS + simd / TEAMS) * SET_ROWS, simd, thread_in_simd);
  else finish_pairs(to, input.count, MAIN_PAIRS + ((index - MAIN_GROUPS) * SIMDS + simd) * LANES + thread_in_simd);
#endif
}

// Row `d` of a head's weights.
INLINE device const uchar *weight_row(Matrices matrices, int head, int d) {
  device const uchar *matrix = head < H ? matrices.q : head < H + K ? matrices.k : matrices.v;
  const int index = head < H ? head : (head - H) % K;
  return matrix + (ulong)(index * D + d) * ROW_BYTES;
}

#if WHOLE_HEADS
INLINE void compute_head(Heads to, Rows rows, Matrices matrices, threadgroup float4 *tile, threadgroup float *inverses,
                         threadgroup float *y, int head, int simd, int lane) {
  const int team = simd % TEAMS;
  if (head >= MAIN) {
    for (int i = simd * LANES + lane; i < rows.count * D; i += SIMDS * LANES)
      y[i] = product_at(to, i / D, head, i % D) + bias_at(to, i / D, head, i % D);
  }
  for (int d0 = 0; d0 < D && head < MAIN; d0 += GROUPS * ROWS) {
    const int first_row = d0 + simd / TEAMS * ROWS;
    Weights weights;
#pragma unroll
    for (int r = 0; r < ROWS; r++) weights.row[r] = weight_row(matrices, head, min(first_row + r, D - 1));
    Sums sums;
    multiply(sums, tile, inverses, rows, weights, team * PART, simd, lane, EPS);
    const int first = scatter_sums<COUNT>(sums.of, lane);
    const bool writes = is_writer<COUNT>(lane);
#pragma unroll
    for (int i = 0; i < RESULTS; i++) {
      const int t = (first + i) / ROWS, token = team * PART + t, d = first_row + (first + i) % ROWS;
      if (writes && t < PART && token < rows.count && d < D) y[token * D + d] = sums.of[i] + bias_at(to, token, head, d);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int token = simd; token < rows.count; token += SIMDS) finish_head(y + token * D, lane, token, head, to);
}
#else
// Features d and d + D / 2 of a head, from their products.
INLINE void finish_pair(Heads to, int token, int head, int d, float2 products) {
  float2 both = float2(products.x + bias_at(to, token, head, d), products.y + bias_at(to, token, head, d + D / 2));
  if (R > 0 && head < H + K) both = rotated(both.x, both.y, to.angles[token * R + d], to.angles[token * R + d + R / 2]);
  write_feature(to, token, head, d, both.x);
  write_feature(to, token, head, d + D / 2, both.y);
}

INLINE void finish_pairs(Heads to, int count, int pair) {
  if (pair >= HEADS * (D / 2)) return;
  const int head = pair / (D / 2), d = pair % (D / 2);
  for (int token = 0; token < count; token++)
    finish_pair(to, token, head, d, float2(product_at(to, token, head, d), product_at(to, token, head, d + D / 2)));
}

INLINE void compute_pairs(Heads to, Rows rows, Matrices matrices, threadgroup float4 *tile, threadgroup float *inverses, int first_pair,
                          int simd, int lane) {
  const int team = simd % TEAMS;
  Weights weights;
#pragma unroll
  for (int r = 0; r < SET_ROWS; r++) {
    const int pair = min(first_pair + r, MAIN_PAIRS - 1), head = pair / (D / 2), d = pair % (D / 2);
    weights.row[r] = weight_row(matrices, head, d), weights.row[SET_ROWS + r] = weight_row(matrices, head, d + D / 2);
  }
  Sums sums;
  multiply(sums, tile, inverses, rows, weights, team * PART, simd, lane, EPS);
  const int first = scatter_sums<COUNT>(sums.of, lane);
  scatter_sums<COUNT>(sums.of + COUNT, lane);
  if (!is_writer<COUNT>(lane)) return;
#pragma unroll
  for (int i = 0; i < RESULTS; i++) {
    const int t = (first + i) / SET_ROWS, token = team * PART + t, pair = first_pair + (first + i) % SET_ROWS;
    if (t >= PART || token >= rows.count || pair >= MAIN_PAIRS) continue;
    finish_pair(to, token, pair / (D / 2), pair % (D / 2), float2(sums.of[i], sums.of[COUNT + i]));
  }
}
#endif
