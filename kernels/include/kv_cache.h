// Packed keys and values: CACHE_TYPE in addition to F32, F16 and BF16 of formats.h, and the arithmetic of one number. tinyvllm/quant/kv.py is the
// definition, KVLayout of tinyvllm/batch.py says where the bytes are.
//
// A plain C subset as order.h.
#pragma once
#include "portable.h"

#define KV_FP8 100
#define KV_INT8 101
#define KV_INT4 102

#define KV_NAN_SCALE 0x7FC0u
#define KV_ROUND 12582912.0f  // 1.5 * 2^23: added to a small number, it rounds it to a whole one, in the lowest bits

// The scale of a row whose largest number has magnitude 1.
#define KV_STEP_FP8 0.0022321429f   // 1 / 448
#define KV_STEP_INT8 0.0078740157f  // 1 / 127
#define KV_STEP_INT4 0.13333334f    // 1 / 7.5
#define KV_STEP_INT4_KEY 0.125f     // a key is rotated first, and then few numbers are near the largest

// A row's scale, the bits of a bfloat16, from its largest magnitude as bits; NaN if a number is not finite, 0 if all are below 2^-100.
DEVICE_FN u32 kv_scale(u32 top, float step) {
  if (top >= 0x7F800000u) return KV_NAN_SCALE;
  if (top < 0x0D800000u) return 0;
  const u32 bits = bits_of_float(float_from_bits(top) * step);
  return (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}

DEVICE_FN float kv_scale_value(u32 scale) { return float_from_bits(scale << 16); }

// What a row's numbers are multiplied with: 0 for the two special scales. Numbers that are not finite have to be replaced by 0.
DEVICE_FN float kv_inverse(u32 scale) { return scale == 0 || scale == KV_NAN_SCALE ? 0.0f : 1.0f / kv_scale_value(scale); }

DEVICE_FN float kv_clamp(float y, float limit) { return y < -limit ? -limit : y > limit ? limit : y; }

DEVICE_FN u32 kv_int8(float y) { return (bits_of_float(kv_clamp(y, 127.0f) + KV_ROUND) + 128u) & 255u; }

DEVICE_FN u32 kv_int4(float y) {
  const float above = kv_clamp(y, 7.5f) + 7.5f;
  return bits_of_float((above > 0.0f ? above : 0.0f) + KV_ROUND) & 15u;
}

DEVICE_FN u32 kv_fp8(float y) {
  const u32 bits = bits_of_float(kv_clamp(y, 448.0f)), size = bits & 0x7FFFFFFFu;
  const u32 normal = ((size + 0x7FFFFu + (size >> 20 & 1u)) >> 20) - (120u << 3);
  const u32 small = bits_of_float(float_from_bits(size) + 16384.0f) - 0x46800000u;  // below 2^-6: in units of 2^-9
  return (size < 0x3C800000u ? small : normal) | (bits >> 24 & 0x80u);
}
