// NVFP4_G128: weight = scale * e4m3 scale of 16 weights * (VALUES[q] - 12), which is twice a float of four bits. File: { float scale; uint8
// scales[8]; uint8 q[64] }, of each 16 bytes of q the low nibbles are 16 weights and the high nibbles the next. Panel: { float scale[16]; uint8
// scales[2][16][4], q[16][16][4] }.
#define BLOCK 128
#define FILE_BLOCK_BYTES 76
#define FIELDS(FIELD) FIELD(4, 4, 0) FIELD(8, 4, 0) FIELD(64, 4, 0)

static const uint8_t VALUES[16] = FP4_VALUES;

INLINE void unpack_block(float *x, const uint8_t *block) {
  const float scale = float_from_bits(((const struct any_word *)block)->word);
  for (int i = 0; i < 128; i++) {
    const int value = VALUES[block[12 + i / 32 * 16 + i % 16] >> i % 32 / 16 * 4 & 15] - 12;
    x[i] = scale * float_from_e4m3(block[4 + i / 16]) * (float)value;
  }
}

// --- products with x rounded to int8

#define INTEGERS 1
#define PART 16
#define ZERO_POINT 12
#define MAX_QUANT 24

INLINE void dot_part(const int tokens, const uint8_t *block, int p, const struct x_group *x, const long pitch, struct part_sum *sum) {
  const uint8_t *words = block + 192 + p / 2 * 256;
  UNROLL for (int j = 0; j < 4; j++)
      dot_word(tokens, w16_lookup(w16_bits(w16_load(words + 64 * j), p % 2 * 4, 15), VALUES), x, p % 2 * 4 + j, pitch, sum);
}

INLINE v16 part_scale(const uint8_t *block, int p) {
  return v16_mul(v16_from_w16(w16_load(block)), v16_from_e4m3(w16_load(block + 64 + p / 4 * 64), p % 4));
}
