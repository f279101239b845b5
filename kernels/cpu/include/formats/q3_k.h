// Q3_K: weight = d * (scale - 32) * (q - 4), scales of 16 weights each. File: { uint8 high[32], low[64], scales[12]; half d }: weights 128 h to
// 128 h + 127 have two bits in low[32 h .. 32 h + 31], 32 for each shift 0, 2, 4, 6; bit i / 32 of high[i % 32] is the third bit of weight i.
// Scale s has its low nibble in byte s % 8, low nibbles first, and two high bits in byte 8 + s % 4 at shift 2 (s / 4). Panel: { uint8
// high[8][16][4], low[16][16][4], scales[3][16][4]; half d[16] }.
#define BLOCK 256
#define FILE_BLOCK_BYTES 110
#define FIELDS(FIELD) FIELD(32, 4, 0) FIELD(64, 4, 0) FIELD(12, 4, 0) FIELD(2, 2, 0)

INLINE void unpack_block(float *x, const uint8_t *block) {
  const uint8_t *high = block, *low = block + 32, *scales = block + 96;
  const float d = float_from_f16(((const struct any_half *)(block + 108))->half);
  for (int i = 0; i < 256; i++) {
    const int s = i / 16, scale = (scales[s % 8] >> s / 8 * 4 & 15) | (scales[8 + s % 4] >> s / 4 * 2 & 3) << 4;
    const int q = (low[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) | (high[i % 32] >> i / 32 & 1) << 2;
    x[i] = d * (float)(scale - 32) * (float)(q - 4);
  }
}

// --- products with x rounded to int8

#define INTEGERS 1
#define PART 16
#define ZERO_POINT 4
#define MAX_QUANT 7

INLINE void dot_part(const int tokens, const uint8_t *block, int p, const struct x_group *x, const long pitch, struct part_sum *sum) {
  const int first = p % 2 * 4;
  const uint8_t *high = block + 64 * first, *low = block + 512 + 64 * (p / 8 * 8 + first);
  UNROLL for (int j = 0; j < 4; j++) {
    const w16 w = w16_or(w16_bits(w16_load(low + 64 * j), p % 8 / 2 * 2, 3), w16_bits(w16_bits(w16_load(high + 64 * j), p / 2, 1), -2, 4));
    dot_word(tokens, w, x, first + j, pitch, sum);
  }
}

INLINE v16 part_scale(const uint8_t *block, int p) {
  const v16 low = v16_from_bits(w16_load(block + 1536 + p % 8 / 4 * 64), p % 4 * 8 + p / 8 * 4, 4);
  const v16 high = v16_from_bits(w16_load(block + 1664), p % 4 * 8 + p / 4 * 2, 2);
  return v16_mul(v16_load_f16((const uint16_t *)(block + 1728)), v16_sub(v16_fma(high, v16_set(16.0f), low), v16_set(32.0f)));
}
