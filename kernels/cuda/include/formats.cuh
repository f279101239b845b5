// How numbers of the plain float formats are stored. What is specific to a format of weights is in formats/FORMAT.cuh, which weights.cuh
// selects.
#pragma once
#include "gpu.cuh"
#include "formats.h"

// Two numbers in a word, the first in its lower half; rounded to nearest, ties to even. F16 or BF16.
template <int FORMAT> DEVICE u32 pack_pair(float low, float high) {
  static_assert(FORMAT == F16 || FORMAT == BF16, "pairs are of F16 or BF16");
  if constexpr (FORMAT == F16) return pack_f16(low, high);
  return pack_bf16(low, high);
}
template <int FORMAT> DEVICE float2 unpack_pair(u32 pair) {
  static_assert(FORMAT == F16 || FORMAT == BF16, "pairs are of F16 or BF16");
  if constexpr (FORMAT == F16) return unpack_f16(pair);
  return unpack_bf16(pair);
}

// The type in which a plain float format is stored, and the conversion to it.
template <int FORMAT> struct Stored {
  typedef u16 number;
  DEVICE number of(float value) { return (u16)pack_pair<FORMAT>(value, 0.0f); }
};
template <> struct Stored<F32> {
  typedef float number;
  DEVICE number of(float value) { return value; }
};

// The lowest byte of a word as a float of 1 + 4 + 3 bits (e4m3, bias 7); the codes that files mean as NaN are +-480. The bits are those of a float32
// whose exponent is 120 too small: the product normalises subnormals.
DEVICE float e4m3_to_float(u32 byte) { return __uint_as_float((byte & 0x80u) << 24 | (byte & 0x7Fu) << 20) * 0x1p120f; }
// The four bytes of a word, in the same way, as bfloat16: `even` bytes 0 and 2, `odd` bytes 1 and 3. An instruction that converts e4m3 (sm_89) gives
// float16, from which it are three more conversions to a pair of bfloat16.
DEVICE void e4m3_pairs(u32 &even, u32 &odd, u32 word) {
  even = multiply_bf16((word << 8 & 0x80008000u) | (word << 4 & 0x07F007F0u), 0x7B807B80u);
  odd = multiply_bf16((word & 0x80008000u) | (word >> 4 & 0x07F007F0u), 0x7B807B80u);
}
