// Q6_K: weight = d * scale * (q - 32), scales of 16 weights each. File: { uint8 low[128], high[64]; int8 scales[16]; half d }. Weights 128 h
// to 128 h + 127 have their low nibbles in low[64 h .. 64 h + 63], 64 low nibbles first, and their two high bits in high[32 h .. 32 h + 31], 32
// for each shift 0, 2, 4, 6. Panel: { uint8 low[32][16][4], high[16][16][4]; int8 scales[4][16][4]; half d[16] }.
#define BLOCK 256
#define FILE_BLOCK_BYTES 210
#define FIELDS(FIELD) FIELD(128, 4, 0) FIELD(64, 4, 0) FIELD(16, 4, 0) FIELD(2, 2, 0)

INLINE void unpack_block(float *x, const uint8_t *block) {
  const uint8_t *low = block, *high = block + 128;
  const int8_t *scales = (const int8_t *)block + 192;
  const float d = float_from_f16(((const struct any_half *)(block + 208))->half);
  for (int i = 0; i < 256; i++) {
    const int half = i / 128, at = i % 128;
    const int q = (low[64 * half + at % 64] >> at / 64 * 4 & 15) | (high[32 * half + at % 32] >> at / 32 * 2 & 3) << 4;
    x[i] = d * (float)scales[i / 16] * (float)(q - 32);
  }
}

// --- products with x rounded to int8

#define INTEGERS 1
#define PART 16
#define ZERO_POINT 32
#define MAX_QUANT 63

INLINE void dot_part(const int tokens, const uint8_t *block, int p, const struct x_group *x, const long pitch, struct part_sum *sum) {
  const int half = p / 8, at = p % 8, first = p % 2 * 4;  // the part's words in a row of 64 low bytes, and in one of 32 high bytes
  const uint8_t *low = block + 64 * (16 * half + at % 4 * 4), *high = block + 2048 + 64 * (8 * half + first);
  UNROLL for (int j = 0; j < 4; j++) {
    const w16 w =
        w16_or(w16_bits(w16_load(low + 64 * j), at / 4 * 4, 15), w16_bits(w16_bits(w16_load(high + 64 * j), at / 2 * 2, 3), -4, 48));
    dot_word(tokens, w, x, first + j, pitch, sum);
  }
}

INLINE v16 part_scale(const uint8_t *block, int p) {
  return v16_mul(v16_load_f16((const uint16_t *)(block + 3328)), v16_from_s8(w16_load(block + 3072 + p / 4 * 64), p % 4));
}
