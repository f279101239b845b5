// Q8_0: weight = scale * q. File: { half scale; int8 q[32] }. Panel: { half scale[16]; uint8 q[8][16][4] }, each q plus 128.
#define BLOCK 32
#define FILE_BLOCK_BYTES 34
#define FIELDS(FIELD) FIELD(2, 2, 0) FIELD(32, 4, 0x80808080u)

INLINE void unpack_block(float *x, const uint8_t *block) {
  const float scale = float_from_f16(((const struct any_half *)block)->half);
  const int8_t *q = (const int8_t *)block + 2;
  for (int i = 0; i < 32; i++) x[i] = scale * (float)q[i];
}

// --- products with x rounded to int8

#define INTEGERS 1
#define ZERO_POINT 128

INLINE void dot_part(const int tokens, const uint8_t *block, int p, const struct x_group *x, const long pitch, struct part_sum *sum) {
  (void)p;
  UNROLL for (int j = 0; j < 8; j++) dot_word(tokens, w16_load(block + 32 + 64 * j), x, j, pitch, sum);
}

INLINE v16 part_scale(const uint8_t *block, int p) {
  (void)p;
  return v16_load_f16((const uint16_t *)block);
}
