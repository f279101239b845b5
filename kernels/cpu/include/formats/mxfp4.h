// MXFP4 (OCP Microscaling Formats 1.0): weight = 2^(e - 128) * (VALUES[q] - 12), twice the numbers 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives.
// File: { uint8 e, q[16] }, low nibbles are elements 0 to 15, high nibbles 16 to 31. Panel: { uint8 e[16], q[4][16][4] }.
#define BLOCK 32
#define FILE_BLOCK_BYTES 17
#define FIELDS(FIELD) FIELD(1, 1, 0) FIELD(16, 4, 0)

static const uint8_t VALUES[16] = FP4_VALUES;

// 2^(e - 128), also where that is subnormal.
INLINE float half_scale(uint8_t e) { return float_from_bits(e < 2 ? 0x200000u << e : (uint32_t)(e - 1) << 23); }

INLINE void unpack_block(float *x, const uint8_t *block) {
  for (int i = 0; i < 32; i++) x[i] = half_scale(block[0]) * (float)(VALUES[block[1 + i % 16] >> i / 16 * 4 & 15] - 12);
}

// --- products with x rounded to int8

#define INTEGERS 1
#define ZERO_POINT 12
#define MAX_QUANT 24

INLINE void dot_part(const int tokens, const uint8_t *block, int p, const struct x_group *x, const long pitch, struct part_sum *sum) {
  (void)p;
  UNROLL for (int j = 0; j < 4; j++) {
    const w16 w = w16_load(block + 16 + 64 * j);
    dot_word(tokens, w16_lookup(w16_low_nibbles(w), VALUES), x, j, pitch, sum);
    dot_word(tokens, w16_lookup(w16_high_nibbles(w), VALUES), x, j + 4, pitch, sum);
  }
}

INLINE v16 part_scale(const uint8_t *block, int p) {
  (void)p;
  float scales[16];
  for (int r = 0; r < 16; r++) scales[r] = half_scale(block[r]);
  return v16_load(scales);
}
