// INTb_Gg: weight = scale * q + offset, unsigned integers of BITS bits, GROUP of them with one scale and one offset. File: { float scale,
// offset; uint8 high[]; uint8 low[] }. Of every 32 weights, `low` has the lowest 2, 4 or 8 bits and `high` the rest, one or two. What a byte
// holds is 32 / (numbers in a byte) weights apart: byte w of four high bits' bytes has weights w, w + 4, w + 8, ..., the lowest bit first.
// Panel: the same fields, each as words of sixteen rows.
#define BITS (WEIGHT / 1000)
#define GROUP (WEIGHT % 1000)
#define LOW (BITS >= 8 ? 8 : BITS >= 4 ? 4 : 2)
#define HIGH (BITS - LOW)
#define LOW_WORDS LOW  // of 32 weights
#define HIGH_WORDS HIGH
#define HIGH_BYTES (GROUP / 8 * HIGH)
#define BLOCK GROUP
#define FILE_BLOCK_BYTES (8 + GROUP / 8 * BITS)
#if BITS == 2 || BITS == 4 || BITS == 8
#define FIELDS(FIELD) FIELD(4, 4, 0) FIELD(4, 4, 0) FIELD(GROUP / 8 * BITS, 4, 0)
#else
#define FIELDS(FIELD) FIELD(4, 4, 0) FIELD(4, 4, 0) FIELD(HIGH_BYTES, 4, 0) FIELD(GROUP / 8 * LOW, 4, 0)
#endif

// Weight i, 0 to 31, of 32 whose bits are in `low` and `high`.
INLINE int grouped_integer(const uint8_t *low, const uint8_t *high, int i) {
  int q = low[i % (4 * LOW)] >> i / (4 * LOW) * LOW & ((1 << LOW) - 1);
#if BITS != 2 && BITS != 4 && BITS != 8
  q |= (high[i % (4 * HIGH)] >> i / (4 * HIGH) * HIGH & ((1 << HIGH) - 1)) << LOW;
#else
  (void)high;
#endif
  return q;
}

INLINE void unpack_block(float *x, const uint8_t *block) {
  const float scale = float_from_bits(((const struct any_word *)block)->word),
              offset = float_from_bits(((const struct any_word *)block)[1].word);
  const uint8_t *high = block + 8, *low = high + HIGH_BYTES;
  for (int i = 0; i < GROUP; i++) {
    x[i] = scale * (float)grouped_integer(low + i / 32 * 4 * LOW, high + i / 32 * 4 * HIGH, i % 32) + offset;
  }
}

// --- products with x rounded to int8

#define INTEGERS 1
#define MINIMUMS 1
#define ZERO_POINT 0
#define MAX_QUANT ((1 << BITS) - 1)

INLINE void dot_part(const int tokens, const uint8_t *block, int p, const struct x_group *x, const long pitch, struct part_sum *sum) {
  const uint8_t *high = block + 128 + 64 * HIGH_WORDS * p, *low = block + 128 + 16 * HIGH_BYTES + 64 * LOW_WORDS * p;
  UNROLL for (int j = 0; j < 8; j++) {  // word j has its bits in words j % LOW_WORDS and j % HIGH_WORDS
    w16 w = w16_load(low + 64 * (j % LOW_WORDS));
    if (LOW < 8) w = w16_bits(w, j / LOW_WORDS * LOW, (1 << LOW) - 1);
#if BITS != 2 && BITS != 4 && BITS != 8
    const w16 more = w16_load(high + 64 * (j % HIGH_WORDS));
    w = w16_or(w, w16_bits(more, j / HIGH_WORDS * HIGH - LOW, ((1 << HIGH) - 1) << LOW));
#else
    (void)high;
#endif
    dot_word(tokens, w, x, j, pitch, sum);
  }
}

INLINE v16 part_scale(const uint8_t *block, int p) {
  (void)p;
  return v16_load((const float *)block);
}
INLINE v16 part_minimum(const uint8_t *block, int p) {
  (void)p;
  return v16_sub(v16_set(0.0f), v16_load((const float *)(block + 64)));
}
