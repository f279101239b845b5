// Q5_1: weight = scale * q + offset. File: { half scale, offset; uint32 high; uint8 q[16] }: low nibbles are elements 0 to 15, high
// nibbles 16 to 31, bit i of `high` is the fifth bit of element i. Panel: { half scale[16], offset[16]; uint32 high[16]; uint8 q[4][16][4] }.
#define BLOCK 32
#define FILE_BLOCK_BYTES 24
#define FIELDS(FIELD) FIELD(2, 2, 0) FIELD(2, 2, 0) FIELD(4, 4, 0) FIELD(16, 4, 0)

INLINE void unpack_block(float *x, const uint8_t *block) {
  const float scale = float_from_f16(((const struct any_half *)block)->half),
              offset = float_from_f16(((const struct any_half *)block)[1].half);
  const uint32_t high = ((const struct any_word *)(block + 4))->word;
  const uint8_t *q = block + 8;
  for (int i = 0; i < 16; i++) x[i] = scale * (float)((q[i] & 15) | (high >> i & 1) << 4) + offset;
  for (int i = 0; i < 16; i++) x[16 + i] = scale * (float)(q[i] >> 4 | (high >> (16 + i) & 1) << 4) + offset;
}

// --- products with x rounded to int8

#define INTEGERS 1
#define MINIMUMS 1
#define ZERO_POINT 0
#define MAX_QUANT 31

INLINE void dot_part(const int tokens, const uint8_t *block, int p, const struct x_group *x, const long pitch, struct part_sum *sum) {
  (void)p;
  const w16 high = w16_load(block + 64);
  UNROLL for (int j = 0; j < 4; j++) {
    const w16 w = w16_load(block + 128 + 64 * j);
    dot_word(tokens, w16_or(w16_low_nibbles(w), w16_fifth_bits(high, 4 * j)), x, j, pitch, sum);
    dot_word(tokens, w16_or(w16_high_nibbles(w), w16_fifth_bits(high, 16 + 4 * j)), x, j + 4, pitch, sum);
  }
}

INLINE v16 part_scale(const uint8_t *block, int p) {
  (void)p;
  return v16_load_f16((const uint16_t *)block);
}
INLINE v16 part_minimum(const uint8_t *block, int p) {
  (void)p;
  return v16_sub(v16_set(0.0f), v16_load_f16((const uint16_t *)(block + 32)));
}
