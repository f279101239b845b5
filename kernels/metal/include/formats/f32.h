// F32: [I] float32. weights.h says what a format header defines.
#define BLOCK 1
#define BLOCK_BYTES 4
#define PLANES 1
#define RUN 8

struct Raw {  // eight columns
  float4 fours[2];
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const packed_float4 *at = (device const packed_float4 *)(row + (step * 256 + lane * 8) * 4);
  Raw raw;
  raw.fours[0] = float4(at[0]), raw.fours[1] = float4(at[1]);
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int, int four) { return raw.fours[four]; }
