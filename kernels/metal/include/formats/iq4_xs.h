// IQ4_XS: blocks of 256 columns, 136 bytes: half d; two high bits of each of eight scales, in 16 bits; their low nibbles, in 4 bytes; for each
// run of 32 columns 16 bytes of nibbles as in Q4_0, for values as in IQ4_NL. w = d * (scale - 32) * value. weights.h says what a format header
// defines.
#define BLOCK 256
#define BLOCK_BYTES 136
#define PLANES 2
#define RUN 16

struct Raw {  // half the bytes of a run
  uint2 words;
  float scale;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = BLOCK_OF(row, step, lane);
  const int at = lane % BLOCK_LANES, run = at / 2;
  const uint2 head = words_at_4(block);
  const uint scale = (head.y >> 4 * run & 15u) | (head.x >> (16 + 2 * run) & 3u) << 4;
  Raw raw;
  raw.words = words_at_4(block + 8 + at * 8);
  raw.scale = (float)as_type<half2>(head.x).x * (float)((int)scale - 32);
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int plane, int four) {
  return four_values_iq4(raw.words[four], plane) * float4(raw.scale);
}
