// Q3_K: blocks of 256 columns, 110 bytes: 32 bytes whose bit r is the third bit of a column of run r of 32; 64 bytes of two bits as in Q2_K;
// 12 bytes of sixteen scales of six bits, of 16 columns each; half d. w = d * (scale - 32) * (q - 4). Scale s has its low nibble in byte
// s % 8, low nibbles first, and two high bits in byte 8 + s % 4 at bit s / 4 * 2. weights.h says what a format header defines.
#define BLOCK 256
#define BLOCK_BYTES 110
#define PLANES 4
#define RUN 32

struct Raw {  // the third bits, bit `plane` of each byte; scales of planes 0 and 1, 2 and 3 in bits 0 .. 5 and 16 .. 21
  uint2 words, high, scales;
  half d;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = BLOCK_OF(row, step, lane);
  const int at = lane % BLOCK_LANES, part = at / 4;
  const uint down = at % 4 / 2 * 8 + part * 4;
  const uint2 low = words_at_2(block + 96) >> down;
  const uint high = word_at_2(block + 104) >> down;
  Raw raw;
  raw.words = words_at_2(block + 32 + at * 8);
  raw.high = words_at_2(block + at % 4 * 8) >> (uint)(part * 4);
  raw.scales = (low & 0x000F000Fu) | uint2((high & 0x00030003u) << 4, (high & 0x000C000Cu) << 2);
  raw.d = *(device const half *)(block + 108);
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int plane, int four) {
  const uint word = (raw.words[four] >> 2 * plane & 0x03030303u) | (raw.high[four] >> plane & 0x01010101u) << 2;
  const int scale = (int)(raw.scales[plane / 2] >> plane % 2 * 16 & 63u) - 32;
  return scaled_bytes(word, (float)raw.d * (float)scale, 4.0f);
}
