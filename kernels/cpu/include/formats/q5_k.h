// Q5_K: Q4_K with a fifth bit: bit p of byte i of `high` belongs to element i of part p. File: { half d, dmin; uint8 scales[12], high[32],
// q[128] }. Panel: { half d[16], dmin[16]; uint8 scales[3][16][4], high[8][16][4], q[32][16][4] }.
#define BLOCK 256
#define FILE_BLOCK_BYTES 176
#define FIELDS(FIELD) FIELD(2, 2, 0) FIELD(2, 2, 0) FIELD(12, 4, 0) FIELD(32, 4, 0) FIELD(128, 4, 0)

INLINE void unpack_block(float *x, const uint8_t *block) {
  const float d = float_from_f16(((const struct any_half *)block)->half), dmin = float_from_f16(((const struct any_half *)block)[1].half);
  const uint8_t *high = block + 16;
  for (int p = 0; p < 8; p++) {
    const float scale = d * (float)six_bit_scale(block + 4, p), minimum = dmin * (float)six_bit_minimum(block + 4, p);
    const uint8_t *q = block + 48 + p / 2 * 32;
    for (int i = 0; i < 32; i++) x[32 * p + i] = scale * (float)((q[i] >> p % 2 * 4 & 15) | (high[i] >> p & 1) << 4) - minimum;
  }
}

// --- products with x rounded to int8

#define INTEGERS 1
#define MINIMUMS 1
#define ZERO_POINT 0
#define MAX_QUANT 31

INLINE void dot_part(const int tokens, const uint8_t *block, int p, const struct x_group *x, const long pitch, struct part_sum *sum) {
  const uint8_t *high = block + 256, *q = block + 768 + p / 2 * 512;
  UNROLL for (int j = 0; j < 8; j++) {
    const w16 w = w16_or(w16_bits(w16_load(q + 64 * j), p % 2 * 4, 15), w16_bits(w16_bits(w16_load(high + 64 * j), p, 1), -4, 16));
    dot_word(tokens, w, x, j, pitch, sum);
  }
}

INLINE v16 part_scale(const uint8_t *block, int p) { return v16_mul(v16_load_f16((const uint16_t *)block), six_bit_scales(block + 64, p)); }
INLINE v16 part_minimum(const uint8_t *block, int p) {
  return v16_mul(v16_load_f16((const uint16_t *)(block + 32)), six_bit_minimums(block + 64, p));
}
