// Q4_0: weight = scale * (q - 8). File: { half scale; uint8 q[16] }, low nibbles are elements 0 to 15, high nibbles 16 to 31. Panel:
// { half scale[16]; uint8 q[4][16][4] }: byte q[j][row][i] has elements 4 j + i (low nibble) and 16 + 4 j + i.
#define BLOCK 32
#define FILE_BLOCK_BYTES 18
#define FIELDS(FIELD) FIELD(2, 2, 0) FIELD(16, 4, 0)

INLINE void unpack_block(float *x, const uint8_t *block) {
  const float scale = float_from_f16(((const struct any_half *)block)->half);
  const uint8_t *q = block + 2;
  for (int i = 0; i < 16; i++) x[i] = scale * (float)((q[i] & 15) - 8);
  for (int i = 0; i < 16; i++) x[16 + i] = scale * (float)((q[i] >> 4) - 8);
}

// --- products with x rounded to int8

#define INTEGERS 1
#define ZERO_POINT 8
#define MAX_QUANT 15

INLINE void dot_part(const int tokens, const uint8_t *block, int p, const struct x_group *x, const long pitch, struct part_sum *sum) {
  (void)p;
  UNROLL for (int j = 0; j < 4; j++) {
    const w16 w = w16_load(block + 32 + 64 * j);
    dot_word(tokens, w16_low_nibbles(w), x, j, pitch, sum);
    dot_word(tokens, w16_high_nibbles(w), x, j + 4, pitch, sum);
  }
}

INLINE v16 part_scale(const uint8_t *block, int p) {
  (void)p;
  return v16_load_f16((const uint16_t *)block);
}
