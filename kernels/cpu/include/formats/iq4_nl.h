// IQ4_NL: weight = scale * (VALUES[q] - 128). File: { half scale; uint8 q[16] }, low nibbles are elements 0 to 15, high nibbles 16 to 31.
// Panel: { half scale[16]; uint8 q[4][16][4] }, as Q4_0.
#define BLOCK 32
#define FILE_BLOCK_BYTES 18
#define FIELDS(FIELD) FIELD(2, 2, 0) FIELD(16, 4, 0)

static const uint8_t VALUES[16] = IQ4_VALUES;  // with zero point 128

INLINE void unpack_block(float *x, const uint8_t *block) {
  const float scale = float_from_f16(((const struct any_half *)block)->half);
  for (int i = 0; i < 32; i++) x[i] = scale * (float)(VALUES[block[2 + i % 16] >> i / 16 * 4 & 15] - 128);
}

// --- products with x rounded to int8

#define INTEGERS 1
#define ZERO_POINT 128

INLINE void dot_part(const int tokens, const uint8_t *block, int p, const struct x_group *x, const long pitch, struct part_sum *sum) {
  (void)p;
  UNROLL for (int j = 0; j < 4; j++) {
    const w16 w = w16_load(block + 32 + 64 * j);
    dot_word(tokens, w16_lookup(w16_low_nibbles(w), VALUES), x, j, pitch, sum);
    dot_word(tokens, w16_lookup(w16_high_nibbles(w), VALUES), x, j + 4, pitch, sum);
  }
}

INLINE v16 part_scale(const uint8_t *block, int p) {
  (void)p;
  return v16_load_f16((const uint16_t *)block);
}
