// INTb_Gg: blocks of GROUPED columns: float scale, float offset, `high` bytes, `low` bytes. Of every 32 columns, low bytes hold the lowest 2, 4
// or 8 bits, and high bytes the rest, one or two; what a byte holds is 32 / (numbers in a byte) columns apart, lowest first. w = scale * q +
// offset, rounded once (exact where the scale has at most 16 bits, as those of checkpoints have). weights.h says what a format header defines.
#define INTEGER_BITS (WEIGHT / 1000)
#define GROUPED (WEIGHT % 1000)
#define LOW_BITS (INTEGER_BITS >= 8 ? 8 : INTEGER_BITS >= 4 ? 4 : 2)
#define HIGH_BITS (INTEGER_BITS - LOW_BITS)
#define BLOCK GROUPED
#define BLOCK_BYTES (8 + GROUPED / 8 * INTEGER_BITS)
#define PLANES (8 / LOW_BITS)
#define RUN (4 * LOW_BITS < 32 ? 4 * LOW_BITS : 8)
#define THIRTY_TWO (4 / PLANES)  // lanes that share 32 columns

struct Raw {  // low bits; high bits from the share's first column on; scale and offset
  uint2 words, high;
  float2 line;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = BLOCK_OF(row, step, lane), *high = block + 8, *low = high + GROUPED / 8 * HIGH_BITS;
  const int at = lane % BLOCK_LANES, part = at % THIRTY_TWO;
  Raw raw;
  raw.line = float2(*(device const packed_float2 *)block);
  raw.words = words_at_4(low + 8 * at);
  raw.high = uint2(0);
  if (HIGH_BITS == 1) raw.high = uint2(*(device const uint *)(high + at / THIRTY_TWO * 4)) >> (uint)(part * 2);
  if (HIGH_BITS == 2) raw.high = words_at_4(high + at / THIRTY_TWO * 8) >> (uint)(part * 2);
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int plane, int four) {
  const uint word = raw.words[four];
  if (HIGH_BITS == 0 && LOW_BITS == 8) return shifted_bytes(word, raw.line.x, raw.line.y);
  if (HIGH_BITS == 0) return shifted_bits(word, LOW_BITS, LOW_BITS * plane, raw.line.x, raw.line.y);
  const uint low = word >> LOW_BITS * plane & ((1u << LOW_BITS) - 1u) * 0x01010101u;
  const uint high = HIGH_BITS == 1 ? raw.high.x >> (plane * (RUN / 4) + four) & 0x01010101u : raw.high[four] >> plane * 4 & 0x03030303u;
  return shifted_bytes(low | high << LOW_BITS, raw.line.x, raw.line.y);
}
