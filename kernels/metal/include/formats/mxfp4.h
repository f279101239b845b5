// MXFP4: blocks of 32 columns, 17 bytes: an exponent e, 16 bytes of nibbles as in Q4_0: floats of a sign, two bits of exponent and one of
// mantissa; w = 2^(e - 127) * value. weights.h says what a format header defines.
#define BLOCK 32
#define BLOCK_BYTES 17
#define PLANES 2
#define RUN 16

struct Raw {  // half the bytes of a block; half the scale
  uint2 words;
  float scale;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = BLOCK_OF(row, step, lane);
  const uint e = block[0];
  Raw raw;
  raw.words = words_at_1(block + 1 + lane % BLOCK_LANES * 8);
  raw.scale = as_type<float>(e < 2 ? (e + 1) << 21 : (e - 1) << 23);
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int plane, int four) { return four_fp4(raw.words[four], plane) * float4(raw.scale); }
