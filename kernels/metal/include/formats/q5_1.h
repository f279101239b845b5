// Q5_1: blocks of 32 columns, 24 bytes: half scale, half offset, fifth bits and nibbles as in Q5_0; w = scale * q + offset. weights.h says
// what a format header defines.
#define BLOCK 32
#define BLOCK_BYTES 24
#define PLANES 2
#define RUN 16

struct Raw {  // half the bytes of a block; `high`: the fifth bits, from the share's first column on; scale and offset
  uint2 words;
  uint high;
  half2 line;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = BLOCK_OF(row, step, lane);
  const int first = lane % BLOCK_LANES * 8;
  const uint2 head = words_at_4(block);
  Raw raw;
  raw.words = words_at_4(block + 8 + first);
  raw.high = head.y >> first, raw.line = as_type<half2>(head.x);
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int plane, int four) {
  const uint word = nibbles(raw.words[four], plane) | fifth_bits(raw.high >> (16 * plane + 4 * four));
  return shifted_bytes(word, (float)raw.line.x, (float)raw.line.y);
}
