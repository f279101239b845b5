// Weights of four bits that are sixteen float32 numbers, VALUES, in groups of 64, and float32 x: for bitsandbytes' formats.
// File: { float scale; uint8 q[32] }, the low nibble of a byte first. Panel: { float scale[16]; uint8 q[8][16][4] }.
#pragma once
#include "lanes.h"

#define BLOCK 64
#define FILE_BLOCK_BYTES 36
#define FIELDS(FIELD) FIELD(4, 4, 0) FIELD(32, 4, 0)

INLINE void unpack_block(float *x, const uint8_t *block) {
  const float scale = float_from_bits(((const struct any_word *)block)->word);
  for (int i = 0; i < 64; i++) x[i] = scale * VALUES[block[4 + i / 2] >> i % 2 * 4 & 15];
}

// --- products with float32 x: bfloat16 would not hold the table

#define GROUPS 1
#define CHAINS 4
#define STEP_COLUMNS 8
#define STEP_X_BYTES 32
#define QUANTS 64

INLINE void store_x(uint8_t *row, int i, v16 x) { v16_store((float *)row + i, x); }
INLINE void dot_step(const int tokens, const uint8_t *words, const uint8_t *x, const long pitch, v16 *sum) {
  const w16 w = w16_load(words);
  UNROLL for (int c = 0; c < 8; c++) {
    const v16 column = v16_lookup(w, 4 * c, VALUES);
    UNROLL for (int t = 0; t < tokens; t++) sum[t] = v16_fma(column, v16_set(((const float *)(x + t * pitch))[c]), sum[t]);
  }
}

INLINE v16 group_scale(const uint8_t *block) { return v16_from_w16(w16_load(block)); }
