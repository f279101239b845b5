// MXFP8: blocks of 32 columns, 33 bytes: an exponent e, 32 e4m3 numbers; w = 2^(e - 127) * number, NaN where e is 255. weights.h says what a
// format header defines.
#define BLOCK 32
#define BLOCK_BYTES 33
#define PLANES 1
#define RUN 8

struct Raw {
  uint2 words;
  float scale;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = BLOCK_OF(row, step, lane);
  const uint e = block[0];
  Raw raw;
  raw.words = words_at_1(block + lane % BLOCK_LANES * 8 + 1);
  raw.scale = as_type<float>(e == 255 ? 0x7FC00000u : e == 0 ? 0x400000u : e << 23);
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int, int four) { return four_e4m3(raw.words[four]) * float4(raw.scale); }
