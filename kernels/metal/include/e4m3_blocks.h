// What the headers of blocks of e4m3 numbers share. HEAD_BYTES, if a format's blocks are of these: the bytes of the scale before the numbers;
// head_scale(block) gives it.
#pragma once

#ifdef HEAD_BYTES
#define BLOCK_BYTES (HEAD_BYTES + BLOCK)
#define PLANES 1
#define RUN 8

struct Raw {
  uint2 words;
  float scale;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = BLOCK_OF(row, step, lane), *words = block + HEAD_BYTES + lane % BLOCK_LANES * 8;
  Raw raw;
  raw.words = HEAD_BYTES % 4 == 0 ? words_at_4(words) : words_at_1(words);
  raw.scale = head_scale(block);
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int, int four) { return four_e4m3(raw.words[four]) * float4(raw.scale); }
#endif
