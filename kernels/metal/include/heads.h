// Heads of q, k and v after their product: bias, norm of a head, rotation, destination. One order of arithmetic for all kernels.
//
// Constants from outside, as in norm_qkv_rope_store.metal: H query heads, K key heads, D features, R rotated ones (even, 0 to D), S slots a
// block, CACHE_TYPE (F32, F16, BF16, or packed), BIAS, QK_NORM and QK_EPS. Heads are numbered 0 .. H-1 of q, H .. H+K-1 of k, H+K .. H+2K-1 of v.
// Feature i < R / 2 is rotated with feature i + R / 2; those from R on are not rotated. v is neither normed nor rotated.
//
// MAIN heads, all of them or those of q, or of q and k, are of one product. Where k or v has weights in another format, the SECOND heads after
// them, and then the rest, come from products of launches of their own: `second` [T, SECOND, D], `third` [T, H + 2 K - MAIN - SECOND, D].
//
// With BIAS_PITCH the three biases are one array [T, (H + 2 K) D], a row's own (lora_bias.metal).
//
// A packed cache (packed_store.h) takes whole heads, and with rotated keys queries are rotated, too.
#pragma once
#include "packed_store.h"
#include "params.h"

static_assert(R % 2 == 0 && R <= D, "heads: R must be even and at most D");
#define HEADS (H + 2 * K)
static_assert(MAIN == H || MAIN == H + K || MAIN == HEADS, "heads: MAIN must end with q, k or v");

#if MAIN < H + 2 * K
#define SECOND_ARGUMENT device const float *second,
#define SECOND_POINTER second
#else
#define SECOND_ARGUMENT
#define SECOND_POINTER nullptr
#endif
#if MAIN + SECOND < H + 2 * K
#define THIRD_ARGUMENT device const float *third,
#define THIRD_POINTER third
#else
#define THIRD_ARGUMENT
#define THIRD_POINTER nullptr
#endif
#define SET_PRODUCTS(to) to.second = SECOND_POINTER, to.third = THIRD_POINTER

#if BIAS
#define BIAS_ARGUMENTS device const float *bias_q, device const float *bias_k, device const float *bias_v,
#else
#define BIAS_ARGUMENTS
#endif
#if QK_NORM
#define QK_NORM_ARGUMENTS device const float *q_norm, device const float *k_norm,
#else
#define QK_NORM_ARGUMENTS
#endif
#if R > 0
#define ANGLES_ARGUMENT device const float *angles,
#else
#define ANGLES_ARGUMENT
#endif

// Where heads go, what is applied to them, and the products of those after MAIN.
struct Heads {
  device float *q;
  device cache_number *keys;
  device const float *second, *third;
  device const float *bias_q, *bias_k, *bias_v, *q_norm, *k_norm, *angles;
  device const int *slots;
};
// Sets its members from those arguments that the kernel has.
#if BIAS
#define SET_BIAS(to) to.bias_q = bias_q, to.bias_k = bias_k, to.bias_v = bias_v
#else
#define SET_BIAS(to) to.bias_q = nullptr, to.bias_k = nullptr, to.bias_v = nullptr
#endif
#if QK_NORM
#define SET_NORMS(to) to.q_norm = q_norm, to.k_norm = k_norm
#else
#define SET_NORMS(to) to.q_norm = nullptr, to.k_norm = nullptr
#endif
#if R > 0
#define SET_ANGLES(to) to.angles = angles
#else
#define SET_ANGLES(to) to.angles = nullptr
#endif

// Index of feature 0 of cache head `head - H` of a row with this slot; pool [P, 2, K, S, D], keys first, then values.
INLINE ulong cache_index(int slot, int head) {
  const int which = head >= H + K ? 1 : 0, k = (head - H) % K;
  return (((ulong)(slot / S) * 2 + which) * K + k) * (ulong)(S * D) + (ulong)(slot % S * D);
}

// Writes the final feature d of a head to q [T, H, D] float32, or to the pool, unless the slot is negative. It is read only for k and v.
INLINE void write_feature(Heads to, int row, int head, int d, float value) {
  if (head < H) to.q[((ulong)row * H + head) * D + d] = value;
#if !PACKED_CACHE
  else if (to.slots[row] >= 0) to.keys[cache_index(to.slots[row], head) + d] = to_cache(value);
#endif
}

// -0 without BIAS, which changes no bit.
INLINE float bias_at(Heads to, int row, int head, int d) {
#if BIAS && BIAS_PITCH
  return to.bias_q[(ulong)row * BIAS_PITCH + head * D + d];
#elif BIAS
  return head < H ? to.bias_q[head * D + d] : head < H + K ? to.bias_k[(head - H) * D + d] : to.bias_v[(head - H - K) * D + d];
#else
  return -0.0f;
#endif
}

// Feature d of a head from MAIN on, of its product.
INLINE float product_at(Heads to, int row, int head, int d) {
  const int index = head - MAIN, rest = HEADS - MAIN - SECOND;
  if (index < SECOND) return to.second[((ulong)row * SECOND + index) * D + d];
  return to.third[((ulong)row * rest + index - SECOND) * D + d];
}

INLINE float2 rotated(float a, float b, float cosine, float sine) { return float2(fma(a, cosine, -(b * sine)), fma(b, cosine, a * sine)); }

// 1 / sqrt(mean of the squares + eps) of y [D]: lane j sums features j, j + 32, ... ascending, then pairs 16, 8, 4, 2 and 1 apart.
INLINE float head_inverse(threadgroup const float *y, int lane, float eps) {
  float sum = 0.0f;
  for (int d = lane; d < D; d += 32) sum = fma(y[d], y[d], sum);
#pragma unroll
  for (int apart = 16; apart; apart /= 2) sum += simd_shuffle_xor(sum, (ushort)apart);
  return 1.0f / precise::sqrt(sum / (float)D + eps);
}

// Writes a final feature, or keeps it in y [D] until the whole row is there to be packed.
INLINE void put_feature(threadgroup float *y, Heads to, int row, int head, int d, float value) {
#if PACKED_CACHE
  y[d] = value;
#else
  write_feature(to, row, head, d, value);
#endif
}

// For a whole SIMD group: norms, rotates and writes y [D] in threadgroup memory, one row's head with its bias added. What the lanes wrote
// to y must be visible to all of them. y is changed for a packed cache.
INLINE void finish_head(threadgroup float *y, int lane, int row, int head, Heads to) {
  const bool rotates = head < H + K;
  float inverse = 1.0f;
  device const float *norm = head < H ? to.q_norm : to.k_norm;
#if QK_NORM
  if (rotates) inverse = head_inverse(y, lane, QK_EPS);
  if (PACKED_CACHE) simdgroup_barrier(mem_flags::mem_threadgroup);  // all have read the row before it changes
#endif
#define FEATURE(d) (QK_NORM && rotates ? y[d] * inverse * norm[d] : y[d])
  const int pairs = rotates ? R / 2 : 0;
  for (int d = lane; d < pairs; d += 32) {
    device const float *angles = to.angles + (ulong)row * R;
    const float2 both = rotated(FEATURE(d), FEATURE(d + R / 2), angles[d], angles[d + R / 2]);
    put_feature(y, to, row, head, d, both.x);
    put_feature(y, to, row, head, d + R / 2, both.y);
  }
  for (int d = 2 * pairs + lane; d < D; d += 32) put_feature(y, to, row, head, d, FEATURE(d));
#undef FEATURE
#if PACKED_CACHE
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (head >= H) {
    store_packed_row(to.keys, to.slots[row], head >= H + K, (head - H) % K, y, lane);
  } else {
    if (ROTATED_KEYS) rotate_row(y, lane);
    for (int d = lane; d < D; d += 32) write_feature(to, row, head, d, y[d]);
  }
#endif
}
