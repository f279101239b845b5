// Readers of single numbers. All exact.
#pragma once
#include "formats.h"
#include "portable.h"

// A half or a word at any address, of any type. Blocks of 34 and 18 bytes put both at odd multiples of their size.
struct any_half {
  uint16_t half;
} __attribute__((packed, aligned(1), may_alias));
struct any_word {
  uint32_t word;
} __attribute__((packed, aligned(1), may_alias));

static inline float float_from_bf16(uint16_t h) { return float_from_bits((uint32_t)h << 16); }

// The exponent moves from bias 15 to bias 127 by a product with 2^112, which normalises subnormals, too. A signalling NaN becomes quiet.
static inline float float_from_f16(uint16_t h) {
  uint32_t magnitude = (uint32_t)(h & 0x7FFF) << 13, sign = (uint32_t)(h & 0x8000) << 16;
  if (magnitude >= 0x7C00u << 13) return float_from_bits(sign | magnitude | 0x70000000u | (magnitude > 0x7C00u << 13 ? 0x400000u : 0));
  return float_from_bits(sign | bits_of_float(float_from_bits(magnitude) * 0x1p112f));
}

// OCP's 8-bit float with four bits of exponent. The product normalises subnormals. What others read as NaN is +-480: in blocks a scale is the NaN.
static inline float float_from_e4m3(uint8_t code) { return float_from_bits((code & 0x80u) << 24 | (code & 0x7Fu) << 20) * 0x1p120f; }
