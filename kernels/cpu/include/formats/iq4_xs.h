// IQ4_XS: weight = d * (scale - 32) * (VALUES[q] - 128), scales of 32 weights each. File: { half d; uint16 high; uint8 low[4], q[128] }: part p
// has its scale's low nibble in byte p / 2 of `low`, its two high bits at bit 2 p of `high`, and sixteen bytes of q, low nibbles first. Panel:
// { half d[16]; uint16 high[16]; uint8 low[16][4], q[32][16][4] }.
#define BLOCK 256
#define FILE_BLOCK_BYTES 136
#define FIELDS(FIELD) FIELD(2, 2, 0) FIELD(2, 2, 0) FIELD(4, 4, 0) FIELD(128, 4, 0)

static const uint8_t VALUES[16] = IQ4_VALUES;  // with zero point 128

INLINE void unpack_block(float *x, const uint8_t *block) {
  const struct any_half *halves = (const struct any_half *)block;
  const float d = float_from_f16(halves->half);
  for (int i = 0; i < 256; i++) {
    const int p = i / 32, scale = (block[4 + p / 2] >> p % 2 * 4 & 15) | (halves[1].half >> 2 * p & 3) << 4;
    x[i] = d * (float)(scale - 32) * (float)(VALUES[block[8 + 16 * p + i % 16] >> i % 32 / 16 * 4 & 15] - 128);
  }
}

// --- products with x rounded to int8

#define INTEGERS 1
#define ZERO_POINT 128

INLINE void dot_part(const int tokens, const uint8_t *block, int p, const struct x_group *x, const long pitch, struct part_sum *sum) {
  const uint8_t *q = block + 128 + 256 * p;
  UNROLL for (int j = 0; j < 4; j++) {
    const w16 w = w16_load(q + 64 * j);
    dot_word(tokens, w16_lookup(w16_low_nibbles(w), VALUES), x, j, pitch, sum);
    dot_word(tokens, w16_lookup(w16_high_nibbles(w), VALUES), x, j + 4, pitch, sum);
  }
}

INLINE v16 part_scale(const uint8_t *block, int p) {
  const v16 low = v16_from_bits(w16_load(block + 64), 4 * p, 4),
            high = v16_from_bits(w16_load_u16((const uint16_t *)(block + 32)), 2 * p, 2);
  return v16_mul(v16_load_f16((const uint16_t *)block), v16_sub(v16_fma(high, v16_set(16.0f), low), v16_set(32.0f)));
}
