// A SIMD group stores a key or value in a packed cache, with the bytes of the other backends' kernels. tinyvllm/quant/kv.py is the
// definition, KVLayout of tinyvllm/batch.py says where the bytes are.
//
// Constants: K, S, D, CACHE_TYPE.
#pragma once
#include "cache_number.h"

#if PACKED_CACHE

constant constexpr bool ROTATED_KEYS = CACHE_TYPE == KV_INT4;
constant constexpr int ROTATION = (D & -D) < 256 ? (D & -D) : 256;  // numbers that are rotated together
constant constexpr float ROTATION_FACTOR = ROTATION == 8     ? 0.35355339059327373f
                                           : ROTATION == 16  ? 0.25f
                                           : ROTATION == 32  ? 0.17677669529663687f
                                           : ROTATION == 64  ? 0.125f
                                           : ROTATION == 128 ? 0.08838834764831845f
                                                             : 0.0625f;
constant constexpr int QUANT_BYTES = CACHE_TYPE == KV_INT4 ? D / 2 : D;  // of a key
constant constexpr ulong SCALES_AT = 2ul * K * S * QUANT_BYTES;          // in a block
constant constexpr ulong PACKED_BLOCK = SCALES_AT + 4ul * K * S;         // bytes

static_assert(D % 8 == 0 && S % 4 == 0, "packed caches: D must be a multiple of 8 and S of 4");

// y [D] times a symmetric Hadamard matrix, ROTATION numbers at a time. What the lanes wrote to y must be visible to all of them; afterwards
// it is again.
INLINE void rotate_row(threadgroup float *y, int lane) {
  for (int distance = 1; distance < ROTATION; distance *= 2) {
    for (int i = lane; i < D / 2; i += LANES) {
      const int at = i / distance * 2 * distance + i % distance;
      const float a = y[at], b = y[at + distance];
      y[at] = a + b, y[at + distance] = a - b;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int d = lane; d < D; d += LANES) y[d] *= ROTATION_FACTOR;
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

INLINE uint quant_of(float x) { return CACHE_TYPE == KV_INT8 ? kv_int8(x) : CACHE_TYPE == KV_FP8 ? kv_fp8(x) : kv_int4(x); }

// Byte i of a row y [D]; `finite` is whether its scale is no NaN.
INLINE uint quant_byte(threadgroup const float *y, int i, bool finite, float inverse) {
  const uint low = quant_of((finite ? y[i] : 0.0f) * inverse);
  return CACHE_TYPE == KV_INT4 ? low | quant_of((finite ? y[i + D / 2] : 0.0f) * inverse) << 4 : low;
}

// Stores y [D] in threadgroup memory, visible to all lanes, as a key (side 0) or value (side 1). A key may be rotated in place. All lanes
// have the same slot; where it is negative, nothing is stored.
INLINE void store_packed_row(device uchar *pool, int slot, int side, int head, threadgroup float *y, int lane) {
  if (slot < 0) return;
  const int s = slot % S;
  device uchar *block = pool + (ulong)(slot / S) * PACKED_BLOCK, *to = block + (ulong)(side * K + head) * S * QUANT_BYTES;
  if (ROTATED_KEYS && side == 0) rotate_row(y, lane);
  uint top = 0;
  for (int d = lane; d < D; d += LANES) top = max(top, as_type<uint>(y[d]) & 0x7FFFFFFFu);
  const float step = CACHE_TYPE == KV_FP8    ? KV_STEP_FP8
                     : CACHE_TYPE == KV_INT8 ? KV_STEP_INT8
                     : side == 0             ? KV_STEP_INT4_KEY
                                             : KV_STEP_INT4;
  const uint scale = kv_scale(simd_max(top), step);
  const float inverse = kv_inverse(scale);
  const bool finite = scale != KV_NAN_SCALE;
  if (side == 0) {  // a word has four columns of this key
    for (int i = lane * 4; i < QUANT_BYTES; i += 4 * LANES) {
      uint word = 0;
#pragma unroll
      for (int k = 0; k < 4; k++) word |= quant_byte(y, i + k, finite, inverse) << 8 * k;
      ((device uint *)to)[i / 4 * S + s] = word;
    }
  } else {  // a word has four values of a column, of which one is this slot's
    for (int i = lane; i < QUANT_BYTES; i += LANES) to[(s / 4 * QUANT_BYTES + i) * 4 + s % 4] = (uchar)quant_byte(y, i, finite, inverse);
  }
  if (lane == 0) ((device ushort *)(block + SCALES_AT))[(side * K + head) * S + s] = (ushort)scale;
}

#endif
