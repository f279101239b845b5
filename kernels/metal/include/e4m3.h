// e4m3 numbers in the bytes of words: their bits put where a half has them, and the difference of the exponents' biases as a factor. Subnormal
// ones are subnormal halves first. What others read as NaN is +-480, as on the CPU.
#pragma once
#include "gpu.h"

// Of bytes 0 and 2.
INLINE half2 two_e4m3(uint bits) { return as_type<half2>((bits & 0x00800080u) << 8 | (bits & 0x007F007Fu) << 7) * half2(256.0h); }
INLINE half4 halves_of_e4m3(uint word) {
  const half2 even = two_e4m3(word), odd = two_e4m3(word >> 8);
  return half4(even.x, odd.x, even.y, odd.y);
}
INLINE float4 four_e4m3(uint word) { return float4(halves_of_e4m3(word)); }
