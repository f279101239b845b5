// Q4_1: blocks of 32 columns, 20 bytes: half scale, half offset, 16 bytes of nibbles as in Q4_0; w = scale * q + offset. weights.h says
// what a format header defines.
#define BLOCK 32
#define BLOCK_BYTES 20
#define PLANES 2
#define RUN 16

struct Raw {  // half the bytes of a block; scale and offset
  uint2 words;
  half2 line;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = BLOCK_OF(row, step, lane);
  Raw raw;
  raw.words = words_at_4(block + 4 + lane % BLOCK_LANES * 8);
  raw.line = *(device const half2 *)block;
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int plane, int four) {
  return shifted_bits(raw.words[four], 4, 4 * plane, (float)raw.line.x, (float)raw.line.y);
}
