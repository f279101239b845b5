// FP8_G128: blocks of 128 columns, 132 bytes: float scale, 128 e4m3 numbers; w = scale * number. weights.h says what a format header defines.
#define BLOCK 128
#define BLOCK_BYTES 132
#define PLANES 1
#define RUN 8

struct Raw {
  uint2 words;
  float scale;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = BLOCK_OF(row, step, lane);
  Raw raw;
  raw.words = words_at_4(block + 4 + lane % BLOCK_LANES * 8);
  raw.scale = *(device const float *)block;
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int, int four) { return four_e4m3(raw.words[four]) * float4(raw.scale); }
