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
