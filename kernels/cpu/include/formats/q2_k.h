// Q2_K: weight = d * scale * q - dmin * minimum, of 16 weights each: scale is the low nibble of a byte, minimum the high one. File: { uint8
// scales[16], q[64]; half d, dmin }: weights 128 h to 128 h + 127 are in q[32 h .. 32 h + 31], 32 for each shift 0, 2, 4, 6. Panel: { uint8
// scales[4][16][4], q[16][16][4]; half d[16], dmin[16] }.
#define BLOCK 256
#define FILE_BLOCK_BYTES 84
#define FIELDS(FIELD) FIELD(16, 4, 0) FIELD(64, 4, 0) FIELD(2, 2, 0) FIELD(2, 2, 0)

INLINE void unpack_block(float *x, const uint8_t *block) {
  const struct any_half *halves = (const struct any_half *)(block + 80);
  const float d = float_from_f16(halves->half), dmin = float_from_f16(halves[1].half);
  for (int i = 0; i < 256; i++) {
    const float scale = d * (float)(block[i / 16] & 15), minimum = dmin * (float)(block[i / 16] >> 4);
    x[i] = scale * (float)(block[16 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) - minimum;
  }
}

// --- products with x rounded to int8

#define INTEGERS 1
#define MINIMUMS 1
#define PART 16
#define ZERO_POINT 0
#define MAX_QUANT 3

INLINE void dot_part(const int tokens, const uint8_t *block, int p, const struct x_group *x, const long pitch, struct part_sum *sum) {
  const int first = p % 2 * 4;
  const uint8_t *q = block + 256 + 64 * (p / 8 * 8 + first);
  UNROLL for (int j = 0; j < 4; j++) dot_word(tokens, w16_bits(w16_load(q + 64 * j), p % 8 / 2 * 2, 3), x, first + j, pitch, sum);
}

INLINE v16 part_scale(const uint8_t *block, int p) {
  return v16_mul(v16_load_f16((const uint16_t *)(block + 1280)), v16_from_bits(w16_load(block + p / 4 * 64), p % 4 * 8, 4));
}
INLINE v16 part_minimum(const uint8_t *block, int p) {
  return v16_mul(v16_load_f16((const uint16_t *)(block + 1312)), v16_from_bits(w16_load(block + p / 4 * 64), p % 4 * 8 + 4, 4));
}
