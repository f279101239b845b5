// NVFP4_G128: blocks of 128 columns, 76 bytes: float scale; an e4m3 scale of each 16 columns; for each 32 columns 16 bytes of nibbles as in Q4_0,
// for twice the values of MXFP4's; w = scale * e4m3 * value. weights.h says what a format header defines.
#define BLOCK 128
#define BLOCK_BYTES 76
#define PLANES 2
#define RUN 16

struct Raw {
  uint2 words;
  float2 scale;  // of both planes
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = BLOCK_OF(row, step, lane);
  const int at = lane % BLOCK_LANES;
  const float4 scales = four_e4m3((uint) * (device const ushort *)(block + 4 + at / 2 * 2));
  Raw raw;
  raw.words = words_at_4(block + 12 + at * 8);
  raw.scale = *(device const float *)block * float2(scales.x, scales.y);
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int plane, int four) {
  return four_fp4(raw.words[four], plane) * float4(raw.scale[plane]);
}
