// Q5_0: blocks of 32 columns, 22 bytes: half scale, 32 bits that are the fifth bits of columns 0 .. 31, 16 bytes of nibbles as in Q4_0;
// w = scale * (q - 16). weights.h says what a format header defines.
#define BLOCK 32
#define BLOCK_BYTES 22
#define PLANES 2
#define RUN 16

struct Raw {  // half the bytes of a block; `high`: the fifth bits, from the share's first column on
  uint2 words;
  uint high;
  half scale;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = BLOCK_OF(row, step, lane);
  const int first = lane % BLOCK_LANES * 8;
  Raw raw;
  raw.words = words_at_2(block + 6 + first);
  raw.high = word_at_2(block + 2) >> first;
  raw.scale = *(device const half *)block;
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int plane, int four) {
  return scaled_bytes(nibbles(raw.words[four], plane) | fifth_bits(raw.high >> (16 * plane + 4 * four)), (float)raw.scale, 16.0f);
}
