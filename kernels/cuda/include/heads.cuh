// What follows the product for the heads of q, k and v: bias, norm of a head, rotation, and the store. One order of arithmetic for all
// kernels.
//
// Constants from outside, as in norm_qkv_rope_store.cu: H query heads, K key heads, D features, R rotated ones (even, 0 to D), S slots a
// block, CACHE_TYPE, QK_NORM and QK_EPS. Heads are numbered 0 .. H-1 of q, H .. H+K-1 of k, H+K .. H+2K-1 of v.
// Feature i < R / 2 is rotated with feature i + R / 2; features from R on are not rotated. v is neither normed nor rotated.
#pragma once
#include "formats.cuh"
#include "packed_store.cuh"
#include "params.h"

#ifndef MAIN  // heads of the first matrix; the others' weights have another format, and their products are computed before
#define MAIN (H + 2 * K)
#endif
#ifndef SECOND  // heads of the second matrix; those of the third are the rest
#define SECOND 0
#endif
#if MAIN < H + 2 * K
#define SECOND_ARGUMENT const float *second,
#else
#define SECOND_ARGUMENT
#endif
#if MAIN + SECOND < H + 2 * K && MAIN < H + 2 * K
#define THIRD_ARGUMENT const float *third,
#else
#define THIRD_ARGUMENT
#endif

#if PACKED_CACHE
typedef u8 cache_number;
#else
typedef Stored<CACHE_TYPE>::number cache_number;
#endif

// Products of the heads from MAIN on: second [T, SECOND, D], third [T, H + 2 K - MAIN - SECOND, D].
struct OtherHeads {
  const float *second, *third;
};
DEVICE const float *product_of(const OtherHeads &others, int row, int head) {
  const bool in_second = head < MAIN + SECOND;
  const int heads = in_second ? SECOND : H + 2 * K - MAIN - SECOND, first = in_second ? MAIN : MAIN + SECOND;
  return (in_second ? others.second : others.third) + ((s64)row * heads + head - first) * D;
}

// Offset of feature 0 of head `head` (of k or v) of a row with this slot; pool [P, 2, K, S, D], keys first, then values.
DEVICE s64 cache_offset(int slot, int head) {
  const int which = head >= H + K, k = (head - H) % K;
  return (((s64)(slot / S) * 2 + which) * K + k) * (s64)S * D + (s64)(slot % S) * D;
}

// Stores the final value of feature d of a head: in q [T, H, D] float32, or in the pool, unless the slot is negative.
DEVICE void put_feature(float *q, cache_number *keys, int row, int slot, int head, int d, float value) {
  if (head < H) q[((s64)row * H + head) * D + d] = value;
#if !PACKED_CACHE
  else if (slot >= 0) keys[cache_offset(slot, head) + d] = Stored<CACHE_TYPE>::of(value);
#endif
}

DEVICE float2 rotated(float a, float b, float cosine, float sine) { return make_float2(a * cosine - b * sine, b * cosine + a * sine); }

// 1 / sqrt(mean of the squares + eps) of y [D]: lane j sums features j, j + 32, ... ascending, then a butterfly (16, 8, 4, 2, 1).
DEVICE float head_inverse(const float *y, int lane, float eps) {
  float sum = 0.0f;
  for (int d = lane; d < D; d += 32) sum = fmaf(y[d], y[d], sum);
#pragma unroll
  for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
  return 1.0f / sqrtf(sum / (float)D + eps);
}

// Stores the final value of a feature, or keeps it in y [D] until the whole row is there to be packed.
DEVICE void put_final(float *y, float *q, cache_number *keys, int row, int slot, int head, int d, float value) {
#if PACKED_CACHE
  y[d] = value;
#else
  put_feature(q, keys, row, slot, head, d, value);
#endif
}

// By a whole warp: norms, rotates and stores y [D] in shared memory, one head of a row with its bias already added. What the lanes wrote to
// y must be visible to all of them (__syncwarp or __syncthreads); y is changed for a packed cache. `norm` [D] is the head's (q_norm or k_norm) and is read
// if QK_NORM; `angles` [R] are the row's and are read if R > 0.
DEVICE void finish_head(float *y, int lane, int row, int slot, int head, float *q, cache_number *keys, const float *norm,
                        const float *angles) {
  const bool q_or_k = head < H + K;
  float inverse = 1.0f;
#if QK_NORM
  if (q_or_k) inverse = head_inverse(y, lane, QK_EPS);
#endif
  const int pairs = q_or_k ? R / 2 : 0;
  for (int d = lane; d < pairs; d += 32) {
    const int e = d + R / 2;
    float a = y[d], b = y[e];
#if QK_NORM
    a = a * inverse * norm[d];
    b = b * inverse * norm[e];
#endif
    const float2 pair = rotated(a, b, angles[d], angles[e]);
    put_final(y, q, keys, row, slot, head, d, pair.x);
    put_final(y, q, keys, row, slot, head, e, pair.y);
  }
  for (int d = 2 * pairs + lane; d < D; d += 32) {
    float a = y[d];
#if QK_NORM
    if (q_or_k) a = a * inverse * norm[d];
#endif
    put_final(y, q, keys, row, slot, head, d, a);
  }
#if PACKED_CACHE
  __syncwarp();
  if (head >= H) {
    store_packed_row(keys, slot, head >= H + K, (head - H) % K, y, lane);
  } else {
    if (ROTATED_KEYS) hadamard(y, lane);
    for (int d = lane; d < D; d += 32) put_feature(q, keys, row, slot, head, d, y[d]);
  }
#endif
}
