// Q2_K: blocks of 256 columns, 84 bytes: 16 bytes of a scale (low nibble) and a minimum (high nibble) each, of 16 columns; 64 bytes of which
// 32 hold four runs of 32 columns, two bits each, lowest first; half d, half dmin. w = d * scale * q - dmin * minimum. weights.h says what a
// format header defines.
#define BLOCK 256
#define BLOCK_BYTES 84
#define PLANES 4
#define RUN 32

struct Raw {  // of planes 0 and 1, 2 and 3: scale and minimum in bits 0 .. 7 and 16 .. 23; d and dmin
  uint2 words, scales;
  half2 steps;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = BLOCK_OF(row, step, lane);
  const int at = lane % BLOCK_LANES;
  Raw raw;
  raw.words = words_at_4(block + 16 + at * 8);
  raw.scales = words_at_4(block + at / 4 * 8) >> (uint)(at % 4 / 2 * 8);
  raw.steps = *(device const half2 *)(block + 80);
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int plane, int four) {
  const uint both = raw.scales[plane / 2] >> plane % 2 * 16;
  const float scale = (float)raw.steps.x * (float)(both & 15u), minimum = (float)raw.steps.y * (float)(both >> 4 & 15u);
  return shifted_bits(raw.words[four], 2, 2 * plane, scale, -minimum);
}
