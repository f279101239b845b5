// Q5_K: blocks of 256 columns, 176 bytes: half d, half dmin, scales and minimums as in Q4_K; 32 bytes whose bit r is the fifth bit of a column
// of run r of 32; 128 bytes of nibbles as in Q4_K. w = d * scale * q - dmin * minimum. weights.h says what a format header defines.
#define BLOCK 256
#define BLOCK_BYTES 176
#define PLANES 2
#define RUN 32

struct Raw {  // eight bytes; their fifth bits, bit `plane` of each byte
  uint2 words, high;
  RunPair runs;
};
INLINE Raw load_raw(device const uchar *row, int step, int lane) {
  device const uchar *block = BLOCK_OF(row, step, lane);
  const int at = lane % BLOCK_LANES;
  Raw raw;
  raw.words = words_at_4(block + 48 + at * 8);
  raw.high = words_at_4(block + 16 + at % 4 * 8) >> (uint)(at / 4 * 2);
  raw.runs = run_pair_of(uint4(*(device const packed_uint4 *)block), at / 4);
  return raw;
}
INLINE float4 four_weights(thread const Raw &raw, int plane, int four) {
  const uint word = nibbles(raw.words[four], plane) | (raw.high[four] >> plane & 0x01010101u) << 4;
  return shifted_bytes(word, raw.runs.scale[plane], -raw.runs.minimum[plane]);
}
