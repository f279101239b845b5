// Numbers for the formats of weights and caches, as they stand in `#define WEIGHT BF16`, and readers of single numbers. All exact.
#pragma once
#include <stdint.h>

#define F32 0
#define F16 1
#define BF16 2
#define Q8_0 3
#define Q4_0 4

static inline float float_from_bits(uint32_t bits) {
  union { uint32_t bits; float value; } both = {bits};
  return both.value;
}
static inline uint32_t bits_of_float(float value) {
  union { float value; uint32_t bits; } both = {value};
  return both.bits;
}
static inline float float_from_bf16(uint16_t h) { return float_from_bits((uint32_t)h << 16); }

// The exponent moves from bias 15 to bias 127 by a product with 2^112, which normalises subnormals, too. Signals of NaNs become quiet.
static inline float float_from_f16(uint16_t h) {
  uint32_t magnitude = (uint32_t)(h & 0x7FFF) << 13, sign = (uint32_t)(h & 0x8000) << 16;
  if (magnitude >= 0x7C00u << 13) return float_from_bits(sign | magnitude | 0x70000000u | (magnitude > 0x7C00u << 13 ? 0x400000u : 0));
  return float_from_bits(sign | bits_of_float(float_from_bits(magnitude) * 0x1p112f));
}

// Halves inside the 34 and 18 byte blocks of files stand at odd halves of words; they are read bytewise.
static inline uint16_t half_at(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }
