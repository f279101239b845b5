// Writers of the parts of a block in a file. Quants come as bytes in the order of their elements.
#pragma once
#include <stdint.h>
#include "lanes.h"

// `groups` runs of `width` bytes: a byte w of a run has numbers w, width + w, ... of the group, `bits` bits each, the first one lowest. The
// numbers are (quant >> right) & mask. Returns the end.
INLINE uint8_t *put_planes(uint8_t *to, const uint8_t *quants, const int groups, const int width, const int bits, const int right,
                           const int mask) {
  for (int g = 0; g < groups; g++, quants += width * (8 / bits))
    for (int w = 0; w < width; w++) {
      int byte = 0;
      for (int k = 0; k < 8 / bits; k++) byte |= (quants[k * width + w] >> right & mask) << k * bits;
      *to++ = (uint8_t)byte;
    }
  return to;
}

INLINE uint8_t *put_half(uint8_t *to, uint16_t half) {
  *to++ = (uint8_t)half;
  *to++ = (uint8_t)(half >> 8);
  return to;
}

// Bits 4 of 32 quants, bit i of the word that of element i.
INLINE uint8_t *put_fifth_bits(uint8_t *to, const uint8_t *quants) {
  for (int i = 0; i < 4; i++) {
    int byte = 0;
    for (int k = 0; k < 8; k++) byte |= (quants[8 * i + k] >> 4 & 1) << k;
    *to++ = (uint8_t)byte;
  }
  return to;
}

// Eight scales and eight minimums of six bits in 12 bytes, as Q4_K and Q5_K have them.
INLINE uint8_t *put_six_bit_pairs(uint8_t *to, const uint8_t *scales, const uint8_t *minimums) {
  for (int i = 0; i < 4; i++) {
    to[i] = (uint8_t)(scales[i] | scales[4 + i] >> 4 << 6);
    to[4 + i] = (uint8_t)(minimums[i] | minimums[4 + i] >> 4 << 6);
    to[8 + i] = (uint8_t)((scales[4 + i] & 15) | (minimums[4 + i] & 15) << 4);
  }
  return to + 12;
}
