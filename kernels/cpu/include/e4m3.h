// E4M3 weights, four columns a word, and x rounded to bfloat16: for the formats whose quants they are.
#pragma once
#include "lanes.h"

#define GROUPS 1
#define STEP_COLUMNS 4

#ifdef E4M3_PAIRS  // columns in the order 0 2 1 3, as pairs
#define STEP_X_BYTES 8

INLINE void store_x(uint8_t *row, int i, v16 x) {
  uint16_t rounded[16], *to = (uint16_t *)row + i;
  v16_store_bf16(rounded, x);
  for (int c = 0; c < 16; c++) to[c] = rounded[(c & ~3) + (c & 1) * 2 + (c >> 1 & 1)];
}
INLINE void dot_step(const int tokens, const uint8_t *words, const uint8_t *x, const long pitch, v16 *sum) {
  w16 even, odd;
  e4m3_pairs(w16_load(words), &even, &odd);
  UNROLL for (int t = 0; t < tokens; t++) {
    const uint32_t *pairs = (const uint32_t *)(x + t * pitch);
    sum[t] = v16_dot_bf16(v16_dot_bf16(sum[t], even, pairs[0]), odd, pairs[1]);
  }
}
#else
#define STEP_X_BYTES 16

INLINE void store_x(uint8_t *row, int i, v16 x) { v16_store((float *)row + i, v16_round_bf16(x)); }
INLINE void dot_step(const int tokens, const uint8_t *words, const uint8_t *x, const long pitch, v16 *sum) {
  const w16 w = w16_load(words);
  UNROLL for (int c = 0; c < 4; c++) {
    const v16 column = v16_from_e4m3(w, c);
    UNROLL for (int t = 0; t < tokens; t++) sum[t] = v16_fma(column, v16_set(((const float *)(x + t * pitch))[c]), sum[t]);
  }
}
#endif
