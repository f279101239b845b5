// Q4_K: weight = d * scale * q - dmin * minimum, scales and minimums of 32 weights each (six_bits.h). File: { half d, dmin; uint8 scales[12],
// q[128] }: of 32 bytes of q the low nibbles are one part, the high nibbles the next. Panel: { half d[16], dmin[16]; uint8 scales[3][16][4],
// q[32][16][4] }.
#define BLOCK 256
#define FILE_BLOCK_BYTES 144
#define FIELDS(FIELD) FIELD(2, 2, 0) FIELD(2, 2, 0) FIELD(12, 4, 0) FIELD(128, 4, 0)

INLINE void unpack_block(float *x, const uint8_t *block) {
  const float d = float_from_f16(((const struct any_half *)block)->half), dmin = float_from_f16(((const struct any_half *)block)[1].half);
  for (int p = 0; p < 8; p++) {
    const float scale = d * (float)six_bit_scale(block + 4, p), minimum = dmin * (float)six_bit_minimum(block + 4, p);
    const uint8_t *q = block + 16 + p / 2 * 32;
    for (int i = 0; i < 32; i++) x[32 * p + i] = scale * (float)(q[i] >> p % 2 * 4 & 15) - minimum;
  }
}

// --- products with x rounded to int8

#define INTEGERS 1
#define MINIMUMS 1
#define ZERO_POINT 0
#define MAX_QUANT 15

// Where dots of four bytes are exact, a high nibble stays in its place: sixteen times the integer, with a sixteenth of the scale.
#ifdef SHORT_DOTS
#define HIGH_SHIFT 4
#define HIGH_SCALE 1.0f
#else
#define HIGH_SHIFT 0
#define HIGH_SCALE 0.0625f
#endif

INLINE void dot_part(const int tokens, const uint8_t *block, int p, const struct x_group *x, const long pitch, struct part_sum *sum) {
  const uint8_t *q = block + 256 + p / 2 * 512;
  const int shift = p % 2 ? HIGH_SHIFT : 0, mask = p % 2 ? 0xF0 >> HIGH_SHIFT : 15;
  UNROLL for (int j = 0; j < 8; j++) dot_word(tokens, w16_bits(w16_load(q + 64 * j), shift, mask), x, j, pitch, sum);
}

INLINE v16 part_scale(const uint8_t *block, int p) {
  return v16_mul(v16_mul(v16_load_f16((const uint16_t *)block), v16_set(p % 2 ? HIGH_SCALE : 1.0f)), six_bit_scales(block + 64, p));
}
INLINE v16 part_minimum(const uint8_t *block, int p) {
  return v16_mul(v16_load_f16((const uint16_t *)(block + 32)), six_bit_minimums(block + 64, p));
}
