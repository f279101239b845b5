// q, k, v = y + bias; heads of q and k normed and rotated; q is returned, k and v go to their slots of the cache
//
//   q            [T, H, D] float32
//   keys         [P, 2, K, S, D] CACHE_TYPE (F32, F16 or BF16)   the pool of blocks: keys at [:, 0], values at [:, 1]; or packed blocks
//   keys_again                                                   the same memory; not used
//   y            [T, MAIN D] float32                             a product's outputs: the heads of q, those of k, those of v
//   second, third  [T, .., D] float32, if MAIN < H + 2 K         products of the heads after MAIN (heads.h)
//   bias_q       [H D] float32, bias_k, bias_v [K D], if BIAS
//   q_norm, k_norm  [D] float32, if QK_NORM                      RMS norm of every head of q and k, with QK_EPS, before the rotation
//   angles       [T, R] float32, if R > 0                        R / 2 cosines, then R / 2 sines
//   slots        [T] int32                                       block * S + offset: where a row's k and v go; no two are equal,
//                                                                except for negative ones: those k and v are not stored
//   rows         [1] int32                                       number of valid rows of y, 0 to T; q's rows from there on are not written
//
// R even, R <= D; any D up to 1024. float32, heads in the order of heads.h. A SIMD group computes one head of a row.
//     grid (T, ceil((H + 2 K) / 8), 1), 256 threads
#include "heads.h"

#define SIMD_GROUPS 8

[[max_total_threads_per_threadgroup(256)]] kernel void rope_store(
    device float *q, device cache_number *keys, device cache_number *keys_again, device const float *y,
    SECOND_ARGUMENT THIRD_ARGUMENT BIAS_ARGUMENTS QK_NORM_ARGUMENTS ANGLES_ARGUMENT device const int *slots, device const int *rows,
    uint3 group [[threadgroup_position_in_grid]], uint simd [[simdgroup_index_in_threadgroup]],
    uint thread_in_simd [[thread_index_in_simdgroup]]) {
  threadgroup float heads[SIMD_GROUPS * D];
  const int row = group.x, lane = thread_in_simd, head = group.y * SIMD_GROUPS + simd;
  if (row >= rows[0] || head >= HEADS) return;
  Heads to;
  to.q = q, to.keys = keys, to.slots = slots;
  SET_PRODUCTS(to);
  SET_BIAS(to);
  SET_NORMS(to);
  SET_ANGLES(to);
  threadgroup float *own = heads + simd * D;
  for (int d = lane; d < D; d += 32)
    own[d] = (head < MAIN ? y[((ulong)row * MAIN + head) * D + d] : product_at(to, row, head, d)) + bias_at(to, row, head, d);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  finish_head(own, lane, row, head, to);
}
