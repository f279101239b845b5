// MXFP8: blocks of 32 columns, 33 bytes: an exponent e, 32 e4m3 numbers (e4m3_blocks.h); w = 2^(e - 127) * number, NaN where e is 255. weights.h
// says what a format header defines.
#define BLOCK 32
#define HEAD_BYTES 1

INLINE float head_scale(device const uchar *block) {
  const uint e = block[0];
  return as_type<float>(e == 255 ? 0x7FC00000u : e == 0 ? 0x400000u : e << 23);
}
