// Q6_K: blocks of 256 columns, 210 bytes: of each half of 128 columns 64 bytes of nibbles, low ones first; then 32 bytes of each half with two
// high bits of four runs of 32 columns, lowest first; 16 int8 scales, of 16 columns each; half d. w = d * scale * (q - 32). weights.h says
// what a format header defines.
#define BLOCK 256
#define BLOCK_BYTES 210
#define PLANES 2
#define RUN 64

struct Raw {  // eight bytes of nibbles; their high bits, bits 4 * plane and 4 * plane + 1 of each byte; scales of both planes
  uint2 words, high;
  float scale[2];
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = BLOCK_OF(row, step, lane);
  const int at = lane % BLOCK_LANES, part = at / 8;
  device const int8_t *scales = (device const int8_t *)(block + 192 + part * 8 + at % 8 / 2);
  const float d = half_at(block + 208);
  Raw raw;
  raw.words = words_at_2(block + at * 8);
  raw.high = words_at_2(block + 128 + part * 32 + at % 4 * 8) >> (uint)(at % 8 / 4 * 2);
  raw.scale[0] = d * (float)scales[0], raw.scale[1] = d * (float)scales[4];
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int plane, int four) {
  const uint word = nibbles(raw.words[four], plane) | (raw.high[four] >> 4 * plane & 0x03030303u) << 4;
  return scaled_bytes(word, raw.scale[plane], 32.0f);
}
