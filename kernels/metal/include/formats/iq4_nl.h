// IQ4_NL: blocks of 32 columns, 18 bytes as in Q4_0; a nibble is the index of one of sixteen values; w = scale * value. weights.h says what a
// format header defines.
#define BLOCK 32
#define BLOCK_BYTES 18
#define PLANES 2
#define RUN 16

struct Raw {  // half the bytes of a block
  uint2 words;
  half scale;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = BLOCK_OF(row, step, lane);
  Raw raw;
  raw.words = words_at_2(block + 2 + lane % BLOCK_LANES * 8);
  raw.scale = *(device const half *)block;
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int plane, int four) {
  return four_values_iq4(raw.words[four], plane) * float4((float)raw.scale);
}
